"""The library outside of its checkout: installed from a wheel, and as a bare copy of the tree."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import moecost

CHECKOUT = Path(moecost.__file__).parent.parent
DATA = ("gpu_specs", "model_specs")

SCRIPT = """
import json, moecost
from moecost import published
e = moecost.estimate("mixtral-8x7b", "a40", method="qlora", lora_targets=["w1", "w2", "w3", "gate"],
                     dataset="math-14k", sequence_length=1024, epochs=10, software="hf-peft-2024")
full = moecost.estimate("Zyphra/BlackMamba-2.8B", "H100", sequence_length=128)
print(json.dumps({
    "file": moecost.__file__,
    "largest": e.max_micro_batch_size,
    "hours": e.hours,
    "cost": e.cost_usd,
    "quote": e.provenance.price.provider,
    "full": full.step.seconds,
    "counts": [len(moecost.gpus()), len(moecost.models()), len(moecost.nodes()), len(moecost.datasets()),
               len(moecost.software_profiles())],
    "node": moecost.NodeSpec.load("dgx-h100").gpu,
    "published": len(published.throughput_table()),
}))
"""


def run_elsewhere(where: Path, folder: Path) -> dict[str, object]:
    """What the script prints in a fresh process that finds moecost in `where`, started in another folder."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV"))}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        cwd=folder,
        env=env | {"PYTHONPATH": str(where), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, object] = json.loads(run.stdout)
    assert Path(str(found.pop("file"))).is_relative_to(where)
    return found


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The same from the checkout itself."""
    return run_elsewhere(CHECKOUT, tmp_path_factory.mktemp("anywhere"))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a wheel is built from, so that building leaves nothing in the checkout."""
    root = tmp_path_factory.mktemp("tree")
    for name in ("moecost", *DATA):
        shutil.copytree(CHECKOUT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, root / name)
    return root


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(tree)],
        capture_output=True,
        text=True,
        check=False,
    )
    text = run.stdout + run.stderr
    if run.returncode and re.search(r"NewConnectionError|ConnectionError|Temporary failure|No matching distri", text):
        pytest.skip("the build backend cannot be fetched: no network")
    assert run.returncode == 0, text
    (found,) = out.glob("*.whl")
    return found


def test_a_wheel_holds_all_code_and_data(wheel: Path, tree: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {str(p.relative_to(tree)) for p in (tree / "moecost").rglob("*") if p.is_file()}
    for folder in DATA:
        expected |= {f"moecost/{p.relative_to(tree)}" for p in (tree / folder).rglob("*") if p.is_file()}
    assert expected <= names, sorted(expected - names)
    for name in (
        "moecost/py.typed",
        "moecost/gpu_specs/a40.yaml",
        "moecost/gpu_specs/index.yaml",
        "moecost/gpu_specs/prices.csv",
        "moecost/gpu_specs/nodes/dgx-h100.yaml",
        "moecost/model_specs/mixtral-8x7b.yaml",
        "moecost/model_specs/index.yaml",
        "moecost/data/software/hf-peft.yaml",
        "moecost/data/calibrations/hf-peft.yaml",
        "moecost/data/datasets/math-14k.yaml",
        "moecost/data/published/throughput.csv",
        "moecost/data/schemas/job.schema.json",
        "moecost/data/schemas/estimate.schema.json",
    ):
        assert name in names
    outside = {n for n in names if not n.startswith("moecost/") and ".dist-info/" not in n}
    assert not outside, f"a wheel must not spread over site-packages: {sorted(outside)}"
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_a_wheel_works_outside_of_the_checkout(
    wheel: Path, here: dict[str, object], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    site = tmp_path_factory.mktemp("site")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--target",
            str(site),
            str(wheel),
        ],
        check=True,
        capture_output=True,
    )
    assert run_elsewhere(site, tmp_path) == here
    assert here["largest"] == 4


def test_a_bare_copy_of_the_tree_works(tree: Path, here: dict[str, object], tmp_path: Path) -> None:
    assert run_elsewhere(tree, tmp_path) == here


def test_a_copy_without_its_data_says_so(tree: Path, tmp_path: Path) -> None:
    shutil.copytree(tree / "moecost", tmp_path / "moecost")
    run = subprocess.run(
        [sys.executable, "-c", "import moecost; moecost.GPUSpec.load('a40')"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "without its data folder 'gpu_specs'" in run.stderr
