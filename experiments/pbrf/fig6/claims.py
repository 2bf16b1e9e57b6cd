"""Figure 6, claims: what PBRF and influence find, and whether everyday scores find it earlier."""

from __future__ import annotations

import pandas as pd

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, judge, out_of_reach, t_interval
from experiments.pbrf.fig6.scores import (
    AREA,
    CONFIDENT,
    INFLUENCE,
    LOSS,
    PBRF,
    PBRF_TOTAL,
    RANDOM,
)

MARK = "found at 20 %"
OF_PBRF = (
    "pbrf-finds-most",
    "pbrf-beats-random",
    "total-loss-finds-most",
    "influence-finds-as-many",
    "influence-aligns",
    "influence-aligns-total",
)


def judge_claims(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every claim of every task; intervals are over seeds."""
    results = []
    networks = computed["networks"]
    for task, seeds in computed["seeds"].groupby("task", sort=False):
        results += _of_task(claims, str(task), seeds, networks[networks.task == task])
    return results


def _of_task(claims: ClaimSheet, task: str, seeds: pd.DataFrame, networks: pd.DataFrame) -> list[ClaimResult]:
    values = {str(method): own.set_index("seed") for method, own in seeds.groupby("method", sort=False)}
    state = (
        f"The network predicts {networks['wrong labels predicted'].mean():.0%} of the wrong labels; plain loss "
        f"finds {values[LOSS][MARK].mean():.2f}."
    )
    best = max((AREA, CONFIDENT), key=lambda method: float(values[method].area.mean()))
    found = {
        "influence-finds-most": values[INFLUENCE][MARK],
        "influence-beats-random": values[INFLUENCE][MARK] - values[RANDOM][MARK],
        "influence-above-loss": values[INFLUENCE].area - values[LOSS].area,
        "influence-above-all": values[INFLUENCE].area - values[best].area,
    }
    reasons = {"influence-above-all": f"The better of the two is {best}, {values[best].area.mean():.3f}."}
    if PBRF in values:
        found |= {
            "pbrf-finds-most": values[PBRF][MARK],
            "pbrf-beats-random": values[PBRF][MARK] - values[RANDOM][MARK],
            "total-loss-finds-most": values[PBRF_TOTAL][MARK],
            "influence-finds-as-many": values[PBRF][MARK] - values[INFLUENCE][MARK],
            "influence-aligns": networks["spearman own"],
            "influence-aligns-total": networks["spearman total"],
        }
        reasons["influence-aligns-total"] = (
            f"By own losses it is {networks['spearman own'].mean():.2f}; PBRF and plain loss correlate by "
            f"{networks['spearman PBRF and loss'].mean():.2f}."
        )
    results = [
        _judged(claims.claim(name, of=task), column, f"{state} {reasons.get(name, '')}")
        for name, column in found.items()
    ]
    reason = "The PBRF of every example is not computed for this task: descent is null."
    return results + [out_of_reach(claims.claim(name, of=task), reason) for name in OF_PBRF if name not in found]


def _judged(claim: Claim, values: pd.Series, reason: str) -> ClaimResult:
    return judge(claim, float(values.mean()), t_interval(values), if_not_reproduced=reason)
