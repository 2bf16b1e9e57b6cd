"""Sec. 6.2, compute: the gaps at every level of every factor, and how they change along each factor."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pandas as pd
from omegaconf import DictConfig

from curvlab.lab import Run, task_label, task_settings
from curvlab.training import TrainingDivergedError
from experiments.pbrf.decomposition import RETRAINED
from experiments.pbrf.fig5.factors import Level, levels
from experiments.pbrf.fig5.level_decomposition import LevelDecomposition
from experiments.pbrf.fig5.slopes import slopes_of
from experiments.pbrf.networks import Network, load_network

CURVATURE = "gauss_newton"
NORMS = ("per_example", "total")


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return the tables; see their columns below.

    `points`, a row for each task, factor, level, seed, group and gap: the gap per example and in total, with
    `whole`, the distance between the cold optimum and the influence estimate, `moved`, that between θ^s and the
    influence estimate, and `retrained`, that between θ^s and the cold optimum: what an estimate of zero is off by.
    `networks`, a row for each task, factor, level and seed: how large the network is, how well it is trained,
    how well the influence estimate is solved, and what diverged.
    `table`: of `points`, mean and standard deviation over groups and seeds, and over the seeds' means, with means
    of `networks`. `slopes`: see `slopes_of`.

    Args:
        run: seeds, store.
        cfg: `tasks`; `factors`, `factor`, `level`; `seeds`, `num_points` and what `load_network` takes.
    """
    points: list[dict[str, Any]] = []
    networks: list[dict[str, Any]] = []
    seeds = set()
    for name, settings in task_settings(cfg).items():
        for level, seed in product(levels(settings), settings.seeds):
            own = {"task": task_label(name), "factor": level.factor, "level": level.value, "seed": seed}
            rows, state = _measured(run, name, level, seed, settings.damping)
            points += [own | row for row in rows]
            networks.append(own | state)
            seeds.add(seed)
    run.note(seeds=sorted(seeds))
    found = {"points": pd.DataFrame(points), "networks": pd.DataFrame(networks)}
    if found["points"].empty:
        raise TrainingDivergedError("every base run diverged: lower training.lr, or list several to choose from.")
    return {"table": table_of(**found), **found, "slopes": slopes_of(found["points"])}


def _measured(
    run: Run, name: str, level: Level, seed: int, shared_damping: float
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the gaps of one network at one level, a row for each group and gap, and its state."""
    try:
        network = load_network(run, name, level.settings, seed)
    except TrainingDivergedError:
        return [], {"diverged": "base run"}
    found = LevelDecomposition(
        network, level.settings.num_points, fraction=level.fraction, shared_damping=shared_damping
    )
    gaps = found.gaps(CURVATURE) | {
        "whole": found.whole(CURVATURE),
        "moved": found.moved(CURVATURE),
        "retrained": found.moved_by("cold"),
    }
    rows = [
        {"group": k, "gap": gap} | {norm: float(values[k, i]) for i, norm in enumerate(NORMS)}
        for gap, values in gaps.items()
        for k in range(found.num_points)
    ]
    return rows, _state(network, found)


def _state(network: Network, found: LevelDecomposition) -> dict[str, Any]:
    state = found.base_state()
    diverged = [name for name in ("cold", *RETRAINED) if not found.response(name).isfinite().all()]
    residual = found.influence(CURVATURE)[1]
    if math.isnan(residual):
        diverged.append("influence")
    return {
        "P": len(network.initial),
        "N": len(network.train[1]),
        "removed": len(found.groups[0]),
        "epochs": network.num_epochs,
        "learning rate": network.lr,
        "train loss": state["train_loss"],
        "gradient norm": state["gradient_norm"],
        "test loss": state["test_loss"],
        "residual": residual,
        "diverged": ", ".join(diverged),
    }


def table_of(points: pd.DataFrame, networks: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each task, factor, level and gap.

    Columns: `mean` and `std` over groups and seeds of the gap per example, `seed std` of the seeds' means,
    `total`, the mean of the unnormalised gap; numbers of groups and seeds; what the gap is worth: means over
    seeds of training loss, gradient norm at θ^s, test loss, learning rate, residual of the influence estimate.
    """
    key = ["task", "factor", "level"]
    by_gap = points.groupby([*key, "gap"], sort=False)
    by_seed = points.groupby([*key, "gap", "seed"], sort=False).per_example.mean()
    table = by_gap.agg(
        mean=("per_example", _mean), std=("per_example", "std"), total=("total", _mean),
        groups=("group", "nunique"), seeds=("seed", "nunique"),
    )  # fmt: skip
    table.insert(2, "seed std", by_seed.groupby(level=[*key, "gap"], sort=False).std())
    shown = ["P", "N", "removed", "learning rate", "train loss", "gradient norm", "test loss", "residual"]
    return table.reset_index().merge(networks.groupby(key, sort=False)[shown].mean().reset_index(), on=key)


def _mean(values: pd.Series) -> float:
    """Return the mean, nan when one of them is: what diverged has no gap."""
    return float(values.mean(skipna=False))
