"""Unfinished work on disk: atomic, and only for the work that wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from curvlab.training import Checkpoint, checkpoint, fingerprint


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    place = Checkpoint(tmp_path / "deep" / "work.pt", {"lr": 0.1})
    assert place.load() is None
    place.save({"weights": torch.arange(3.0), "steps": 7, "nested": [{"name": "a", "none": None}]})
    place.save({"weights": torch.arange(4.0), "steps": 8, "nested": []})
    found = Checkpoint(tmp_path / "deep" / "work.pt", {"lr": 0.1}).load()
    assert torch.equal(found["weights"], torch.arange(4.0))
    assert found["steps"] == 8
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["work.pt"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Checkpoint(tmp_path / "work.pt", {})
    place.save({"steps": 1})
    with pytest.raises(AttributeError):
        place.save({"steps": lambda: None})  # cannot be pickled
    assert place.load() == {"steps": 1}


def test_other_settings_and_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "work.pt"
    Checkpoint(path, {"lr": 0.1, "seed": 1}).save({})
    with pytest.raises(ValueError, match=r"belongs to other work \(lr differ\): give each its own checkpoint"):
        Checkpoint(path, {"lr": 0.2, "seed": 1}).load()
    torch.save({"weights": 1}, path)
    with pytest.raises(ValueError, match="is no checkpoint: give the checkpoint a place of its own"):
        Checkpoint(path, {}).load()
    path.write_bytes(b"half of a fi")
    with pytest.raises(ValueError, match=r"is damaged .* delete it, and its work starts anew"):
        Checkpoint(path, {}).load()
    with pytest.raises(ValueError, match="checkpoint_every must be at least 1"):
        Checkpoint(path, {}, every=0)


def test_saves_are_due_by_steps_and_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: clock[0])
    place = Checkpoint(tmp_path / "work.pt", {}, every=100)
    assert [step for step in range(1, 301) if place.due(step)] == [100, 200, 300]
    clock[0] = 61.0
    assert place.due(7)
    place.save({})
    assert not place.due(8)


def test_a_fingerprint_is_of_values_shapes_and_types() -> None:
    base = torch.arange(6.0)
    others = [base + 1, base.view(2, 3), base.double(), base.bfloat16(), base.bool()]
    prints = {fingerprint(tensor) for tensor in [base, *others]}
    assert len(prints) == 6
    assert fingerprint(base.view(2, 3).T.contiguous().T) == fingerprint(base.view(2, 3))
    assert fingerprint() == fingerprint()
    assert fingerprint(torch.tensor(1.0)) != fingerprint(torch.tensor(2.0))
