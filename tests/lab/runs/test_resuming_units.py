"""Long units that are killed in the middle: they go on from their checkpoint, to the same numbers."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from curvlab.iterate import Checkpoint, CheckpointWarning
from curvlab.lab import start
from curvlab.lab.runs.configuration import Entry, load_config
from curvlab.training import TrainingState, train

NUM_STEPS, EVERY = 48, 10


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    raise KeyboardInterrupt


def compute(
    folder: Path, log: Path, end: int | None = None, how: Callable[[], None] = interrupt
) -> dict[str, Any]:
    """Train with dropout and momentum; write every step to the log, and end at one of them."""

    def seen(state: TrainingState) -> None:
        with log.open("a") as file:
            file.write(f"{state.num_steps}\n")
        if state.num_steps == end:
            how()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
    inputs = torch.randn(60, 5, generator=torch.Generator().manual_seed(1))
    history = train(
        model,
        nn.MSELoss(),
        (inputs, inputs.prod(1, keepdim=True)),
        num_steps=NUM_STEPS,
        batch_size=7,
        lr=0.05,
        schedule="cosine",
        checkpoint=Checkpoint(folder / "training.pt", every=EVERY),
        generator=2,
        callback=seen,
    )
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {"weights": weights, "losses": list(history.step_losses)}


def run_unit(
    place: Path,
    log: Path,
    end: int | None = None,
    how: Callable[[], None] = interrupt,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    os.chdir(place)
    entry = Entry("toy/fig1/target", Path("conf").absolute(), "toy-fig1")
    cfg = load_config(entry, ["tracker=none", "preset=smoke", *overrides])
    with start(cfg, key="toy/fig1", title="a demonstration") as run:
        found = run.unit(
            "toy/trained",
            {"num_steps": NUM_STEPS},
            lambda folder: compute(folder, log, end, how),
            version=1,
            about="training toy, seed 0",
            resumes=True,
        )
        run.save_record()
    return found


FORK = multiprocessing.get_context("fork")  # real processes that start fast: they have what this one imported


def together(*ends: tuple[Any, ...]) -> list[int | None]:
    """Run units with these arguments in processes that are started at once; return how they ended."""
    started = [FORK.Process(target=run_unit, args=arguments) for arguments in ends]
    for each in (*(process.start for process in started), *(process.join for process in started)):
        each()
    return [process.exitcode for process in started]


def steps(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().splitlines()]


def unfinished(checkout: Path) -> list[Path]:
    return list((checkout / ".cache" / "store").rglob("*.unfinished/*/*"))


def whole(tmp_path: Path) -> dict[str, Any]:
    return compute(tmp_path / "whole", tmp_path / "whole.log")


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return torch.equal(found["weights"], expected["weights"]) and found["losses"] == expected["losses"]


def test_a_unit_killed_twice_ends_at_the_same_numbers(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    for end in (25, 33):
        assert together((checkout, log, end, die)) == [-signal.SIGKILL]
    assert [path.name for path in unfinished(checkout)] == ["training.pt"]
    found = run_unit(checkout, log)
    assert steps(log) == [*range(1, 26), *range(21, 34), *range(31, NUM_STEPS + 1)]
    assert same(found, whole(tmp_path))
    assert not list((checkout / ".cache" / "store").rglob("*.unfinished"))
    assert "toy-fig1: training toy, seed 0 (unit 1, resumed)\n" in capsys.readouterr().err
    (record,) = checkout.rglob("run.json")
    (unit,) = json.loads(record.read_text())["units"]
    assert unit["resumed"] is True
    run_unit(checkout, log)  # found in the store now
    assert steps(log).count(NUM_STEPS) == 1


def test_a_damaged_checkpoint_is_named_and_the_unit_starts_afresh(checkout: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(KeyboardInterrupt):
        run_unit(checkout, log, 25)
    (path,) = unfinished(checkout)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.warns(
        CheckpointWarning, match=r"training\.pt is no readable checkpoint \(its checksum is wrong\)"
    ):
        found = run_unit(checkout, log)
    assert steps(log) == [*range(1, 26), *range(1, NUM_STEPS + 1)]
    assert same(found, whole(tmp_path))
    assert not list((checkout / ".cache" / "store").rglob("*.unfinished"))


@pytest.mark.parametrize("change", ["code", "versions", "config", "force"])
def test_what_other_code_or_another_config_has_left_is_not_used(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    log = tmp_path / "log"
    with pytest.raises(KeyboardInterrupt):
        run_unit(checkout, log, 25)
    if change == "code":
        monkeypatch.setattr("curvlab.lab.runs.run.source_hash", lambda: "changed since")
    if change == "versions":
        monkeypatch.setattr("curvlab.lab.runs.run.versions", lambda: {"torch": "changed since"})
    overrides = {"config": ["seed=1"], "force": ["force=true"]}
    found = run_unit(checkout, log, overrides=overrides.get(change, []))
    assert steps(log) == [*range(1, 26), *range(1, NUM_STEPS + 1)]
    assert same(found, whole(tmp_path))
    assert len(unfinished(checkout)) == (change == "config")  # that of the other unit, which may still go on


def test_two_processes_never_share_the_folder(checkout: Path, tmp_path: Path) -> None:
    """Both are started at once: the second waits, and finds the unit stored."""
    log = tmp_path / "log"
    assert together((checkout, log), (checkout, log)) == [0, 0]
    assert steps(log) == list(range(1, NUM_STEPS + 1))
