"""Final runs: tuned settings, full length, several seeds; and the tables that all targets make of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import DictConfig

from curvlab.lab import Run, t_interval
from experiments.ginger.race.racers import Racer
from experiments.ginger.race.task import RaceTask
from experiments.ginger.race.training import trained
from experiments.ginger.race.tuning import final_steps, lowest

MEASURES = ("test_accuracy", "accuracy", "validation_loss", "min_train_loss")
CURVE_POINTS = 40  # of each training, at most


def final_run(
    run: Run, task: RaceTask, racer: Racer, optimizer: Mapping[str, Any], settings: DictConfig, *, seed: int
) -> tuple[dict[str, Any], pd.DataFrame]:
    """Train once to the end; return a row of results, and its curve.

    The row: `accuracy`, the best on the validation set over the epochs (as the paper has it), `best_epoch`, and at
    this epoch `validation_loss`, `test_accuracy`, `test_loss`: the test set has chosen nothing. `min_train_loss`,
    the smallest loss of a step's batch (nan where it was lost in divergence); `diverged`; `gradients`; `seconds`,
    of all steps. A network that diverged counts with its best epoch before, the start included.

    The curve: step, seconds, train_loss (mean of the epoch's batches), validation_loss, validation_accuracy.
    """
    size, steps = task.batch_size * racer.batch_factor, final_steps(task, racer, settings)
    found = trained(run, task, optimizer, num_steps=steps, batch_size=size, seed=seed, with_test=True)
    best = int(np.argmax(found["validation_accuracy"]))
    losses = found["step_losses"].numpy()
    row = {
        "seed": seed,
        "accuracy": found["validation_accuracy"][best],
        "validation_loss": found["validation_loss"][best],
        "test_accuracy": found["test_accuracy"][best],
        "test_loss": found["test_loss"][best],
        "min_train_loss": float(losses.min()) if len(losses) else lowest(found["epoch_losses"]),
        "best_epoch": best,
        "diverged": found["diverged"],
        "gradients": steps * racer.gradients_per_step,
        "seconds": found["seconds"][-1],
    }
    row["min_train_loss"] = row["min_train_loss"] if math.isfinite(row["min_train_loss"]) else math.nan
    curve = pd.DataFrame(
        {
            "step": found["step"][1:],
            "seconds": found["seconds"][1:],
            "train_loss": found["epoch_losses"],
            "validation_loss": found["validation_loss"][1:],
            "validation_accuracy": found["validation_accuracy"][1:],
        }
    )
    stride = max(1, -(-len(curve) // CURVE_POINTS))
    return row, curve.iloc[::-1].iloc[::stride].iloc[::-1].assign(seed=seed)  # the last point always


def summarised(table: pd.DataFrame, by: Sequence[str], constant: Sequence[str] = ()) -> pd.DataFrame:
    """Return one row for each group: seeds, those that diverged, means, and 95 % t intervals of the test accuracy.

    Args:
        table: of final runs.
        by: columns that make a group.
        constant: columns that are the same within a group, and are kept.
    """
    rows = []
    for place, own in table.groupby(list(by), sort=False, dropna=False):
        interval = t_interval(own.test_accuracy.to_numpy())
        rows.append(
            dict(zip(by, place, strict=True))
            | {name: own[name].iloc[0] for name in constant}
            | {"seeds": len(own), "diverged": int(own.diverged.sum())}
            | {name: own[name].mean() for name in MEASURES}
            | {"test_accuracy_low": interval.low, "test_accuracy_high": interval.high}
        )
    return pd.DataFrame(rows)
