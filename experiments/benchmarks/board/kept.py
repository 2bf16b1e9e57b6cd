"""Rows that a published board has already, and where the best of a grid lies at its edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import DictConfig

from curvlab.influence.bank import Array, Bank
from experiments.benchmarks.attribution import methods


def label(method: str, damping: float | None) -> str:
    """Return the column of a row in `ranks`."""
    return method if damping is None or np.isnan(damping) else f"{method} @ {damping:g}"


def published(ranks: pd.DataFrame, bank: Bank, place: str) -> Array:
    """Return the ranks that a row of the board gives the subsets, (K, S, M): the column `place` of `ranks`."""
    order = ["network", "half", "query"]
    placed = ranks[[*order, place]].sort_values(order)[place]  # not all hundred columns
    return placed.to_numpy(dtype=float).reshape(-1, *bank.single_run.shape[1:])


@dataclass(frozen=True)
class Kept:
    """A task's published tables: a method that they have, at as many dampings, is not computed again."""

    tables: Mapping[str, pd.DataFrame]

    def cost(self, method: str) -> dict[str, Any] | None:
        """Return the row of `cost`, but for the task; None where the method has none."""
        own = self.tables["cost"].query("method == @method").drop(columns="task")
        return dict(own.iloc[0]) if len(own) else None

    def training(self) -> float:
        """Return the seconds of a training that the published prices are counted in."""
        timed = self.tables["cost"].query("seconds > 0 and trainings > 0")
        return float((timed.seconds / timed.trainings).iloc[0])

    def has(self, method: str, num_dampings: int) -> bool:
        """Whether the method was scored at so many dampings."""
        cost = self.cost(method)
        return cost is not None and cost["dampings"] == num_dampings

    def predicted(self, bank: Bank, method: str, damping: float | None) -> tuple[Array, Array | None] | None:
        """Return what the method predicts, as ranks, and that without each of its chains; None: not published.

        Of a grid every column's best is published, so no other damping can be one.
        """
        ranks, place = self.tables["ranks"], label(method, damping)
        if place not in ranks or ranks[place].isna().all():
            return None
        chains = [str(name) for name in ranks if str(name).startswith(f"{method}, not chain ")]
        chains = [name for name in chains if ranks[name].notna().any()]
        without = np.stack([published(ranks, bank, name) for name in chains]) if chains else None
        return published(ranks, bank, place), without


def with_edges(best: pd.DataFrame, settings: DictConfig) -> pd.DataFrame:
    """Return the table with a column `edge`: whether a damping is the lowest or highest of the grid it is from."""
    found: dict[str, dict[float, str]] = {}
    for method in best.method.unique():
        grid = sorted(map(float, _grid(settings, method)))
        found[method] = {grid[0]: "lowest", grid[-1]: "highest"} if len(grid) > 1 else {}
    edges = [found[method].get(damping) for method, damping in zip(best.method, best.damping, strict=True)]
    return best.assign(edge=pd.Series(edges, index=best.index, dtype=object))


def _grid(settings: DictConfig, method: str) -> Sequence[float]:
    if method == methods.INFLUENCE:
        return settings.dampings
    if method == methods.EKFAC:
        return methods.grid_of(settings, "damping")
    option = dict((settings.get("peers") or {}).get(method, {})).get("grid")
    return methods.grid_of(settings, option) if option in ("damping", "lambda_reg") else ()
