"""Each notebook runs to its last cell, which says what should come out, and is committed with what it shows."""

import json
import re
import runpy
from pathlib import Path

import matplotlib as mpl
import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
RUN = runpy.run_path(str(ROOT / "notebooks" / "run.py"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def cells(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_run_to_what_should_have_come_out(path: Path) -> None:
    """A run of this source, this code and these versions stands in the notebook, or all cells run now."""
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    assert "assert " in "".join(code[-1]["source"])
    source = ["".join(cell["source"]) for cell in code]
    ran = json.loads(path.read_text(encoding="utf-8"))["metadata"].get("ran")
    if ran == RUN["ran"](source):
        return
    with mpl.rc_context({"backend": "agg"}):
        exec(compile("\n".join(source), path.name, "exec"), {"display": str})  # noqa: S102 - our own notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_those_of_this_source_and_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text) <= 400_000
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    order = [cell["execution_count"] for cell in code]
    assert order == list(range(1, len(code) + 1)), "run `make notebooks`"
    outputs = [output for cell in code for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    assert all(output["output_type"] != "error" and output.get("name") != "stderr" for output in outputs)
    for place in (str(ROOT), str(Path.home()), "/site-packages/"):
        assert place not in json.dumps(outputs)
    ran = json.loads(text)["metadata"].get("ran")
    source = ["".join(cell["source"]) for cell in code]
    assert ran["source"] == source, "its source has changed since: run `make notebooks`"
    now = RUN["made_by"]("\n".join(source))
    changed = [name for name in {**ran["made_by"], **now} if ran["made_by"].get(name) != now.get(name)]
    assert changed == [], "what it imports or reads has changed since: run `make notebooks`"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_first_words_name_the_extras_that_its_imports_need(path: Path) -> None:
    code = "".join("".join(cell["source"]) + "\n" for cell in cells(path) if cell["cell_type"] == "code")
    imported = re.findall(r"^(?:from|import) (curvlab\.lab|\w+)", code, re.MULTILINE)
    of_extra = {"lab": {"curvlab.lab", "matplotlib", "pandas"}, "language": {"transformers", "datasets"}}
    needed = [extra for extra, packages in of_extra.items() if packages & set(imported)]
    assert f'`pip install ".[{",".join(needed)}]"`' in "".join(cells(path)[0]["source"])


def test_a_notebook_is_made_by_what_it_imports_and_reads() -> None:
    found = RUN["made_by"]('from curvlab.solvers import Lissa\nread("lissa/fig1/embedded/summary.csv")')
    assert {"src/curvlab/solvers/lissa.py", "src/curvlab/linalg/operator.py"} <= set(found)
    assert "results/lissa/fig1/embedded/summary.csv" in found
    assert not any(name.startswith(("src/curvlab/lab", "src/curvlab/optim")) for name in found)


def test_words_alone_make_no_notebook_stale(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""Says."""\nx = 1  # why\n')
    (tmp_path / "b.py").write_text("x = 1\n")
    (tmp_path / "c.py").write_text("x = 2\n")
    a, b, c = (RUN["what_runs"](tmp_path / f"{name}.py") for name in "abc")
    assert a == b != c


def test_the_picture_of_bad_traces_is_what_its_script_draws() -> None:
    script = ROOT / "docs" / "bad_traces.py"
    kept, now = Image.open(script.with_suffix(".png")).text["made_by"], runpy.run_path(str(script))["made_by"]()
    assert kept == now, "run `python docs/bad_traces.py`"
