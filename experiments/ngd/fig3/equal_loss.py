"""The same sweep at equal training loss: each network where it passes the highest loss that one ends at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import DictConfig, OmegaConf
from scipy import stats

from curvlab.lab import Run
from experiments.ngd.sampling import curvature_cutoff
from experiments.ngd.task import Task
from experiments.ngd.trajectories import DIVERGED, trajectory

MIN_VALUES = 3  # of a sweep, for a seed's trend


def equal_loss(
    run: Run, task: Task, optimizers: Mapping[float, Mapping[str, Any]], settings: DictConfig, seed: int
) -> pd.DataFrame:
    """Return one row for each optimizer: its LLC where its training loss first falls to one and the same level.

    The level is the highest loss at the last epoch among those that have converged. The LLC is interpolated
    linearly in the logarithm of the loss between the two checkpoints beside the level; nan where one of the two
    has no valid estimate, or where training stays above the level. An optimizer that passes the level before its
    first checkpoint is taken there.

    Columns: value; level (nats); loss_before, loss_after of the two checkpoints, epoch of the later; valid; llc,
    from the minimum; problem; curvature_cutoff.

    Args:
        run: seeds, store, device.
        task: data and model.
        optimizers: see `make_optimizer`, by value of the constant; nan for SGD.
        settings: as of `trajectory`, with `training.checkpoints`, the last epoch included, and `converged_below`.
        seed: of the start and the order of batches.
    """
    unsampled: DictConfig = OmegaConf.merge(settings, {"llc": None, "trace": None})  # type: ignore[assignment]  # a mapping
    curves = {value: _losses(run, task, optimizer, unsampled, seed) for value, optimizer in optimizers.items()}
    ends = [curve.train_loss.iloc[-1] for curve in curves.values()]
    level = max((end for end in ends if end <= settings.converged_below), default=np.nan)
    rows = []
    for value, optimizer in optimizers.items():
        curve = curves[value]
        row: dict[str, Any] = {"value": value, "seed": seed, "level": level, "valid": False, "llc": np.nan}
        below = np.flatnonzero(curve.train_loss.to_numpy(float) <= level)
        if len(below) == 0:
            rows.append(row | {"problem": "stays above the level"})
            continue
        beside = curve.iloc[[max(below[0] - 1, 0), below[0]]]
        sampled = trajectory(run, task, optimizer, settings, seed, llc_epochs=set(beside.epoch.tolist()))
        sampled = sampled.set_index("epoch").loc[beside.epoch.tolist()]
        rows.append(row | _interpolated(sampled, level))
    return pd.DataFrame(rows)


def equal_loss_trends(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each task and seed, over the values of alpha that have an LLC at equal loss.

    Columns: values, how many; level; rank_correlation, Spearman's, of value and LLC; sgd, SGD's LLC there;
    least_smoothed, the smallest value with an LLC, and llc_there.
    """
    rows = []
    for (task, seed), own in table.groupby(["task", "seed"], sort=False):
        used = own[own.value.notna() & own.llc.notna()].sort_values("value")
        sgd = own[own.value.isna()].llc
        row: dict[str, Any] = {"task": task, "seed": seed, "values": len(used), "level": own.level.iloc[0]}
        row |= {"curvature_cutoff": curvature_cutoff(own), "sgd": sgd.iloc[0] if len(sgd) else np.nan}
        row |= dict.fromkeys(("rank_correlation", "least_smoothed", "llc_there"), np.nan)
        if len(used):
            row |= {"least_smoothed": used.value.iloc[0], "llc_there": used.llc.iloc[0]}
        if len(used) >= MIN_VALUES:
            row["rank_correlation"] = float(stats.spearmanr(used.value, used.llc).statistic)
        rows.append(row)
    return pd.DataFrame(rows)


def _losses(run: Run, task: Task, optimizer: Mapping[str, Any], settings: DictConfig, seed: int) -> pd.DataFrame:
    try:
        return trajectory(run, task, optimizer, settings, seed)
    except ArithmeticError:  # diverged
        return pd.DataFrame([dict.fromkeys(DIVERGED, np.inf) | {"epoch": settings.training.num_epochs}])


def _interpolated(beside: pd.DataFrame, level: float) -> dict[str, Any]:
    """Return the LLC at the level from the checkpoints before and after it, by epoch."""
    losses = beside.train_loss.to_numpy(float)
    row: dict[str, Any] = {"loss_before": losses[0], "loss_after": losses[1], "epoch": beside.index[1]}
    valid = beside.valid.astype(bool).to_numpy()
    problems = beside.get("problem", pd.Series(dtype=str)).dropna()
    row |= {"valid": bool(valid.all()), "problem": "; ".join(sorted(set(problems) - {""}))}
    row["curvature_cutoff"] = curvature_cutoff(beside.reset_index())
    if row["valid"]:
        # np.interp wants rising abscissae: the loss after is the lower one.
        logs, llcs = np.log(losses[::-1]), beside.llc.to_numpy(float)[::-1]
        row["llc"] = float(np.interp(np.log(level), logs, llcs))
    return row
