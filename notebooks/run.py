"""Run the notebooks in place, so that they are committed with what they show: `make notebooks`."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

from curvlab.lab.runs.record import versions
from curvlab.lab.targets.stale import behind

HERE = Path(__file__).resolve().parent
_ALSO_USED = ("transformers", "datasets", "peft", "scipy", "scikit-learn", "matplotlib")  # beside `versions`


def ran(source: list[str]) -> dict[str, Any]:
    """Return what a run of these cells depends on: themselves, our files, the packages."""
    installed = {each.name: each.version for each in metadata.distributions() if each.name in _ALSO_USED}
    return {"source": source, "made_by": made_by("\n".join(source)), "versions": versions() | installed}


def made_by(code: str) -> dict[str, str]:
    """Return a hash of each file that a notebook's outputs depend on: what it imports of ours, what it reads."""
    root = HERE.parent
    tables = [root / "results" / name for name in sorted(set(re.findall(r'"([\w/]+\.csv)"', code)))]
    files = {path.relative_to(root).as_posix(): hash_of(what_runs(path)) for path in behind(code)}
    return files | {path.relative_to(root).as_posix(): hash_of(path.read_bytes()) for path in tables}


def what_runs(path: Path) -> bytes:
    """Return a file's syntax tree without docstrings, so that a change of words makes no notebook stale."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree).encode()


def hash_of(content: bytes) -> str:
    """Return the first digits of a SHA-256."""
    return hashlib.sha256(content).hexdigest()[:12]


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
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    notebook.metadata["ran"] = ran(code)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # tqdm's, of a widget that `dev` lacks
    for each in sys.argv[1:] or sorted(path.stem for path in HERE.glob("*.ipynb")):
        run(HERE / f"{each}.ipynb")
        print(f"notebooks/{each}.ipynb")
