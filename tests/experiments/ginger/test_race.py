"""The parts of the race: equal budgets, divergence, and what a training records."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from curvlab.lab import Run, all_targets, load_config, runs, task_settings
from curvlab.lab.runs import Store
from curvlab.training import Learner, StepInfo, TrainingBatch, shared_curvature_step
from experiments.ginger.race.final import final_run
from experiments.ginger.race.optimizers import (
    why_unavailable,
)
from experiments.ginger.race.racers import Racer
from experiments.ginger.race.task import RaceTask, load_race_task
from experiments.ginger.race.training import trained
from experiments.ginger.race.tuning import round_sizes, seeds_and_steps, tune

GINGER = {"optimizer": "ginger", "labels": "sampled", "scope": "global", "momentum": 0.9, "decay": 0.99}


@pytest.fixture
def race(tmp_path: Path) -> Iterator[tuple[Run, RaceTask, Any]]:
    """Return an open run, its task and the task's settings, at smoke scale."""
    target = all_targets()["ginger/tab1"]
    folders = [f"results.root={tmp_path / 'results'}", f"store.root={tmp_path / 'store'}"]
    cfg = load_config(target, ["preset=smoke", "tracker=none", "progress=false", *folders])
    ((name, settings),) = task_settings(cfg).items()
    with runs.start(cfg, key=target.key, title=target.title) as run:
        yield run, load_race_task(run, name, settings), settings


def racer(name: str = "adam", **changes: Any) -> Racer:
    settings = {"optimizer": "adam", "momentum": 0.9, "decay": 0.99}
    fields: dict[str, Any] = {"label": name, "kind": "paper", "settings": settings, "candidates": ({},)}
    fields |= {"ranks": (None,), "tuned_as": name, "batch_factor": 1, "epoch_factor": 1}
    return Racer(name=name, **(fields | changes))


# ----------------------------------------------------------------------------------------- the budget
def test_rounds_shrink_by_one_factor_to_the_finalists() -> None:
    assert round_sizes(40, 3) == [40, 9, 2]
    assert round_sizes(8, 3) == [8, 4, 2]
    assert round_sizes(2, 3) == [2, 2, 2]
    assert round_sizes(1, 2) == [1, 1]
    assert round_sizes(5, 1) == [5]


@pytest.mark.parametrize(
    ("share", "expected"), [(10.0, (1, 10)), (100.0, (1, 100)), (250.0, (3, 83)), (0.2, (1, 1))]
)
def test_what_is_longer_than_a_final_run_goes_into_seeds(share: float, expected: tuple[int, int]) -> None:
    assert seeds_and_steps(share, 100) == expected


def test_every_racer_tunes_with_the_same_number_of_gradients(race: tuple[Run, RaceTask, Any]) -> None:
    run, task, settings = race
    settings.tuning, settings.num_epochs = {"num_gradients": 240, "num_rounds": 3}, 20
    candidates = ({"damping": 0.1, "clip": None}, {"damping": 1.0, "clip": None})
    spent = {}
    for one in (
        racer(),
        racer("two", batch_factor=2),
        racer("ginger", settings=GINGER, candidates=candidates, ranks=(1, 2)),
    ):
        tuned = tune(run, task, one, settings)
        spent[one.name] = sum(row["gradients"] for row in tuned.rows)
        assert sum(row["chosen"] for row in tuned.rows) == 1
        chosen = next(row for row in tuned.rows if row["chosen"])
        assert chosen["validation_loss"] == min(r["validation_loss"] for r in tuned.rows if r["round"] == 3)
        assert tuned.chosen == {**chosen["candidate"], "lr": chosen["lr"]}
    assert spent == pytest.approx(dict.fromkeys(spent, 240), rel=0.08)  # whole steps


def test_a_setting_that_diverges_is_chosen_last(race: tuple[Run, RaceTask, Any]) -> None:
    run, task, settings = race
    settings.lrs = [1e9, 0.05]
    plain = racer("momentum", settings={"optimizer": "momentum", "momentum": 0.9})
    tuned = tune(run, task, plain, settings)
    assert tuned.chosen == {"lr": 0.05}
    assert {row["lr"] for row in tuned.rows if math.isinf(row["validation_loss"])} == {1e9}


# --------------------------------------------------------------------------------------- one training
def test_a_training_records_every_epoch_and_shares_its_start(race: tuple[Run, RaceTask, Any]) -> None:
    run, task, _ = race
    settings = {"optimizer": "momentum", "lr": 0.1, "momentum": 0.9}
    found = trained(run, task, settings, num_steps=10, batch_size=40, seed=0, with_test=True)
    assert found["step"] == [0, 4, 8, 10]  # 160 images in batches of 40; the last pass is cut short
    assert len(found["step_losses"]) == 10
    assert len(found["epoch_losses"]) == 3
    assert found["seconds"] == sorted(found["seconds"])
    assert found["seconds"][0] == 0.0 < found["seconds"][1]
    assert not found["diverged"]
    other = trained(
        run,
        task,
        GINGER | {"lr": 0.01, "rank": 2, "damping": 0.1},
        num_steps=4,
        batch_size=40,
        seed=0,
        with_test=False,
    )
    assert other["validation_loss"][0] == found["validation_loss"][0]  # one start
    assert other["step_losses"][0] == pytest.approx(
        float(found["step_losses"][0]), rel=1e-6
    )  # and one first batch
    assert "test_loss" not in other
    assert len(task.train[1]) + len(task.validation[1]) == 200


