"""One network, trained by many optimizers from the same starts on the same batches.

    for task in RaceTask.each(run, cfg):
        row, curve = final_run(task, racer, racer.with_rank(4, lr=0.05), seed=0)

Trainings are units of work that tuning, final runs and all targets share.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from curvlab.lab import unit
from curvlab.optim import DivergedError
from curvlab.training import Learner, Step, StepInfo, TrainingBatch, TrainingDivergedError, evaluate, train
from experiments.ginger.optimizers import augmented, clipped_shares, counted_step, make_optimizer
from experiments.ginger.tuning import Racer, Tuned, lowest, tune
from experiments.shared.stats import in_columns
from experiments.shared.task import Task

# NGD refuses gradients that are not finite, and SOAP decomposes them.
DIVERGED = (TrainingDivergedError, DivergedError, torch.linalg.LinAlgError)
HIGHER = 1.5  # a loss so many times that at the start has diverged, though it is a number
MEASURES = ("test_accuracy", "accuracy", "validation_loss", "min_train_loss")
CURVE_POINTS = 40  # of each training, at most


class RaceTask(Task):
    """Images, of which some are set aside to choose settings and the epoch; and a network.

    Reads of the settings, beside `data`, `model` and `seed_name`: `num_validation`, `batch_size`, `num_epochs`,
    `pooling` (images are averaged over squares of so many pixels; null: left as they are) and `augment` (training
    images are cropped and flipped).
    """

    @cached_property
    def parts(self) -> dict[str, tuple[Tensor, Tensor]]:
        """(inputs, targets) of "train", of "validation", a random part of the training set, and of "test"."""
        order = torch.randperm(self.num_train, generator=self.generator("validation"))
        held_out, kept = order.split([self.settings.num_validation, self.num_train - self.settings.num_validation])
        parts = {
            "train": self.pair("train", kept),
            "validation": self.pair("train", held_out),
            "test": self.pair("test"),
        }
        if pooling := self.settings.get("pooling"):
            return {name: (avg_pool2d(inputs, pooling), targets) for name, (inputs, targets) in parts.items()}
        return parts

    @property
    def key(self) -> dict[str, Any]:
        """Identifies data and network in the store."""
        own = {name: self.settings.get(name) for name in ("pooling", "num_validation", "augment")}
        return super().key | own

    def steps_per_epoch(self, batch_size: int) -> int:
        """Return the number of batches of a pass."""
        return -(-len(self.parts["train"][1]) // batch_size)

    def final_steps(self, racer: Racer) -> int:
        """Return the number of steps of a racer's final run."""
        epochs = self.settings.num_epochs * racer.epoch_factor
        return int(epochs * self.steps_per_epoch(self.settings.batch_size * racer.batch_factor))

    def tune(self, racer: Racer) -> Tuned:
        """Choose a racer's settings; a trial counts with the lowest validation loss of its epochs."""
        size = self.settings.batch_size * racer.batch_factor
        steps = self.settings.tuning.num_epochs * self.steps_per_epoch(self.settings.batch_size)

        def trial(optimizer: Mapping[str, Any], seed: str) -> float:
            how = {"optimizer": optimizer, "num_steps": steps, "batch_size": size, "repeat": seed}
            found = trained(self, **how, with_test=False)
            return lowest(found["validation_loss"][1:]) if not found["diverged"] else math.inf

        constant = math.log(self.splits.num_outputs)
        return tune(racer, self.settings, trial, num_steps=steps, constant=constant)


