"""Imports point one way: data flows from specs over jobs and formulas to results, and never back."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import moecost

ROOT = Path(moecost.__file__).parent

# A module imports from the lines above it, or from what stands before it in its own line. A new module gets a place.
LAYERS: list[list[str]] = [
    ["errors", "units", "arrays"],
    [
        "validity",
        "sources",
        "quantities",
        "storage",
        "lengths",
        "roofline",
        "experts",
        "coefficients",
        "communication",
        "cost",
        "workload",
        "schedule",
        "published",
        "scaling_laws",
        "interruptions",
        "hierarchy",
        "lifetime",
        "preference",
    ],
    ["spec_files", "checked", "field_docs", "specs", "catalog"],
    ["components", "parameters", "flops"],
    [
        "hub.reader",
        "hub.vision",
        "hub.decoder",
        "hub.families",
        "hub.hybrids",
        "hub.recent",
        "hub.irregular",
        "hub.reading",
        "hub",
    ],
    ["probe_record", "software", "dataset_spec", "architecture", "calibration"],
    ["adaptation", "footprint", "operators", "step", "memory"],
    ["job", "topology", "layouts", "results", "resolution", "advice", "estimation"],
    [
        "prices.rows",
        "prices.names",
        "prices.tables",
        "prices.own",
        "prices.skypilot",
        "prices.gpuhunt_tables",
        "prices.book",
        "prices.gpuhunt_live",
        "prices",
        "READERS",
    ],
    ["progress", "sweep_axes", "sweep_figures", "sweep_blocks", "sweep_files", "sweeping"],
    ["plan_layouts", "plan_offers", "plan_stacks", "plan_figures", "plan_table", "plan_search", "planning"],
    ["kernel_timings", "fitting", "validation_report", "validation", "orderings", "comparing"],
    ["accuracy", "equivalents", "serving"],
    ["watching", "callback"],
    [
        *("probe.tasks", "probe.mixtures", "probe.clock", "probe.collectives", "probe.laws", "probe.implied"),
        *("probe.machine", "probe.training", "probe"),
    ],
    ["report", "comparison_report", "sweep_report", "plan_report", "plotting", "page"],
    ["cli_prices", "cli_plan", "cli_probe", "cli", "__main__"],
    ["__init__"],
]
ORDER = [name for layer in LAYERS for name in layer]
READERS = ("recipe", "run_", "trainer", "log_", "measure")
"""Modules that read what training tools write stand in one place, and may import each other in no circle."""

# Formulas: plain numbers in, plain numbers out.
FORMULAS = frozenset(
    {
        *("units", "arrays", "coefficients", "quantities", "storage", "lengths", "roofline", "experts"),
        *("communication", "cost", "workload", "components", "parameters", "flops", "operators", "step", "memory"),
        *("adaptation", "footprint", "schedule"),
        *("validity", "scaling_laws", "lifetime", "interruptions", "hierarchy", "preference"),
    }
)
PROFILE_READERS = frozenset({"operators", "step", "memory", "adaptation"})
"""Formulas that take a software profile, and import its type."""

# Imports inside functions that reach up: a class that loads itself from the catalogue, a result that prints itself.
UPWARD = frozenset(
    {
        ("specs", "catalog"),
        ("architecture", "software"),
        *(("results", name) for name in ("report", "plotting", "page")),
        *(("comparing", name) for name in ("comparison_report", "plotting")),
        *(("sweeping", name) for name in ("sweep_report", "plotting")),
        *(("planning", name) for name in ("plan_report", "plotting")),
        ("job", "recipes"),
    }
)
LAZY = {
    "scipy": {"fitting", "published", "kernel_timings", "probe.implied"},
    "torch": {"callback", "probe.clock", "probe.mixtures", "probe.collectives", "probe.training"},
    "transformers": {"probe.training"},
    "peft": {"probe.training"},
    "bitsandbytes": {"probe.clock", "probe.training"},
    "matplotlib": {"plotting", "validation_report"},
    "pandas": {"sweep_files", "comparing", "planning"},
    "pyarrow": {"sweep_files"},
    "gpuhunt": {"prices.gpuhunt_live"},
}
"""Heavy packages, who may import them, and only inside of functions."""
AT_THE_TOP = {
    "pydantic": None,  # anywhere but in formulas
    "numpy": None,
    "yaml": {"spec_files", "calibration"},
    "typer": {"cli"},
    "click": {"cli"},
}
ONLY_CLI = frozenset({"typer", "rich", "click"})


class Import(NamedTuple):
    by: str
    what: str
    inside_a_function: bool
    line: int


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        found[name] = path
    return found


@cache
def imports() -> tuple[Import, ...]:
    return tuple(i for name, path in modules().items() for i in _imports(name, ast.parse(path.read_text())))


def _imports(by: str, tree: ast.AST, inside: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (Import(by, _ours(alias.name), inside, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{by}: imports are absolute"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                is_module = name.removeprefix("moecost.") in modules()
                yield Import(by, _ours(name if is_module else str(node.module)), inside, node.lineno)
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _imports(by, node, inside or function)


def _ours(name: str) -> str:
    """Modules of ours without the package's name in front, marked by a dot."""
    return "." + (name.removeprefix("moecost.") if name != "moecost" else "__init__") if _is_ours(name) else name


