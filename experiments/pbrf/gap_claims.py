"""How tab4 and tab5 judge a task: over seeds, with the points of each seed beside it, where it can be judged."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd

from curvlab.lab import Claim, ClaimResult, Interval, bootstrap_interval, judge, out_of_reach, t_interval

# Above it the influence estimate is not the solution that its gap is named after. With the Hessian's eigenvalues
# on both sides of zero a small residual bounds no error: only a solve to rounding is one.
LARGEST_RESIDUAL = 0.1
LARGEST_RESIDUAL_OF_HESSIAN = 1e-6


def judge_over_seeds(  # noqa: PLR0917
    claim: Claim,
    row: pd.Series,
    columns: pd.DataFrame,
    statistic: Callable[..., float],
    why: str,
    generator: np.random.Generator,
) -> ClaimResult:
    """Judge the geometric mean over seeds of a statistic of each seed's points, by a t interval of logarithms.

    All statistics are positive, and ratios differ by factors from seed to seed: on a linear scale one seed's 200
    beside 10 and 20 would give an interval down to -200.

    The points of one seed share its network, and its drift: an interval over them says nothing about another
    network. It stands in the explanation, where that of the seeds decides.

    Args:
        claim: to judge.
        row: the task's row of the table.
        columns: what the statistic takes, a row for each seed and point.
        statistic: of vectors over the points, one for each column.
        why: the explanation.
        generator: of the bootstraps over points.
    """
    if reason := why_out_of_reach(row):
        return out_of_reach(claim, reason)
    values, within = [], []
    for seed, own in columns.groupby(level="seed", sort=False):
        vectors = tuple(own[name].to_numpy() for name in columns)
        values.append(statistic(*vectors))
        interval = bootstrap_interval(vectors, statistic, generator=generator, num_resamples=500)
        within.append(f"seed {seed}: {values[-1]:.2g} ({interval.low:.2g} to {interval.high:.2g})")
    spread = f"Over the points of a seed, bootstrap 95 %: {'; '.join(within)}."
    with np.errstate(divide="ignore"):  # a statistic of 0 has no logarithm: its interval is nan
        logarithms = np.log(values)
    found = t_interval(logarithms)
    interval = Interval(
        math.exp(found.low), math.exp(found.high), f"{found.kind}, of logarithms", found.num_samples
    )
    return judge(claim, math.exp(logarithms.mean()), interval, if_not_reproduced=f"{why} {spread}")


def why_out_of_reach(row: pd.Series) -> str:
    """Return why no claim can be judged of a task, or nothing."""
    if not row.learned:
        return (
            f"θ^s has learned nothing: a training loss of {row['train loss']:.5g}, where constant outputs have "
            f"{row['constant loss']:.5g}."
        )
    largest = LARGEST_RESIDUAL_OF_HESSIAN if "smallest eigenvalue" in row else LARGEST_RESIDUAL
    if not row.residual <= largest:  # nan where LiSSA diverges at every scaling
        needed = f"needed: {largest:g}"
        return f"The influence estimate is not solved: a residual of {row.residual:.2g}, {needed}."
    return ""


def mean_ratio(of: np.ndarray, by: np.ndarray) -> float:
    """Return the ratio of two means."""
    return float(np.mean(of) / np.mean(by))
