"""Each optimizer's learning rate by the validation loss: one grid, with equal seeds and epochs for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from omegaconf import DictConfig

from curvlab.lab import Run
from experiments.ngd.task import Task
from experiments.ngd.trajectories import final_estimate


def tune(
    run: Run, task: Task, optimizers: Mapping[str, Mapping[str, Any]], cfg: DictConfig, lrs: Sequence[float]
) -> pd.DataFrame:
    """Train with every learning rate; return one row an optimizer, learning rate and seed.

    Columns: optimizer, lr, seed, epochs, train_loss, validation_loss (nats, at the end; nan where training
    diverged), chosen: whether the optimizer takes this learning rate.

    Args:
        run: seeds, store, device.
        task: data and model.
        optimizers: settings by name, see `make_optimizer`; their lr is replaced.
        cfg: nodes as for `trajectory`, `seeds`, `converged_below`; nothing is sampled.
        lrs: the grid.
    """
    only_training = cfg.copy()
    only_training.llc, only_training.trace = None, None
    rows = []
    for name, settings in optimizers.items():
        for lr in lrs:
            for seed in cfg.seeds:
                row = final_estimate(run, task, {**settings, "lr": lr}, only_training, seed).iloc[0]
                losses = {"train_loss": row.train_loss, "validation_loss": row.validation_loss}
                rows.append({"optimizer": name, "lr": lr, "seed": seed, "epochs": row.epoch} | losses)
    grid = pd.DataFrame(rows)
    chosen = chosen_rates(grid)
    grid["chosen"] = [chosen.get(name) == lr for name, lr in zip(grid.optimizer, grid.lr, strict=True)]
    return grid


def chosen_rates(grid: pd.DataFrame) -> dict[str, float]:
    """Return each optimizer's learning rate of the smallest mean validation loss.

    A learning rate at which a seed diverged is no choice; an optimizer that diverged at all of them is left out.

    Args:
        grid: columns optimizer, lr, seed, validation_loss.
    """
    chosen = {}
    for name, own in grid.groupby("optimizer", sort=False):
        means = own.groupby("lr").validation_loss.agg(lambda losses: losses.mean(skipna=False)).dropna()
        if len(means):
            chosen[str(name)] = float(means.index.to_numpy(float)[means.argmin()])
    return chosen
