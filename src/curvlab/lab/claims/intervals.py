"""Intervals that stand beside every measured value: over seeds (t) or over points (bootstrap)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

MIN_SAMPLES = 3  # two seeds give an interval, but one that rests on a single difference
# How the kind of a value begins that no other seed would change: of a theorem, a count, a printed number, the
# extreme of all settings; and what tells that one run gave it all the same.
_FIXED = re.compile(r"(exact|deterministic|printed|count(ed)?|allocations|largest|smallest|least|every)\b")
_ONE_RUN = re.compile(r"\b(one|1) (run|seed|order|sequence|draw|sketch)\b")


@dataclass(frozen=True)
class Interval:
    """Where a value lies, and how that was found.

    Args:
        low: lower end; nan when it could not be found.
        high: upper end; nan when it could not be found.
        kind: how the ends were found, e.g. "t 95 %, 3 seeds".
        num_samples: independent values behind it (seeds, points, ...).
        forecast: the ends that were to be expected beforehand. Of a t interval those of as many values with the
            mean and the spread of the first two; of one that rests on no seeds those that it would have were the
            claim true. None where nothing was forecast.
    """

    low: float
    high: float
    kind: str
    num_samples: int
    forecast: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"an interval needs low <= high, got {self.low:g} and {self.high:g}; swap them.")
        if not self.kind.strip():
            raise ValueError('an interval needs a kind that says how it was found, e.g. "t 95 %, 3 seeds".')

    @property
    def has_too_few_samples(self) -> bool:
        """Whether it is over fewer values than decide, `MIN_SAMPLES`, and another seed may give another one."""
        fixed = _FIXED.match(self.kind) and not _ONE_RUN.search(self.kind)
        return self.num_samples < MIN_SAMPLES and not fixed

    def mapped(self, function: Callable[[float], float], note: str = "") -> Interval:
        """Return the interval of a rising function of the value, e.g. exp of a mean logarithm."""

        def of(end: float) -> float:
            try:
                return function(end)
            except OverflowError:
                return np.inf

        forecast = None if self.forecast is None else (of(self.forecast[0]), of(self.forecast[1]))
        return Interval(of(self.low), of(self.high), self.kind + note, self.num_samples, forecast)


def exact(value: float, *, kind: str = "deterministic") -> Interval:
    """Return the interval of a value that no other seed would change: a closed form, a count, as `kind` says."""
    return Interval(float(value), float(value), kind, 1)


def t_interval(values: ArrayLike, *, unit: str = "seeds", confidence: float = 0.95) -> Interval:
    """Return mean ± t s/√n of n independent values, (n,).

    With fewer than two values the ends are nan: one seed says nothing about the next one.
    """
    sample = _as_vector(values, confidence)
    kind = f"t {100 * confidence:g} %, {_count(len(sample), unit)}"
    if len(sample) < 2:
        return Interval(np.nan, np.nan, kind, len(sample))
    quantile = _t_quantile((1 + confidence) / 2, len(sample) - 1)
    half_width = quantile * sample.std(ddof=1) / np.sqrt(len(sample))
    forecast = None
    if len(sample) >= MIN_SAMPLES and np.isfinite(sample).all():
        first = sample[:2]
        half = float(quantile * first.std(ddof=1) / np.sqrt(len(sample)))
        forecast = (float(first.mean()) - half, float(first.mean()) + half)
    low, high = float(sample.mean() - half_width), float(sample.mean() + half_width)
    return Interval(low, high, kind, len(sample), forecast)


@cache
def _t_quantile(share: float, degrees: int) -> float:
    return float(stats.t.ppf(share, degrees))


def bootstrap_interval(
    values: ArrayLike | tuple[ArrayLike, ...],
    statistic: Callable[..., float],
    *,
    unit: str = "points",
    confidence: float = 0.95,
    num_resamples: int = 2000,
    generator: np.random.Generator,
) -> Interval:
    """Return the percentile bootstrap interval of a statistic of n independent points.

    Percentiles, and not a bias-corrected interval, since they stay inside the range of the statistic (a
    correlation never leaves [-1, 1]) and are defined when all points agree.

    Args:
        values: (n,), or a tuple of such vectors that are resampled together (a correlation's x and y).
        statistic: of one resample; takes as many vectors as `values` has. One with an argument `axis`, as numpy's
            mean and median have, is called once, for all resamples.
        unit: what one point is, for the text of the interval.
        confidence: the share of resamples inside.
        num_resamples: cost: that many calls of a `statistic` without `axis`.
        generator: the only source of randomness.
    """
    columns = values if isinstance(values, tuple) else (values,)
    samples = tuple(_as_vector(column, confidence) for column in columns)
    if len({len(sample) for sample in samples}) != 1:
        raise ValueError(
            f"vectors that are resampled together need one length, got {[len(sample) for sample in samples]}."
        )
    num_points = len(samples[0])
    kind = f"bootstrap {100 * confidence:g} %, {_count(num_points, unit)}"
    if num_points < 2 or not np.isfinite(samples).all():
        return Interval(np.nan, np.nan, kind, num_points)
    found = stats.bootstrap(
        samples,
        statistic,
        paired=True,
        method="percentile",
        confidence_level=confidence,
        n_resamples=num_resamples,
        random_state=generator,
    ).confidence_interval
    return Interval(float(found.low), float(found.high), kind, num_points)


def _as_vector(values: ArrayLike, confidence: float) -> np.ndarray:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is a share between 0 and 1, got {confidence}; write 0.95 for 95 %.")
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1:
        raise ValueError(f"an interval needs a vector of independent values, got shape {sample.shape}.")
    return sample


def _count(number: int, unit: str) -> str:
    return f"{number} {unit.removesuffix('s') if number == 1 else unit}"
