"""Verdicts on values that are extremes over settings or runs, and have no interval."""

from __future__ import annotations

import pandas as pd

from curvlab.lab import Claim, ClaimResult, exact, judge, out_of_reach


def judge_extreme(claim: Claim, value: float, over: str, *, why: str) -> ClaimResult:
    """Return the verdict on an extreme; `over` says of what, e.g. "largest of 40 settings"."""
    return judge(claim, value, exact(value, kind=over), if_not_reproduced=why)


def judge_steps(claim: Claim, rates: pd.DataFrame, *, why: str) -> ClaimResult:
    """Return the verdict on "at most K(ε) steps are needed" from runs, not all of which reach ε.

    Args:
        claim: on the largest ratio of steps to K(ε). An ε that was not reached counts as the steps taken over K(ε)
            if that is below the steps taken, and is left out otherwise.
        rates: rows of (objective, seed, ε) with steps (nan: not reached), steps_taken, bound and epsilon.
        why: what explains a failure; the worst case is added.
    """
    decided = rates[rates.steps.notna() | (rates.bound <= rates.steps_taken)]
    if decided.empty:
        return out_of_reach(claim, "No run reached any ε within the steps of this preset, all fewer than K(ε).")
    ratios = (decided.steps.fillna(decided.steps_taken) / decided.bound).to_numpy()
    worst = decided.iloc[int(ratios.argmax())]
    over = f"largest of {len(decided)} runs, {len(rates) - len(decided)} undecided"
    largest = f"Largest: {worst.objective}, ε = {worst.epsilon:.3g}, K = {worst.bound:.0f}."
    return judge_extreme(claim, float(ratios.max()), over, why=f"{why} {largest}")