def test_a_training_that_diverges_is_a_result(race: tuple[Run, RaceTask, Any]) -> None:
    run, task, settings = race
    optimizer = {"optimizer": "momentum", "lr": 1e30, "momentum": 0.9}
    one = racer("momentum", settings={"optimizer": "momentum", "momentum": 0.9})
    row, curve = final_run(run, task, one, optimizer, settings, seed=0)
    assert row["diverged"]
    assert row["best_epoch"] == 0  # the start
    assert 0 <= row["test_accuracy"] < 0.4
    assert math.isnan(row["min_train_loss"])
    assert curve.empty
    curvature = {**GINGER, "lr": 0.5, "rank": 2, "damping": 1e-5, "clip": None}
    assert final_run(run, task, one, curvature, settings, seed=0)[0]["diverged"]


@pytest.mark.parametrize("lr", [1e4, 1e30])
@pytest.mark.parametrize("name", ["ginger", "qng", "ngd", "muon", "soap"])
def test_no_optimizer_stops_the_race(race: tuple[Run, RaceTask, Any], name: str, lr: float) -> None:
    run, task, settings = race
    own = {"ginger": {**GINGER, "damping": 1e-5}, "qng": {**GINGER, "optimizer": "qng"}, "ngd": {}}
    optimizer = {"optimizer": name} | own.get(name, {"momentum": 0.9, "decay": 0.99}) | {"lr": lr}
    optimizer |= {"rank": 2} if name in ("ginger", "qng") else {}
    if why_unavailable(optimizer):
        pytest.skip("pytorch-optimizer is an extra")
    row, _ = final_run(run, task, racer(name, settings=optimizer), optimizer, settings, seed=0)
    assert row["diverged"]
    assert 0 <= row["test_accuracy"] < 0.5


def test_final_runs_report_the_epoch_that_validation_prefers(race: tuple[Run, RaceTask, Any]) -> None:
    run, task, settings = race
    settings.num_epochs = 5
    row, curve = final_run(run, task, racer(), {**racer().settings, "lr": 0.05}, settings, seed=1)
    assert row["accuracy"] == curve.validation_accuracy.max()
    assert curve.validation_accuracy.iloc[row["best_epoch"] - 1] == row["accuracy"]
    assert row["gradients"] == 5 * 4 == curve.step.iloc[-1]


@pytest.mark.parametrize("diverges_after", [None, 9])
def test_an_interrupted_training_ends_as_if_it_had_not_been(
    race: tuple[Run, RaceTask, Any], monkeypatch: pytest.MonkeyPatch, diverges_after: int | None
) -> None:
    run, task, _ = race
    settings = {**GINGER, "lr": 0.02, "rank": 2, "damping": 0.1}
    how = {"num_steps": 12, "batch_size": 40, "with_test": False}

    class CountedStep:
        calls, kill_at = 0, 0

        def __call__(self, learner: Learner, batch: TrainingBatch) -> StepInfo:
            self.calls += 1
            if self.calls == self.kill_at:
                raise KeyboardInterrupt
            taken = max((int(state["step"]) for state in learner.optimizer.state.values()), default=0)
            return StepInfo(math.nan) if taken == diverges_after else shared_curvature_step(learner, batch)

        def depends_on(self) -> dict[str, Any]:
            return {}  # no number depends on what is counted

    step = CountedStep()
    monkeypatch.setattr("experiments.ginger.race.optimizers.shared_curvature_step", step)
    expected = trained(run, task, settings, **how, seed="a")
    run.store = Store(Path(run.store.root) / "other")
    monkeypatch.setattr("curvlab.iterate.SECONDS_BETWEEN_SAVES", 0.0)
    monkeypatch.setattr("curvlab.iterate.MAX_SHARE", math.inf)
    step.calls, step.kill_at = 0, 7
    with pytest.raises(KeyboardInterrupt):
        trained(run, task, settings, **how, seed="a")
    found = trained(run, task, settings, **how, seed="a")
    assert found["diverged"] is (diverges_after is not None)
    for name in ("validation_loss", "epoch_losses", "step"):
        assert found[name] == expected[name]
    assert torch.equal(found["step_losses"], expected["step_losses"])
    # Seven until the kill, then those that are left; one that diverges is done once more from its start.
    assert step.calls == (7 + 12 - 6 if diverges_after is None else 7 + 4 + 10)