def _is_ours(name: str) -> bool:
    return name == "moecost" or name.startswith("moecost.")


def place(module: str) -> int | None:
    if module in ORDER:
        return ORDER.index(module)
    return ORDER.index("READERS") if module.startswith(READERS) else None


def test_every_module_has_its_place() -> None:
    assert len(ORDER) == len(set(ORDER))
    missing = sorted(name for name in modules() if place(name) is None)
    assert not missing, f"say in ORDER where these stand: {missing}"


def _points_down(i: Import) -> bool:
    by, what = place(i.by), place(i.what[1:])
    if by is None or what is None:
        return True  # the test above says so
    if i.inside_a_function and ((i.by, i.what[1:]) in UPWARD or (i.by, i.what) == ("cli", ".__init__")):
        return True
    return what < by or (what == by == ORDER.index("READERS") and i.what[1:] != i.by)


def test_imports_point_down() -> None:
    wrong = [
        f"{i.by} line {i.line} imports {i.what[1:]}" for i in imports() if i.what[0] == "." and not _points_down(i)
    ]
    assert not wrong, wrong


def test_no_circles() -> None:
    """Of imports on loading: graphlib sorts them, or names the circle."""
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for i in imports():
        if i.what[0] == "." and not i.inside_a_function and i.what[1:] != i.by.split(".")[0]:
            graph[i.by].add(i.what[1:])
    assert len(tuple(graphlib.TopologicalSorter(graph).static_order())) == len(modules())


def test_formulas_know_no_pydantic_and_no_files() -> None:
    banned = ("pydantic", "yaml", "json", "csv", "pathlib", "io", "os", "importlib", "typer", "rich")
    wrong = [
        f"{i.by} line {i.line}: {i.what}" for i in imports() if i.by in FORMULAS and i.what.split(".")[0] in banned
    ]
    calls = [
        f"{name}: {node.func.id}()"
        for name in FORMULAS & set(modules())
        for node in ast.walk(ast.parse(modules()[name].read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("open", "print", "input")
    ]
    assert not wrong, wrong
    assert not calls, calls


def test_formulas_rest_on_formulas() -> None:
    """And on errors; the profile's type is the one exception. So a formula can be used without any spec."""
    allowed = FORMULAS | {"errors"}
    wrong = [
        f"{i.by} line {i.line}: {i.what[1:]}"
        for i in imports()
        if i.by in FORMULAS
        and i.what.startswith(".")
        and i.what[1:] not in allowed
        and not (i.by in PROFILE_READERS and i.what == ".software")
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("package", LAZY)
def test_heavy_packages_are_imported_where_they_are_used(package: str) -> None:
    wrong = [
        f"{i.by} line {i.line}"
        for i in imports()
        if i.what.split(".")[0] == package and (not i.inside_a_function or i.by not in LAZY[package])
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("package", [name for name, users in AT_THE_TOP.items() if users])
def test_few_modules_read_files_or_the_command_line(package: str) -> None:
    users = AT_THE_TOP[package] or set()
    wrong = [f"{i.by} line {i.line}" for i in imports() if i.what.split(".")[0] == package and i.by not in users]
    assert not wrong, wrong


PRESENTATION = ("cli", "report", "comparison_report", "sweep_report", "plan_report", "plotting", "page")


def test_the_library_knows_nothing_of_its_presentation() -> None:
    """Results print and draw themselves, inside of their methods; the command line stands above all."""
    users = {(i.by, i.what[1:], i.inside_a_function) for i in imports() if i.what[1:] in PRESENTATION}
    below = {u for u in users if u[0] not in (*PRESENTATION, "__main__", "__init__")}
    assert all((by, what) in UPWARD and inside for by, what, inside in below)
    assert not any(
        i.what.split(".")[0] in ONLY_CLI for i in imports() if i.by not in ("cli", "__main__", "report", "progress")
    )


def test_estimation_does_not_know_of_fitting() -> None:
    users = {i.by for i in imports() if i.what == ".fitting"}
    assert users <= {"cli", "validation", "orderings", "probe"}


def test_the_parser_sees_imports() -> None:
    """Of known ones, each kind: so that an empty list of wrong ones means something."""
    found = {(i.by, i.what, i.inside_a_function) for i in imports()}
    assert ("step", ".operators", False) in found
    assert ("fitting", ".cost", False) in found  # from moecost import cost
    assert ("fitting", "scipy.optimize", True) in found
    assert ("results", ".report", True) in found
    assert ("calibration", "yaml", False) in found
    assert len(found) > 150
