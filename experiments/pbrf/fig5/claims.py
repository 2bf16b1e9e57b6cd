"""Sec. 6.2, claims: how gaps change along the factors, and that two of the five stay small."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.influence.retraining import GAPS
from curvlab.lab import ClaimResult, ClaimSheet, Computed, out_of_reach, t_interval
from curvlab.lab import judge as judged
from experiments.pbrf.fig5.slopes import seed_slopes

# Claims on slopes: which gap along which factor.
ALONG = {
    "proximity-grows-with-damping": ("damping", "proximity"),
    "linearisation-falls-with-damping": ("damping", "linearisation"),
    "non-convergence-falls-with-epochs": ("epochs", "non_convergence"),
    "warm-start-falls-with-weight-decay": ("weight_decay", "warm_start"),
    "linearisation-grows-with-removed": ("removed", "linearisation"),
    "misaligned-with-width": ("width", "whole over retrained"),
    "misaligned-with-depth": ("depth", "whole over retrained"),
}
SMALL = "small-at-every-level"
# A linearised response further from the estimate than half of what the estimate moves has not arrived: its descent
# is too short, and the solver error is no error of a solver.
ARRIVED = 0.5


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every task; intervals are over seeds."""
    points, table = _with_ratio(computed["points"]), computed["table"]
    results = []
    for task, own in points.groupby("task", sort=False):
        shown = table[table.task == task]
        results += [_slope(claims, name, str(task), own, shown) for name in ALONG]
        by_factor = own.groupby("factor", sort=False)
        results += [_share(claims, str(task), str(factor), of_factor) for factor, of_factor in by_factor]
    return results


def _with_ratio(points: pd.DataFrame) -> pd.DataFrame:
    """Return the points with rows `whole over retrained`, a ratio of means over a level's groups, in each seed.

    An estimate of zero has 1 at every level.
    """
    key = ["task", "factor", "level", "seed"]
    means = points.groupby([*key, "gap"], sort=False).per_example.agg(_mean).unstack()
    ratio = (means.whole / means.retrained).rename("per_example").reset_index()
    return pd.concat([points, ratio.assign(gap="whole over retrained", group=0)], ignore_index=True)


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
        if_not_reproduced=f"By level: {_by_level(own[(own.factor == factor) & (own.gap == gap)], table)}.",
    )


def _by_level(own: pd.DataFrame, table: pd.DataFrame) -> str:
    means = own.groupby("level").per_example.mean()
    states = table[table.factor == own.factor.iloc[0]].drop_duplicates("level")
    return "; ".join(
        f"{row.level:g}: {means[row.level]:.2g} (training loss {row['train loss']:.2g}, gradient norm "
        f"{row['gradient norm']:.2g})"
        for _, row in states.iterrows()
    )


def _share(claims: ClaimSheet, task: str, factor: str, own: pd.DataFrame) -> ClaimResult:
    claim = claims.claim(SMALL, of=f"{factor}-{task}")
    means = pd.DataFrame(own.groupby(["seed", "level", "gap"]).per_example.agg(_mean).unstack())
    lost = means[list(GAPS)].isna().any(axis=1)
    if lost.any():
        levels = ", ".join(f"{level:g}" for level in sorted(set(means[lost].index.get_level_values("level"))))
        return out_of_reach(claim, f"Something diverged at {levels}, so that not every level has its gaps.")
    away = (means.solver / means.moved).groupby("level").mean()
    if away.max() > ARRIVED:
        listed = ", ".join(f"{level:g}: {value:.2g}" for level, value in away.items())
        return out_of_reach(
            claim,
            "The linearised response has not arrived at its minimum: its distance from the influence estimate is, "
            f"over what that moves, {listed}. What its descent lacks is no error of linearisation or solver.",
        )
    shares = (means.linearisation + means.solver) / means[list(GAPS)].sum(axis=1)
    worst = shares.groupby("seed").max()
    by_level = ", ".join(f"{level:g}: {share:.2g}" for level, share in shares.groupby("level").mean().items())
    return judged(claim, worst.mean(), t_interval(worst), if_not_reproduced=f"Mean shares by level: {by_level}.")


def _mean(values: pd.Series) -> float:
    return float(values.mean(skipna=False))