# ------------------------------------------------------------------------------------ one training
@unit(
    "ginger/race",
    version=2,
    about="training {seed_name} by {optimizer[optimizer]} (lr {optimizer[lr]:g}), seed {repeat}",
    resumes=True,
)
def trained(task: RaceTask, /, *, checkpoint: Path, with_test: bool, **key: Any) -> dict[str, Any]:
    """Train once; return what was measured before the first step and after each epoch, and the steps' losses.

    Lists with one entry for each measurement: `step` (taken so far), `seconds` (of all steps so far, of this
    process's CPU time, or elapsed on a GPU), `validation_loss`, `validation_accuracy`, and where `with_test` is
    set `test_loss`, `test_accuracy`. `epoch_losses`, means of the batches'; `step_losses` (S,), of each step's
    batch. `diverged`: the loss became infinite or NaN, where the lists end and the steps' losses are lost, or the
    last epoch's is more than `HIGHER` times that of the first batch.

    Args:
        task: data and network.
        checkpoint: a folder for it.
        with_test: measure on the test set, too.
        key: `optimizer`, settings, see `make_optimizer`; `num_steps`, the last pass is cut short; `batch_size`, in
            examples; `repeat`, the seed of the start and the order of batches, shared by all optimizers: names
            serve as well as numbers.
    """
    parts = {name: task.parts[name] for name in ("validation", *(["test"] if with_test else []))}
    how = {name: key[name] for name in ("optimizer", "num_steps", "batch_size", "repeat")}
    return _attempt(task, parts, checkpoint / "training.pt", **how)


