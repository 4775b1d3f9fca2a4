"""What a caller sees: names that are complete, sorted, documented and annotated, and an import that costs little."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest
from pydantic import BaseModel

import moecost
from moecost import Estimate, Job

PUBLIC = [getattr(moecost, name) for name in moecost.__all__]


def test_all_is_sorted_and_exists() -> None:
    assert moecost.__all__ == sorted(moecost.__all__)
    assert len(moecost.__all__) == len(set(moecost.__all__))
    assert all(hasattr(moecost, name) for name in moecost.__all__)


def test_all_is_complete() -> None:
    """What the package imports for its users is what it says it has: no stray names."""
    modules = {m.name for m in pkgutil.iter_modules(moecost.__path__)}
    lazy = {name for name in moecost.__all__ if hasattr(moecost, name)}
    seen = ({name for name in vars(moecost) if not name.startswith("_")} | lazy) - modules - {"annotations"}
    assert seen == {name for name in moecost.__all__ if not name.startswith("_")}


def test_the_promised_names_are_there() -> None:
    promised = {"estimate", "Job", "Estimate", "MeasuredRun", "Calibration", "GPUSpec", "ModelSpec", "NodeSpec",
                "DatasetSpec", "PriceQuote", "SoftwareProfile", "MoECostError", "gpus", "models", "nodes", "datasets",
                "software_profiles"}  # fmt: skip
    assert promised <= set(moecost.__all__)


def test_no_module_has_the_name_of_an_exported_function() -> None:
    modules = {m.name for m in pkgutil.iter_modules(moecost.__path__)}
    assert not modules & set(moecost.__all__)


@pytest.mark.parametrize("item", PUBLIC, ids=moecost.__all__)
def test_every_public_name_is_documented(item: Any) -> None:
    assert inspect.getdoc(item)
    if inspect.isclass(item):
        methods = {n: f for n, f in vars(item).items() if not n.startswith("_") and _is_ours(f)}
        assert not [n for n, f in methods.items() if not inspect.getdoc(f)]


@pytest.mark.parametrize("item", PUBLIC, ids=moecost.__all__)
def test_every_public_name_is_annotated(item: Any) -> None:
    functions = [item] if inspect.isfunction(inspect.unwrap(item)) else []
    if inspect.isclass(item):
        functions += [_function(f) for n, f in vars(item).items() if not n.startswith("_") and _is_ours(f)]
    for function in functions:
        signature = inspect.signature(function)
        bare = [
            p.name for p in signature.parameters.values() if p.annotation is p.empty and p.name not in ("self", "cls")
        ]
        assert not bare, f"{function.__qualname__}: {bare}"
        assert signature.return_annotation is not signature.empty, function.__qualname__


def _function(item: Any) -> Any:
    return item.fget if isinstance(item, property) else getattr(item, "__func__", item)


def _is_ours(item: Any) -> bool:
    function = _function(item)
    return inspect.isfunction(function) and function.__module__.startswith("moecost")


@pytest.mark.parametrize("module", sorted(m.name for m in pkgutil.iter_modules(moecost.__path__)))
def test_every_module_is_documented(module: str) -> None:
    if module != "__main__":
        assert inspect.getdoc(importlib.import_module(f"moecost.{module}"))


FORMULAS = (
    *("roofline", "experts", "cost", "memory", "step", "operators", "lengths", "storage", "flops"),
    *("scaling_laws", "lifetime", "interruptions", "hierarchy", "preference", "serving", "validity"),
)


@pytest.mark.parametrize("module", FORMULAS)
def test_every_formula_is_documented_and_annotated(module: str) -> None:
    found = importlib.import_module(f"moecost.{module}")
    functions = [
        f for n, f in vars(found).items() if inspect.isfunction(f) and f.__module__ == found.__name__ and n[0] != "_"
    ]
    assert functions
    for f in functions:
        signature = inspect.signature(f)
        assert inspect.getdoc(f), f.__name__
        assert all(p.annotation is not p.empty for p in signature.parameters.values()), f.__name__
        assert signature.return_annotation is not signature.empty, f.__name__


def test_results_have_a_json_schema() -> None:
    for model in (Estimate, Job):
        schema = model.model_json_schema()
        assert set(schema["properties"]) == set(model.model_fields)
        json.dumps(schema)


def test_results_are_frozen_and_strict() -> None:
    for item in PUBLIC:
        if inspect.isclass(item) and issubclass(item, BaseModel):
            assert item.model_config.get("frozen"), item
            assert item.model_config.get("extra") == "forbid", item


# ------------------------------------------------------------------------------------------------ a fresh process


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)


def test_import_says_nothing_and_loads_nothing_heavy() -> None:
    run = _python("import sys, moecost; sys.stdout.write(' '.join(sys.modules))")
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert run.stderr == ""
    assert not loaded & {"scipy", "matplotlib", "pandas", "typer", "rich", "click", "IPython", "torch", "requests"}
    assert "moecost" in loaded
    assert _python("import moecost").stdout == ""


def test_an_estimate_loads_nothing_heavy_either() -> None:
    code = (
        "import sys; from moecost import estimate;"
        "e = estimate('mixtral-8x7b', 'a40', method='qlora', sequence_length=512, software='hf-peft-2024');"
        "e.interval('hours'); print('scipy' in sys.modules, 'matplotlib' in sys.modules, e.fits)"
    )
    assert _python(code).stdout.split() == ["False", "False", "True"]


def test_import_reads_no_file_of_ours() -> None:
    """Nothing happens on import: no catalogue, no calibration."""
    code = (
        "import sys\n"
        "seen = []\n"
        "sys.addaudithook(lambda event, args: seen.append(str(args[0])) if event == 'open' else None)\n"
        "import moecost\n"
        "print([p for p in seen if p.endswith(('.yaml', '.csv', '.json'))])"
    )
    assert _python(code).stdout.strip() == "[]"


def test_import_is_quick() -> None:
    """The least of five cold processes: 250 ms is the aim, 400 leaves room for a busy machine."""
    code = "import time; t = time.perf_counter(); from moecost import estimate; print(time.perf_counter() - t)"
    assert min(float(_python(code).stdout) for _ in range(5)) < 0.4


def test_the_package_knows_its_version() -> None:
    assert moecost.__version__ == version("moecost")
