"""Sec. 6.2, claims: how gaps change along the factors, and that two of the five stay small."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.influence.responses import GAPS
from curvlab.reporting import ClaimResult, ClaimSheet, out_of_reach, t_interval
from curvlab.reporting import judge as judged
from experiments.pbrf.fig5.slopes import seed_slopes
from experiments.target import Computed

# Claims on slopes: which gap along which factor.
ALONG = {
    "proximity-grows-with-damping": ("damping", "proximity"),
    "linearisation-falls-with-damping": ("damping", "linearisation"),
    "non-convergence-falls-with-epochs": ("epochs", "non_convergence"),
    "warm-start-falls-with-weight-decay": ("weight_decay", "warm_start"),
    "linearisation-grows-with-removed": ("removed", "linearisation"),
    "misaligned-with-width": ("width", "whole"),
    "misaligned-with-depth": ("depth", "whole"),
}
SMALL = "small-at-every-level"


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every task; intervals are over seeds."""
    points, table = computed["points"], computed["table"]
    results = []
    for task, own in points.groupby("task", sort=False):
        shown = table[table.task == task]
        results += [_slope(claims, name, str(task), own, shown) for name in ALONG]
        by_factor = own.groupby("factor", sort=False)
        results += [_share(claims, str(task), str(factor), of_factor) for factor, of_factor in by_factor]
    return results


def _slope(claims: ClaimSheet, name: str, task: str, own: pd.DataFrame, table: pd.DataFrame) -> ClaimResult:
    factor, gap = ALONG[name]
    claim = claims.claim(name, of=task)
    slopes = seed_slopes(own[(own.factor == factor) & (own.gap == gap)])
    if not slopes:
        return out_of_reach(claim, f"There are no two levels of {factor} here at which this gap is a number.")
    return judged(
        claim,
        float(np.mean(slopes)),
        t_interval(slopes),
        if_not_reproduced=f"By level: {_by_level(table[(table.factor == factor) & (table.gap == gap)])}.",
    )


def _by_level(table: pd.DataFrame) -> str:
    return "; ".join(
        f"{row.level:g}: gap {row['mean']:.2g} (training loss {row['train loss']:.2g}, gradient norm "
        f"{row['gradient norm']:.2g})"
        for _, row in table.iterrows()
    )


def _share(claims: ClaimSheet, task: str, factor: str, own: pd.DataFrame) -> ClaimResult:
    claim = claims.claim(SMALL, of=f"{factor}-{task}")
    means = pd.DataFrame(own.groupby(["seed", "level", "gap"]).per_example.mean().unstack())[list(GAPS)]
    means = means.dropna()
    if means.empty:
        return out_of_reach(claim, f"Something diverged at every level of {factor}.")
    shares = (means.linearisation + means.solver) / means.sum(axis=1)
    worst = shares.groupby("seed").max()
    by_level = ", ".join(f"{level:g}: {share:.2g}" for level, share in shares.groupby("level").mean().items())
    return judged(claim, worst.mean(), t_interval(worst), if_not_reproduced=f"Mean shares by level: {by_level}.")
