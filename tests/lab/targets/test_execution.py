"""Judging and drawing from files alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from curvlab.lab.reporting import load_claims
from curvlab.lab.targets.execution import draw_again, judge_again
from curvlab.lab.targets.target import published, result_folders

KEY = "rank1/fig1"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A result folder <root>/rank1/fig1/embedded, at smoke scale."""
    from curvlab.lab import all_targets, load_config, run_target

    root = tmp_path_factory.mktemp("again")
    folders = [f"results.root={root / 'results'}", f"store.root={root / 'store'}"]
    cfg = load_config(all_targets()[KEY], ["preset=smoke", "tracker=none", "progress=false", *folders])
    folder = run_target(all_targets()[KEY], cfg)
    return folder.rename(folder.with_name("embedded"))


@pytest.fixture
def result(made: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "results" / KEY / "embedded"
    shutil.copytree(made, folder)
    return folder


def test_judging_and_drawing_give_the_same_again(result: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in result.iterdir()}
    for path in result.iterdir():
        if path.suffix == ".png" or path.name == "claims.json":
            path.unlink()
    monkeypatch.setattr("curvlab.lab.runs.run.Run.unit", None)  # nothing is computed
    assert judge_again([str(result)]) == 0
    assert draw_again([str(result)]) == 0
    assert {path.name: path.read_bytes() for path in result.iterdir()} == before


def test_verdicts_follow_the_tables(result: Path) -> None:
    verdicts = [claim.verdict for claim in load_claims(result)]
    for path in result.glob("*.csv"):
        table = pd.read_csv(path)
        numbers = table.select_dtypes("float").columns
        table[numbers] = 1e9
        table.to_csv(path, index=False)
    assert judge_again([str(result)]) == 0
    assert [claim.verdict for claim in load_claims(result)] != verdicts


def test_a_damaged_folder_is_named_and_the_others_go_on(result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = result.with_name("laptop")
    shutil.copytree(result, other)
    (result / "summary.csv").unlink()
    assert judge_again([str(result), str(other)]) == 1
    printed = capsys.readouterr()
    assert "cannot judge it" in printed.err
    assert "has no summary.csv" in printed.err
    assert printed.out == f"{other.as_posix()}\n"


def test_results_are_found_by_name_and_path(result: Path) -> None:
    root = result.parents[2]
    for preset in ("smoke", "embedded+seed=1"):
        shutil.copytree(result, result.with_name(preset))
    assert [folder.name for _, folder in result_folders(["rank1-fig1"], root)] == [
        "embedded",
        "embedded+seed=1",
        "smoke",
    ]
    assert [(target.key, folder) for target, folder in published(root)] == [(KEY, result)]
