"""Run the notebooks of the examples and keep their outputs, without what differs from run to run.

python tools/run_notebooks.py            # after a notebook or a figure in it changed
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent.parent / "examples"
TIMEOUT = 120
"""Of a cell. [s]"""


def run(path: Path, folder: Path) -> NotebookNode:
    """The notebook with its outputs as they are now; what its cells write goes to `folder`.

    Raises
    ------
    nbclient.exceptions.CellExecutionError : a cell fails; the message holds it and its traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=TIMEOUT, kernel_name="python3", resources={"metadata": {"path": folder}})
    return steady(client.execute())


def steady(notebook: NotebookNode) -> NotebookNode:
    """Without times, versions and names of the machine that ran it, and without text that nobody sees."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        for output in cell.get("outputs", []):
            output.pop("metadata", None)
            if output.output_type in ("display_data", "execute_result"):
                output.metadata = {}
                if len(output.data) > 1:  # shown as a picture or as HTML; the text beside it is a long repr
                    output.data["text/plain"] = ""
    return notebook


def main() -> int:
    for path in sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(run(path, Path(folder)), path)
        print(f"written: {path}, {path.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
