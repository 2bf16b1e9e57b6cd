"""A checkout written for the test: which files a result is made by, and which of them have changed since."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from curvlab.lab import Target
from curvlab.lab.targets import stale

FILES = {
    "experiments/toy/fig1.py": "from typing import TYPE_CHECKING\nfrom curvlab.lab import Target\nimport json\n"
    "from curvlab.tools import solve\nfrom experiments.shared import stats\nif TYPE_CHECKING:\n"
    "    from curvlab.tools.plot import draw\n",
    "experiments/shared/stats.py": "from . import other\n",
    "experiments/shared/other.py": "",
    "src/curvlab/lab/__init__.py": "",
    "src/curvlab/lab/models/__init__.py": "from curvlab.lab.models.mlp import MLP\n",
    "src/curvlab/lab/models/mlp.py": "class MLP: ...\n",
    "src/curvlab/lab/runs/run.py": "from curvlab.tools.plot import draw\n",
    "src/curvlab/tools/__init__.py": "from .solver import solve\nfrom curvlab.tools.plot import draw\n",
    "src/curvlab/tools/solver.py": "def solve():\n    from curvlab.tools.deep import inner\n    return inner\n",
    "src/curvlab/tools/deep.py": "from curvlab.lab.runs.run import Run\ninner = 1\n",
    "src/curvlab/tools/plot.py": "draw = 2\n",
}
MADE_BY = [
    "experiments/shared/other.py",
    "experiments/shared/stats.py",
    "experiments/toy/fig1.py",
    "src/curvlab/lab/models/mlp.py",
    "src/curvlab/tools/deep.py",
    "src/curvlab/tools/solver.py",
]
CONFIG = {
    "tasks": {"a": {"model": {"_target_": "curvlab.lab.models.MLP", "width": 3}}, "b": [{"_target_": "x.Y"}]}
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for module in ("stale", "target"):
        monkeypatch.setattr(f"curvlab.lab.targets.{module}.ROOT", tmp_path)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for cached in (stale._changed_since, stale._imports, stale._tree, stale._file_of):
        cached.cache_clear()


@pytest.fixture
def commit(checkout: Path) -> Callable[[], str]:
    """Return a function that commits all there is, and gives the hash."""

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *who, *arguments], cwd=checkout, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")

    def commit() -> str:
        git("add", ".")
        git("commit", "-q", "--allow-empty", "-m", "x")
        return git("rev-parse", "HEAD")

    return commit


TARGET = Target("experiments.toy.fig1", title="toy")


def test_a_result_is_made_by_what_its_target_imports_and_its_config_names(checkout: Path) -> None:
    # By way of a package's __init__ to where the name is defined; no bookkeeping, no types, no other packages.
    assert [path.relative_to(checkout).as_posix() for path in stale.made_by(TARGET, CONFIG)] == MADE_BY


@pytest.mark.parametrize("name", [*MADE_BY, "src/curvlab/tools/plot.py", "src/curvlab/lab/runs/run.py"])
def test_only_a_change_of_those_files_makes_it_stale(checkout: Path, commit: Callable[[], str], name: str) -> None:
    made = {"commit": commit(), "clean": True}
    record = {"units": [{"name": "toy/unit", "count": 3} | made], "assembled": made, "config": CONFIG}
    (checkout / name).write_text(FILES[name] + "other = 1\n")
    if name in MADE_BY:
        line = f"3 x toy/unit, its tables from {made['commit'][:8]}: {name}"
        assert stale.stale_parts(TARGET, record) == [line]
        record["assembled"] = {"commit": "0" * 40, "clean": False}
        unknown = "its tables from 00000000 with changes: git does not know this commit"
        assert stale.stale_parts(TARGET, record)[1] == unknown
    else:
        assert stale.stale_parts(TARGET, record) == []


def test_stale_results_are_printed(
    checkout: Path, commit: Callable[[], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkout / "results/toy/fig1/embedded"
    folder.mkdir(parents=True)
    monkeypatch.setattr(stale, "published", lambda: [(TARGET, folder)])
    record = {"units": "commits not recorded", "assembled": {"commit": commit(), "clean": True}}
    (folder / "run.json").write_text(json.dumps(record))
    assert stale.print_stale() == 0
    assert capsys.readouterr().out.startswith("No published result is stale.\n")
    (checkout / "experiments/shared/stats.py").write_text("")
    forget()
    assert stale.print_stale() == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == folder.as_posix()
    assert printed[1].startswith("  its tables from ")
    assert printed[2] == "1 stale result."
