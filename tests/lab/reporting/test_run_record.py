import json
from pathlib import Path
from typing import Any

import pytest

from curvlab.lab.reporting.run_record import Setting, commit_text, parse_record, read_record

A, B = "3f2a1b9c" + "0" * 32, "a0b1c2d3" + "0" * 32


def unit(commit: str = A, *, clean: Any = True, count: Any = 1) -> dict[str, Any]:
    return {"name": "lissa/scores", "version": 1, "commit": commit, "clean": clean, "count": count}


def test_units_are_counted_by_commit_the_most_first() -> None:
    units = [unit(B, clean=False, count=3), unit(count=40), unit()]
    record = parse_record({"units": units})
    assert record.units == "41 units from 3f2a1b9c, 3 from a0b1c2d3 with changes"
    assert record.problems == ()
    assert parse_record({"units": [unit()]}).units == "1 unit from 3f2a1b9c"
    assert parse_record({"units": []}).units == "no units of work"


def test_one_commit_clean_and_not_counts_apart() -> None:
    record = parse_record({"units": [unit(count=2), unit(clean=False), unit(clean="unknown")]})
    assert record.units == "2 units from 3f2a1b9c, 1 from 3f2a1b9c with changes, 1 from 3f2a1b9c, changes unknown"


@pytest.mark.parametrize("content", [{}, {"units": "commits not recorded"}, {"units": None}])
def test_units_without_commits_say_so(content: dict) -> None:
    record = parse_record(content)
    assert (record.units, record.problems) == ("commits not recorded", ())


def test_judged_and_drawn_stand_apart_from_the_units() -> None:
    steps = parse_record({"judged": {"commit": B, "clean": True}, "drawn": {"commit": "unknown"}}).steps
    assert steps == {"assembled": "not recorded", "judged": "a0b1c2d3", "drawn": "an unknown commit"}


def test_settings() -> None:
    record = parse_record({"settings": [{"name": "points", "ours": [3, 5], "paper": 25}, {"name": "seeds"}]})
    assert record.settings == (Setting("points", [3, 5], 25), Setting("seeds", None, None))
    assert record.problems == ()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"units": 3}, "units is neither a list nor text"),
        ({"units": [unit(), 7]}, "units[1] has no commit"),
        ({"units": [unit(count="many")]}, "units[0] has no count"),
        ({"units": [unit(count=True)]}, "units[0] has no count"),
        ({"units": [unit(count=-1)]}, "units[0] has no count"),
        ({"units": [{"count": 2}]}, "units[0] has no commit"),
        ({"judged": "me"}, "judged has no commit"),
        ({"drawn": {"commit": 5}}, "drawn has no commit"),
        ({"assembled": []}, "assembled has no commit"),
        ({"settings": {"points": 3}}, "settings is no list"),
        ({"settings": [["points", 3]]}, "settings[0] has no name"),
        ({"command": ["make"]}, "command is no text"),
        ({"title": None}, "title is no text"),
    ],
)
def test_damage_is_named_and_never_fatal(content: dict, problem: str) -> None:
    record = parse_record(content)
    assert problem in record.problems
    assert isinstance(record.units, str)


@pytest.mark.parametrize("value", [None, 0, -1.5, True, "text", [], {}, [None], [[]], [{}], {"a": {"b": []}}])
@pytest.mark.parametrize(
    "key", ["units", "assembled", "judged", "drawn", "settings", "target", "title", "command", "key"]
)
def test_any_value_of_any_key_is_survived(key: str, value: object) -> None:
    record = parse_record({key: value})
    assert set(record.steps) == {"assembled", "judged", "drawn"}
    assert isinstance(record.text(key), str)


def test_commit_text() -> None:
    assert [commit_text(A, clean) for clean in (True, False, None)] == [
        "3f2a1b9c",
        "3f2a1b9c with changes",
        "3f2a1b9c, changes unknown",
    ]


def test_file_must_hold_an_object(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"title": "LiSSA"}))
    assert read_record(path).text("title") == "LiSSA"
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"run\.json holds no keys"):
        read_record(path)
