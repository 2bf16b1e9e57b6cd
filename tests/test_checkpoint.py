"""Unfinished work on disk: atomic, only for the work that wrote it, and rarely."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from curvlab import checkpoint
from curvlab.checkpoint import Checkpoint, CheckpointWarning


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    place = Checkpoint(tmp_path / "deep" / "work.pt", {"lr": 0.1})
    assert place.load() is None
    place.save({"weights": torch.arange(3.0), "steps": 7, "nested": [{"name": "a", "none": None}]})
    place.save({"weights": torch.arange(4.0), "steps": 8, "nested": []})
    found = Checkpoint(tmp_path / "deep" / "work.pt", {"lr": 0.1}).load()
    assert torch.equal(found["weights"], torch.arange(4.0))
    assert found["steps"] == 8
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["work.pt"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    place = Checkpoint(tmp_path / "work.pt", {})
    place.save({"steps": 1})
    with pytest.raises(AttributeError):
        place.save({"steps": lambda: None})  # cannot be pickled
    assert place.load() == {"steps": 1}


def test_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "work.pt"
    Checkpoint(path, {"lr": 0.1, "seed": 1}).save({})
    with pytest.raises(ValueError, match=r"belongs to other work \(lr differ\): give each its own checkpoint"):
        Checkpoint(path, {"lr": 0.2, "seed": 1}).load()
    with pytest.raises(ValueError, match="checkpoint_every must be at least 1"):
        Checkpoint(path, {}, every=0)


def test_a_setting_may_be_a_function_that_is_called_when_it_is_needed(tmp_path: Path) -> None:
    def refuse() -> str:
        raise AssertionError("there is no file, and nothing to save")

    place = Checkpoint(tmp_path / "work.pt", {"data": refuse})
    assert place.load() is None
    assert not place.due(1)
    Checkpoint(tmp_path / "work.pt", {"data": lambda: "ab"}).save({"steps": 1})
    assert Checkpoint(tmp_path / "work.pt", {"data": "ab"}).load() == {"steps": 1}
    with pytest.raises(ValueError, match=r"\(data differ\)"):
        Checkpoint(tmp_path / "work.pt", {"data": lambda: "cd"}).load()


@pytest.mark.parametrize("damage", ["cut", "empty", "foreign"])
def test_a_file_that_cannot_be_read_is_named_and_put_aside(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "work.pt"
    Checkpoint(path, {}).save({"steps": 1})
    content = {"cut": path.read_bytes()[:-5], "empty": b"", "foreign": b"a file of the user's own"}[damage]
    path.write_bytes(content)
    place = Checkpoint(path, {})
    with pytest.warns(
        CheckpointWarning, match=r"work\.pt is no readable checkpoint .*: it is now work\.pt\.damaged"
    ):
        assert place.load() is None
    place.save({"steps": 2})
    assert place.load() == {"steps": 2}
    assert (tmp_path / "work.pt.damaged").read_bytes() == content


class Clock:
    """Time that passes when it is told to; a write takes `seconds_to_write`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds_to_write: float = 0.0) -> None:
        self.now = 0.0
        monkeypatch.setattr(checkpoint.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(checkpoint, "write_atomically", lambda path, content: self.advance(seconds_to_write))

    def advance(self, seconds: float) -> None:
        self.now += seconds


def test_saves_are_due_every_minute_and_by_steps_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    place, by_steps = Checkpoint("work.pt", {}), Checkpoint("work.pt", {}, every=100)
    assert [step for step in range(1, 301) if by_steps.due(step)] == [100, 200, 300]
    assert not any(place.due(step) for step in range(1, 301))
    clock.advance(60.0)
    assert place.due(7)
    assert by_steps.due(7)
    place.save({})
    assert not place.due(8)


@pytest.mark.parametrize("seconds_to_write", [0.1, 1.0, 20.0])
def test_saving_takes_little_of_the_time_however_large_the_state(
    monkeypatch: pytest.MonkeyPatch, seconds_to_write: float
) -> None:
    clock = Clock(monkeypatch, seconds_to_write)
    place, saves = Checkpoint("work.pt", {}), 0
    for step in range(20_000):
        clock.advance(1.0)
        if place.due(step):
            place.save({})
            saves += 1
    assert saves >= 15
    assert saves * seconds_to_write <= 0.022 * clock.now  # what the first save takes is not known before it
