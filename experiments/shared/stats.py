"""Statistics that tables and claims of all papers share; what has an error comes as (value, interval).

verdict(claims.claim("faster"), *stats.geometric_mean(ratios), if_not_reproduced="...")
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from torch import Tensor

from curvlab.lab import Interval, t_interval


def mean(values: ArrayLike, *, unit: str = "seeds", confidence: float = 0.95) -> tuple[float, Interval]:
    """Return the mean of independent values, (n,), with its t interval."""
    sample = _vector(values)
    return float(sample.mean()), t_interval(sample, unit=unit, confidence=confidence)


def in_columns(
    name: str, values: pd.Series | NDArray[np.float64], unit: str = "seeds", joint: str = "_"
) -> dict[str, float]:
    """Return the mean of independent values, and its t interval, as columns: `name`, `name`_low, `name`_high.

    `joint` stands before "low" and "high".
    """
    interval = t_interval(values, unit=unit)
    return {name: values.mean(), f"{name}{joint}low": interval.low, f"{name}{joint}high": interval.high}


def geometric_mean(values: ArrayLike, *, unit: str = "seeds") -> tuple[float, Interval]:
    """Return the geometric mean of independent positive values, (n,), with the t interval of their logarithms.

    A value of 0 has no logarithm: the mean is 0 then, and the interval nan.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        logarithms = np.log(_vector(values))
        found = t_interval(logarithms, unit=unit)
    return math.exp(logarithms.mean()), found.mapped(math.exp, ", of logarithms")


def mean_correlation(values: ArrayLike, *, unit: str = "seeds") -> tuple[float, Interval]:
    """Return the mean of independent correlations, (n,), with its t interval, cut off at -1 and 1."""
    value, interval = mean(values, unit=unit)
    return value, interval.mapped(lambda end: float(np.clip(end, -1, 1)))


def log_log_slope(x: ArrayLike, y: ArrayLike, *, least: int = 2) -> float:
    """Return the least-squares slope of log y on log x, the exponent of a power law.

    Pairs that are not finite and positive do not count; nan with fewer than `least` different x.
    """
    x, y = _vector(x), _vector(y)
    kept = np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0)
    if len(np.unique(x[kept])) < least:
        return math.nan
    return float(np.polyfit(np.log(x[kept]), np.log(y[kept]), 1)[0])


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    """Return Pearson's correlation of two vectors; nan where one is constant or not finite."""
    return float(row_correlations(_vector(x)[None], _vector(y)[None])[0])


def spearman(x: ArrayLike, y: ArrayLike) -> float:
    """Return Spearman's rank correlation of two vectors; nan where one is constant or not finite."""
    return float(row_correlations(_vector(x)[None], _vector(y)[None], ranked=True)[0])


def row_correlations(x: np.ndarray, y: np.ndarray, *, ranked: bool = False) -> np.ndarray:
    """Return Pearson's correlation of each pair of rows, (K, n), (K, n) -> (K,), or Spearman's; nan as for one."""
    x, y = np.ascontiguousarray(x), np.ascontiguousarray(y)  # each row is summed as a vector of its own
    kept, found = _vary(x) & _vary(y), np.full(len(x), np.nan)
    if kept.any():
        pair = (stats.rankdata(rows[kept], axis=1) if ranked else rows[kept] for rows in (x, y))
        found[kept] = np.clip(np.prod([_directions(rows) for rows in pair], axis=0).sum(1), -1, 1)
    return found


def _directions(rows: np.ndarray) -> np.ndarray:
    """Return what is left of each row without its mean, of length 1."""
    centred = rows - rows.mean(1, keepdims=True)
    centred /= np.abs(centred).max(1, keepdims=True)  # squares of large numbers would overflow
    unit: np.ndarray = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    return unit


def column_correlations(left: Tensor, right: Tensor) -> Tensor:
    """Return Pearson's correlation of each pair of columns, (M, K), (M, K) -> (K,); nan where one is constant."""
    left, right = left.double(), right.double()
    left, right = left - left.mean(0), right - right.mean(0)
    return (left * right).sum(0) / (left.norm(dim=0) * right.norm(dim=0))


def correlation(left: Tensor, right: Tensor) -> Tensor:
    """Return the Pearson correlation of each pair of columns, (M, K), (M, K) -> (K,); 0 where not finite."""
    return torch.nan_to_num(column_correlations(left, right), nan=0.0, posinf=0.0, neginf=0.0)


def jackknife_error(without: Sequence[float]) -> float:
    """Return the standard error of a statistic from its values without each of n independent parts, (n,)."""
    sample = _vector(without)
    return float(np.sqrt((len(sample) - 1) / len(sample) * ((sample - sample.mean()) ** 2).sum()))


def _vector(values: ArrayLike) -> np.ndarray:
    """Return a float64 vector of numbers, a series or a tensor."""
    return np.asarray(values, dtype=np.float64)


def _vary(rows: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.isfinite(rows).all(1) & (rows.max(1, initial=-np.inf) > rows.min(1, initial=np.inf))
    return found
