"""Fig. 1, intervals: what other batches, and other training points of the same network, would have given.

All points of a run share its batches, so that points alone say nothing about the next run; and a panel compares
LiSSA of one run with SGD on the next one's batches, so that each run is in two panels. Both are seen by leaving
out one run after the other, with all panels that it is in (jackknife).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
from scipy import stats

from curvlab.lab import Interval, bootstrap_interval

Statistic = Callable[[np.ndarray], float]


def over_runs(
    own: pd.DataFrame,
    column: str,
    statistic: Statistic,
    *,
    paired: bool,
    generator: np.random.Generator,
    within: tuple[float, float] = (-1.0, 1.0),
) -> tuple[float, Interval]:
    """Return a statistic of the points' means over runs, (K,) -> number, and where it lies.

    The half-width is √[(t_{n-1} s_runs)² + (1.96 s_points)²], s_runs from leaving out one of n runs, s_points from
    drawing points again. Fewer than three runs decide nothing. Where there is one run since every batch is all the
    data, points alone are drawn.

    Args:
        own: panels of one network and one choice of C: `position`, `seed` and the column, one row for each.
        column: which; points of which no panel has a value are left out.
        statistic: median, mean.
        paired: whether the panel of a seed is with the next seed's batches too.
        generator: draws points.
        within: what the quantity cannot leave.
    """
    panels = own.pivot_table(index="position", columns="seed", values=column, aggfunc="first", dropna=False)
    panels = panels.dropna(how="all")
    points, count = panels.mean(axis=1).to_numpy(), panels.shape[1]
    value = statistic(points)
    of_points = bootstrap_interval(points, statistic, unit="points", generator=generator)
    if count == 1:
        return value, of_points
    error = runs_error([_left_out(panels, run, statistic, paired=paired) for run in range(count)])
    spread = (of_points.high - of_points.low) / 2 if len(points) > 1 else 0.0
    half = math.hypot(float(stats.t.ppf(0.975, count - 1)) * error, spread)
    kind = f"t 95 % over {count} seeds and {len(points)} points of one network"
    low, high = max(value - half, within[0]), min(value + half, within[1])
    return value, Interval(low, high, kind, count)


def runs_error(without: list[float]) -> float:
    """Return the jackknife's standard error from the statistic without each of n runs; nan where one is missing.

    For n panels of neighbouring runs it is twice (n = 3) what independent panels would have.
    """
    found = np.array(without)
    return float(np.sqrt((len(found) - 1) / len(found) * ((found - found.mean()) ** 2).sum()))


def _left_out(panels: pd.DataFrame, run: int, statistic: Statistic, *, paired: bool) -> float:
    """Return the statistic without the panels that a run is in."""
    count = panels.shape[1]
    touched = {run, (run - 1) % count} if paired else {run}
    kept = panels.iloc[:, [seed for seed in range(count) if seed not in touched]]
    points = kept.mean(axis=1).dropna().to_numpy()
    return statistic(points) if len(points) else math.nan
