"""run.json: what is written, what is read, and that it names nothing of the machine but its speed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from curvlab.lab.runs.record import Commit, grouped, read_commit, read_record, recorded_units, sign, without_paths


def test_who_judged_and_drew_stands_apart_from_who_computed(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"assembled": {"commit": "aa", "clean": true}}')
    sign(tmp_path, "judged", Commit("bb", True))
    sign(tmp_path, "drawn", Commit("cc", False))
    assert read_record(tmp_path) == {
        "assembled": {"commit": "aa", "clean": True},
        "judged": {"commit": "bb", "clean": True},
        "drawn": {"commit": "cc", "clean": False},
    }


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "missing: its run was stopped, or never made"),
        ("{", "damaged .*run the target again"),
        ("[]", "no keys"),
    ],
)
def test_missing_and_damaged_records_say_what_to_do(tmp_path: Path, content: str | None, text: str) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=text):
        read_record(tmp_path)
    assert recorded_units(tmp_path) is None


def test_a_variation_expects_as_many_units_as_its_preset(tmp_path: Path) -> None:
    (tmp_path / "laptop").mkdir()
    (tmp_path / "laptop" / "run.json").write_text(json.dumps({"num_units": 7}))
    assert recorded_units(tmp_path / "laptop+seed=1") == 7
    assert recorded_units(tmp_path / "smoke") is None


def test_units_are_together_where_all_but_their_sums_is_the_same() -> None:
    unit = {"name": "toy", "commit": "a", "seconds": 1.0, "num_matvecs": 2}
    other = unit | {"commit": "b"}
    assert grouped([unit, other, unit]) == [
        unit | {"count": 2, "seconds": 2.0, "num_matvecs": 4},
        other | {"count": 1},
    ]


def git(*arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_commit_and_cleanliness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    git("init", "-q")
    assert read_commit() == Commit("unknown", "unknown")  # nothing committed yet
    (tmp_path / "code.py").write_text("x = 1\n")
    git("add", "code.py")
    git("commit", "-q", "-m", "first")
    commit = read_commit()
    assert commit == Commit(git("rev-parse", "HEAD"), True)
    assert commit.short == commit.commit[:8]
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "table.csv").write_text("1\n")
    assert read_commit().clean is True  # results are what is made, not what makes
    (tmp_path / "new.py").write_text("")
    assert read_commit().clean is False


def test_without_git_or_repository_it_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert read_commit() == Commit("unknown", "unknown")
    monkeypatch.setenv("PATH", "")
    assert read_commit() == Commit("unknown", "unknown")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/mnt/My Disk/x", "<path>"),
        ("../elsewhere", "<path>"),
        ("~/x", "<path>"),
        ("file:///home/jane/x", "<path>"),
        ("python x.py data.file=/home/jane/x.csv seed=1", "python x.py data.file=<path> seed=1"),
        ("a=[/home/jane/x,../y] b", "a=[<path>,<path>] b"),
        ("results/lissa/fig1", "results/lissa/fig1"),
        ("./data", "./data"),
        ("train/test, 1/2 and / or", "train/test, 1/2 and / or"),
        ("https://example.org/x/y", "https://example.org/x/y"),
    ],
)
def test_only_paths_of_the_machine_leave(text: str, expected: str) -> None:
    assert without_paths({"a": [text]}) == {"a": [expected]}


def test_numbers_stay() -> None:
    assert without_paths({"a": [1, 2.5, None, True]}) == {"a": [1, 2.5, None, True]}
