"""The notebooks of the examples run, show what they are kept with, and hold nothing of the machine that ran them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
from nbformat import NotebookNode

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
MOST_BYTES = 400_000
"""A notebook that is larger is no longer read, in a review or on a page."""


@pytest.fixture(scope="module")
def script(tool: Callable[[str], ModuleType]) -> ModuleType:
    return tool("run_notebooks")


def shown(notebook: NotebookNode) -> list[list[tuple[str, list[str]]]]:
    """What each cell shows: the kinds of its outputs."""
    return [
        [(output.output_type, sorted(output.get("data", {}))) for output in cell.get("outputs", [])]
        for cell in notebook.cells
    ]


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS] == ["budget.ipynb", "mixture_or_dense.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_is_kept_with(path: Path, script: ModuleType, tmp_path: Path) -> None:
    kept = nbformat.read(path, as_version=4)
    found = script.run(path, tmp_path)  # an error in a cell raises
    assert shown(found) == shown(kept), "run `python tools/run_notebooks.py`"
    assert not [o for cell in found.cells for o in cell.get("outputs", []) if o.get("name") == "stderr"]
    if path.stem == "budget":
        assert "Mixtral" in found.cells[0].source
        assert (tmp_path / "budget-report.html").stat().st_size > 10_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_says_nothing_of_a_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text) < MOST_BYTES
    assert not re.findall(r"/(?:work|tmp|home|root|Users)/|[A-Z]:\\\\", text)
    kept = nbformat.read(path, as_version=4)
    nbformat.validate(kept)
    assert set(kept.metadata) == {"kernelspec", "language_info"}
    code = [cell for cell in kept.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [cell for cell in kept.cells if cell.metadata]
