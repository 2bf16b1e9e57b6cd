"""A claim about many settings is judged where it fares worst: one row of a table, exact or with its own error."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.lab import Claim, ClaimResult, Interval, exact, judge


def largest(values: pd.Series) -> int:
    """Return the place (from 0) of the largest value that is not nan."""
    return int(np.nanargmax(values.to_numpy(dtype=float)))


def smallest(values: pd.Series) -> int:
    """Return the place of the smallest value that is not nan."""
    return largest(-values)


def farthest_ratio(values: pd.Series) -> int:
    """Return the place of the positive value the farthest from 1, by ratio: 0.5 is as far as 2."""
    return largest(np.log(values).abs())


def judge_row(  # noqa: PLR0917
    claim: Claim,
    table: pd.DataFrame,
    values: pd.Series,
    row: int,
    kind: str,
    why: str,
    *,
    stderrs: pd.Series | None = None,
) -> ClaimResult:
    """Judge the value in one row of a table.

    Args:
        claim: the claim.
        table: one row for each setting; where there are `stderrs`, with `num_trials`.
        values: of its rows.
        row: the place of the worst.
        kind: of the interval, after "exact" or "95 % of Monte Carlo": which setting, of how many.
        why: what explains it should the claim fail.
        stderrs: of the values, over trials; None: they are exact.
    """
    value = float(values.iloc[row])
    if stderrs is None:
        interval = exact(value, kind=f"exact, {kind}")
    else:
        half = 1.96 * float(stderrs.iloc[row])
        trials = int(table.num_trials.iloc[row])
        interval = Interval(value - half, value + half, f"95 % of Monte Carlo, {kind}", trials)
    return judge(claim, value, interval, if_not_reproduced=why)
