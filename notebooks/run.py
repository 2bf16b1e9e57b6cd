"""Run the notebooks in place, so that they are committed with what they show: `make notebooks`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def run(path: Path) -> None:
    """Run one notebook; what it ran is kept beside its outputs, so that a change of the source is noticed."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata = {}
    NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(HERE)}}, record_timing=False
    ).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":  # progress bars are no result
            cell.outputs = [each for each in cell.outputs if "\r" not in each.get("text", "")]
    notebook.metadata["ran"] = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    nbformat.write(notebook, path)


if __name__ == "__main__":
    os.environ["PYTHONWARNINGS"] = "ignore"  # torch's own, about its tracing compiler
    for each in sys.argv[1:] or sorted(path.stem for path in HERE.glob("*.ipynb")):
        run(HERE / f"{each}.ipynb")
        print(f"notebooks/{each}.ipynb")