def _attempt(
    task: RaceTask,
    parts: Mapping[str, tuple[Tensor, Tensor]],
    checkpoint: Path,
    *,
    optimizer: Mapping[str, Any],
    num_steps: int,
    batch_size: int,
    repeat: int | str,
) -> dict[str, Any]:
    model, loss = task.build(task.generator("start", repeat)), nn.CrossEntropyLoss()
    stepper, step = make_optimizer(model, optimizer)
    clock = Stopwatch(augmented(step) if task.settings.augment else step, task.run.device)
    losses: list[float] = []  # kept when the training diverges

    def measured() -> dict[str, float]:
        found = {name: evaluate(model, loss, data) for name, data in parts.items()}
        values = {f"{name}_loss": result.loss for name, result in found.items()}
        return values | {f"{name}_accuracy": float(result.accuracy or 0.0) for name, result in found.items()}

    records = [measured() | {"num_steps": 0, "seconds": 0.0}]

    def on_epoch_end(epoch: int, mean_loss: float) -> dict[str, float]:
        left = num_steps - epoch * task.steps_per_epoch(batch_size)
        of_epoch = min(task.steps_per_epoch(batch_size), left)
        losses.append(mean_loss)
        records.append(measured() | {"num_steps": of_epoch, "seconds": clock.lap() * of_epoch})
        return records[-1]

    resumed, diverged, step_losses = checkpoint.exists(), False, torch.empty(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of steps that were not taken: `diverged` says it
        try:
            history = train(
                model,
                loss,
                task.parts["train"],
                num_steps=num_steps,
                batch_size=batch_size,
                optimizer=stepper,
                step=clock,
                checkpoint=checkpoint,
                generator=task.generator("batches", repeat),
                progress=task.run.bar(f"{task.seed_name} {optimizer['optimizer']} {repeat}"),
                on_epoch_end=on_epoch_end,
            )
        except DIVERGED:
            if resumed:  # the epochs before the kill are known to `train` alone, which has no history now
                checkpoint.unlink()
                how: dict[str, Any] = {"num_steps": num_steps, "batch_size": batch_size, "repeat": repeat}
                return _attempt(task, parts, checkpoint, optimizer=optimizer, **how)
            diverged = True
        else:
            records[1:], losses = [dict(record) for record in history.records if record], list(history.losses)
            step_losses = torch.tensor(history.step_losses)
            diverged = losses[-1] > HIGHER * history.step_losses[0]
    columns: dict[str, Any] = {name: [record[name] for record in records] for name in records[0]}
    # A record has the steps and seconds of its epoch alone.
    columns["step"] = torch.tensor(columns.pop("num_steps")).cumsum(0).tolist()
    columns["seconds"] = torch.tensor(columns["seconds"], dtype=torch.float64).cumsum(0).tolist()
    return columns | {"step_losses": step_losses, "diverged": diverged, "epoch_losses": losses}


class Stopwatch:
    """A step that measures its own time: on a CPU this process's, on a GPU elapsed (steps read their loss)."""

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


# ------------------------------------------------------------------------------------ final runs
def final_run(
    task: RaceTask, racer: Racer, optimizer: Mapping[str, Any], *, seed: int
) -> tuple[dict[str, Any], pd.DataFrame]:
    """Train once to the end; return a row of results, and its curve.

    The row: `accuracy`, the best on the validation set over the epochs (as the paper has it), `best_epoch`, and at
    this epoch `validation_loss`, `test_accuracy`, `test_loss`: the test set has chosen nothing. `min_train_loss`,
    the smallest loss of a step's batch (nan where it was lost in divergence); `diverged`; `gradients`. A network
    that diverged counts with its best epoch before, the start included.

    The curve: step, seconds, train_loss (mean of the epoch's batches), validation_loss, validation_accuracy.
    """
    size, steps = task.settings.batch_size * racer.batch_factor, task.final_steps(racer)
    how = {"optimizer": optimizer, "num_steps": steps, "batch_size": size, "repeat": seed}
    found = trained(task, **how, with_test=True)
    best = int(np.argmax(found["validation_accuracy"]))
    losses = found["step_losses"].numpy() if len(found["step_losses"]) else np.array(found["epoch_losses"])
    row = {
        "seed": seed,
        "accuracy": found["validation_accuracy"][best],
        "validation_loss": found["validation_loss"][best],
        "test_accuracy": found["test_accuracy"][best],
        "test_loss": found["test_loss"][best],
        "min_train_loss": float(np.min(losses[np.isfinite(losses)], initial=math.inf)),
        "best_epoch": best,
        "diverged": found["diverged"],
        "gradients": steps * racer.gradients_per_step,
    }
    row["min_train_loss"] = row["min_train_loss"] if math.isfinite(row["min_train_loss"]) else math.nan
    columns = ("step", "seconds", "validation_loss", "validation_accuracy")
    curve = pd.DataFrame({name: found[name][1:] for name in columns})
    curve.insert(2, "train_loss", found["epoch_losses"])
    stride = max(1, -(-len(curve) // CURVE_POINTS))
    return row, curve.iloc[::-1].iloc[::stride].iloc[::-1].assign(seed=seed)  # the last point always


def log_losses(table: pd.DataFrame) -> pd.Series:
    """Return log10 of the smallest losses of a batch; one that reads 0 counts as the least above 0 on its task.

    Near 0 an example's log-softmax is a multiple of 2^-23, and the loss is the mean over a batch: most often an
    epoch's last one, which has the fewest examples. nan where a run diverged.
    """
    losses = table.min_train_loss
    least = losses.where(losses > 0).groupby(table.task).transform("min")
    return np.log10(losses.clip(lower=least))


def summarised(table: pd.DataFrame, by: Sequence[str], constant: Sequence[str] = ()) -> pd.DataFrame:
    """Return one row for each group: seeds, those that diverged, means, and 95 % t intervals of the test accuracy.

    `by` are the columns that make a group, `constant` those that are the same within a group, and are kept.
    """
    rows = []
    for place, own in table.groupby(list(by), sort=False, dropna=False):
        rows.append(
            dict(zip(by, place, strict=True))
            | {name: own[name].iloc[0] for name in constant}
            | {"seeds": len(own), "diverged": int(own.diverged.sum())}
            | {name: own[name].mean() for name in MEASURES}
            | in_columns("test_accuracy", own.test_accuracy)
        )
    return pd.DataFrame(rows)


@unit("ginger/clipped", version=1, about="clipped entries by {optimizer[optimizer]} (lr {optimizer[lr]:g})")
def clipped(task: RaceTask, /, *, optimizer: Any, num_steps: int, batch_size: int, **_: Any) -> dict[str, Any]:
    """Return the share of clipped entries along a final run from the first seed's start: step, share."""
    model, generator = task.build(task.generator("start", 0)), task.generator("batches", 0)
    how = {"num_steps": num_steps, "batch_size": batch_size}
    return clipped_shares(model, task.parts["train"], optimizer, **how, generator=generator)


@unit("ginger/race_cost", version=2, about="cost of a step of {optimizer[optimizer]}")
def cost_of_a_step(task: RaceTask, /, *, optimizer: Any, batch_size: int, **_: Any) -> dict[str, Any]:
    """Return `flops` and `memory` (bytes, at most alive at one time), see `counted_step`.

    With all gradients of the step, its state and its batch, without augmentation. What happens in some steps only
    counts where it falls on the third or the fourth: SOAP turns its basis in every tenth.
    """
    batch = TrainingBatch(*(part[:batch_size] for part in task.parts["train"]))
    return counted_step(task.build(task.generator("start", 0)), batch, optimizer)
