"""What is read from result folders: commits in words, and damage that is named and never fatal."""

import json
from pathlib import Path
from typing import Any

import pytest

from curvlab.lab.reporting.report import build_report
from curvlab.lab.reporting.results import ResultFolder, read_results

A, B = "3f2a1b9c" + "0" * 32, "a0b1c2d3" + "0" * 32
DONE = {"assembled": {"commit": A, "clean": True}, "judged": {"commit": A, "clean": True}}


def unit(commit: str = A, *, clean: Any = True, count: Any = 1) -> dict[str, Any]:
    return {"name": "lissa/scores", "version": 1, "commit": commit, "clean": clean, "count": count}


@pytest.fixture
def read(results: Path) -> Any:
    """Return a function that gives the folder lissa/fig1/laptop with another run.json."""

    def read(record: object) -> ResultFolder:
        (results / "lissa/fig1/laptop/run.json").write_text(json.dumps(record))
        return next(folder for folder in read_results(results) if folder.anchor == "lissa-fig1-laptop")

    return read


@pytest.mark.parametrize(
    ("units", "text"),
    [
        (
            [unit(B, clean=False, count=3), unit(count=40), unit()],
            "41 units from 3f2a1b9c, 3 from a0b1c2d3 with changes",
        ),
        ([unit()], "1 unit from 3f2a1b9c"),
        ([], "no units of work"),
        ([unit(count=2), unit(clean="unknown")], "2 units from 3f2a1b9c, 1 from 3f2a1b9c, changes unknown"),
        ("commits not recorded", "commits not recorded"),
    ],
)
def test_units_are_counted_by_commit_the_most_first(read: Any, units: object, text: str) -> None:
    folder = read({"units": units, "drawn": {"commit": "unknown"}} | DONE)
    assert folder.problems == ()
    assert folder.commits == {
        "computed": text, "assembled": "3f2a1b9c", "judged": "3f2a1b9c", "drawn": "an unknown commit"
    }  # fmt: skip


def test_a_run_that_was_killed_before_it_was_drawn_is_a_problem(read: Any) -> None:
    folder = read({"units": [unit()]} | DONE)
    assert folder.problems == (
        "results/lissa/fig1/laptop was not drawn: run `make lissa-fig1 PRESET=laptop` again.",
    )


@pytest.mark.parametrize("value", [0, -1.5, True, "text", [None], [[]], [{}], {"a": {"b": []}}])
@pytest.mark.parametrize(
    "key", ["units", "assembled", "judged", "settings", "target", "title", "command", "seeds"]
)
def test_any_value_of_any_key_is_survived(read: Any, results: Path, key: str, value: object) -> None:
    folder = read({"units": [unit()], "drawn": DONE["judged"]} | DONE | {key: value})
    assert set(folder.commits) == {"computed", "assembled", "judged", "drawn"}
    assert all(isinstance(text, str) for text in (folder.target, folder.title, folder.command))


@pytest.mark.parametrize(
    "record", [7, [], {"units": [{"count": 2}]}, {"judged": "me"}, {"settings": [["points", 3]]}]
)
def test_damage_is_named_and_the_page_is_written(read: Any, results: Path, record: object) -> None:
    folder = read(record)
    (problem,) = folder.problems
    assert problem.startswith("results/lissa/fig1/laptop/run.json is damaged (")
    assert problem in build_report(results, papers=results).problems


def test_missing_results_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder 'nowhere' here; make a target first"):
        read_results(tmp_path / "nowhere")
