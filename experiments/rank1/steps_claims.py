"""The verdict on a bound K(ε) from runs, not all of which reach ε: for the targets that measure rates."""

from __future__ import annotations

import pandas as pd

from curvlab.reporting import Claim, ClaimResult, exact, judge, out_of_reach

MEASURE = (
    "largest ratio of steps to K(ε) over problems, seeds and ε; an ε that was not reached counts as the steps "
    "taken over K(ε) if that is below the steps taken, and is left out otherwise"
)


def judge_steps(claim: Claim, rates: pd.DataFrame, *, name: str, why: str) -> ClaimResult:
    """Return the verdict on "at most K(ε) steps are needed".

    Args:
        claim: with `MEASURE` as its measure.
        rates: rows of (problem, seed, ε) with steps (nan: not reached), steps_taken, bound and epsilon.
        name: column that names the problem.
        why: what explains a failure; the worst case is added.
    """
    decided = rates[rates.steps.notna() | (rates.bound <= rates.steps_taken)]
    if decided.empty:
        return out_of_reach(claim, "No run reached any ε within the steps of this preset, all fewer than K(ε).")
    ratios = (decided.steps.fillna(decided.steps_taken) / decided.bound).to_numpy()
    where = decided.iloc[int(ratios.argmax())]
    largest = f"Largest: {where[name]}, ε = {where.epsilon:.3g}, K = {where.bound:.0f}."
    over = f"largest of {len(decided)} runs, {len(rates) - len(decided)} undecided"
    return judge(
        claim,
        float(ratios.max()),
        exact(float(ratios.max()), kind=over),
        if_not_reproduced=f"{why} {largest}",
    )
