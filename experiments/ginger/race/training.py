"""One training of the race, a unit of work that tuning, final runs and all targets share."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from curvlab.lab import Run
from curvlab.optim import DivergedError
from curvlab.training import Learner, Step, StepInfo, TrainingBatch, TrainingDivergedError, evaluate, train
from experiments.ginger.race.optimizers import augmented, make_optimizer
from experiments.ginger.race.task import RaceTask

# NGD refuses gradients that are not finite, and SOAP decomposes them.
DIVERGED = (TrainingDivergedError, DivergedError, torch.linalg.LinAlgError)
HIGHER = 1.5  # a loss so many times that at the start has diverged, though it is a number


def trained(
    run: Run,
    task: RaceTask,
    settings: Mapping[str, Any],
    *,
    num_steps: int,
    batch_size: int,
    seed: int | str,
    with_test: bool,
) -> dict[str, Any]:
    """Train once; return what was measured before the first step and after each epoch, and the steps' losses.

    Lists with one entry for each measurement: `step` (taken so far), `seconds` (of all steps so far, of this
    process's CPU time, or elapsed on a GPU), `validation_loss`, `validation_accuracy`, and where `with_test` is
    set `test_loss`, `test_accuracy`. `step_losses` (S,), of each step's batch. `diverged`: the loss became
    infinite or NaN, where the lists end and the steps' losses are lost, or the last epoch's is more than `HIGHER`
    times that of the first batch.

    Args:
        run: seeds, store, device.
        task: data and network.
        settings: of the optimizer, see `make_optimizer`.
        num_steps: how long; the last pass is cut short.
        batch_size: in examples.
        seed: of the start and the order of batches, shared by all optimizers. Names serve as well as numbers.
        with_test: measure on the test set, too.
    """
    key = task.key | {"optimizer": dict(settings), "num_steps": num_steps, "batch_size": batch_size}
    key |= {"repeat": seed, "with_test": with_test}
    how: dict[str, Any] = {"num_steps": num_steps, "batch_size": batch_size, "seed": seed, "with_test": with_test}
    about = f"training {task.seed_name} by {settings['optimizer']} (lr {settings['lr']:g}), seed {seed}"
    compute = partial(_trained, run, task, settings, **how)
    return run.unit("ginger/race", key, compute, version=1, about=about, resumes=True)


def _trained(
    run: Run,
    task: RaceTask,
    settings: Mapping[str, Any],
    unfinished: Path,
    *,
    num_steps: int,
    batch_size: int,
    seed: int | str,
    with_test: bool,
) -> dict[str, Any]:
    model, loss = task.build(run, seed), nn.CrossEntropyLoss()
    optimizer, step = make_optimizer(model, settings)
    clock = Stopwatch(augmented(step) if task.augment else step, run.device)
    parts = {"validation": task.validation} | ({"test": task.test} if with_test else {})
    losses: list[float] = []  # kept when the training diverges

    def measured() -> dict[str, float]:
        found = {name: evaluate(model, loss, data) for name, data in parts.items()}
        values = {f"{name}_loss": result.loss for name, result in found.items()}
        return values | {f"{name}_accuracy": float(result.accuracy or 0.0) for name, result in found.items()}

    records = [measured() | {"num_steps": 0, "seconds": 0.0}]

    def on_epoch_end(epoch: int, mean_loss: float) -> dict[str, float]:
        left = num_steps - epoch * task.steps_per_epoch(batch_size)
        of_epoch = min(task.steps_per_epoch(batch_size), left)
        record = measured() | {"num_steps": of_epoch, "seconds": clock.lap() * of_epoch}
        losses.append(mean_loss)
        records.append(record)
        return record

    checkpoint = unfinished / "training.pt"
    resumed, diverged, step_losses = checkpoint.exists(), False, torch.empty(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of steps that were not taken: `diverged` says it
        try:
            history = train(
                model,
                loss,
                task.train,
                num_steps=num_steps,
                batch_size=batch_size,
                optimizer=optimizer,
                step=clock,
                checkpoint=checkpoint,
                generator=run.generator("batches", task.seed_name, seed),
                progress=run.bar(f"{task.seed_name} {settings['optimizer']} {seed}"),
                on_epoch_end=on_epoch_end,
            )
        except DIVERGED:
            if (
                resumed
            ):  # the epochs before the kill are known to `train` alone, which has no history now: once more
                checkpoint.unlink()
                how: dict[str, Any] = {"num_steps": num_steps, "batch_size": batch_size, "seed": seed}
                return _trained(run, task, settings, unfinished, **how, with_test=with_test)
            diverged = True
        else:
            records[1:], losses = [dict(record) for record in history.records if record], list(history.losses)
            step_losses = torch.tensor(history.step_losses)
            diverged = losses[-1] > HIGHER * history.step_losses[0]
    return _columns(records) | {"step_losses": step_losses, "diverged": diverged, "epoch_losses": losses}


def _columns(records: list[dict[str, float]]) -> dict[str, Any]:
    """Return lists by name; steps and seconds, which each record has of its epoch alone, as sums."""
    columns: dict[str, Any] = {name: [record[name] for record in records] for name in records[0]}
    columns["step"] = torch.tensor(columns.pop("num_steps")).cumsum(0).tolist()
    columns["seconds"] = torch.tensor(columns["seconds"], dtype=torch.float64).cumsum(0).tolist()
    return columns


class Stopwatch:
    """A step that measures its own time.

    Args:
        step: what is timed.
        device: on a CPU this process's CPU time counts, on a GPU elapsed time: steps read their loss at the end.
    """

    def __init__(self, step: Step, device: torch.device) -> None:
        self._step = step
        self._now = time.perf_counter if device.type == "cuda" else time.process_time
        self._seconds, self._count = 0.0, 0

    def __call__(self, learner: Learner, batch: TrainingBatch) -> StepInfo:
        """Take the step."""
        began = self._now()
        info = self._step(learner, batch)
        self._seconds += self._now() - began
        self._count += 1
        return info

    def depends_on(self) -> dict[str, Any]:
        """Return what the weights depend on, for checkpoints: the step, not the time that it takes."""
        return {"step": self._step}

    def lap(self) -> float:
        """Return the mean seconds of a step since the last call."""
        mean = self._seconds / self._count if self._count else math.nan
        self._seconds, self._count = 0.0, 0
        return mean
