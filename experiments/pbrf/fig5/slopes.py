"""How a gap changes along a factor: the exponent of the level that it is proportional to, for each seed."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from curvlab.lab import Interval, t_interval

_ROUNDING = 9  # digits after the point: a gap that does not depend on the factor is the same at all levels


def slopes_of(points: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each task, factor and gap of `points`.

    Columns: `slope`, the mean of `seed_slopes`, with its t interval from `low` to `high`; `seeds`, how many have
    one; `direction`: rises or falls where the whole interval does, over three seeds or more.
    """
    rows = []
    for (task, factor, gap), own in points.groupby(["task", "factor", "gap"], sort=False):
        slopes = seed_slopes(own)
        interval = t_interval(slopes)
        rows.append(
            {"task": task, "factor": factor, "gap": gap, "slope": np.mean(slopes) if slopes else math.nan}
            | {"low": interval.low, "high": interval.high, "seeds": len(slopes)}
            | {"direction": _direction(interval)}
        )
    return pd.DataFrame(rows)


def seed_slopes(own: pd.DataFrame) -> list[float]:
    """Return the slope of log(mean gap per example) in log(level) by least squares, for each seed that has one.

    Levels at which the gap is 0, or nan because something diverged, do not count; two are needed.

    Args:
        own: the rows of `points` of one task, factor and gap.
    """
    slopes = []
    for _, of_seed in own.groupby("seed"):
        gaps = of_seed.groupby("level").per_example.agg(lambda values: values.mean(skipna=False))
        gaps = gaps[np.isfinite(gaps) & (gaps > 0)]
        if len(gaps) > 1:
            slope = np.polyfit(np.log(gaps.index.to_numpy(float)), np.log(gaps.to_numpy()), 1)[0]
            slopes.append(round(float(slope), _ROUNDING))
    return slopes


def _direction(interval: Interval) -> str:
    if interval.has_too_few_samples:
        return "undecided"
    if interval.low == interval.high == 0:
        return "constant"
    return "rises" if interval.low > 0 else "falls" if interval.high < 0 else "undecided"
