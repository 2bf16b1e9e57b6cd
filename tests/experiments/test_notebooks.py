"""The notebooks' code runs, from the root of the repository, on the committed results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.filterwarnings("ignore:the solver did not reach its tolerance")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_run_in_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    cells = json.loads(path.read_text())["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    names: dict[str, object] = {}
    exec(compile(source, path.name, "exec"), names)  # noqa: S102 - our own notebook
    assert names


def test_notebooks_hold_no_outputs() -> None:
    """Outputs would repeat results that stand under results/, and go stale."""
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text())["cells"]
        assert not any(cell.get("outputs") for cell in cells)
