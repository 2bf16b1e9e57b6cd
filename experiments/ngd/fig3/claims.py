"""Fig. 3: less smoothing gives a higher LLC, also at equal training loss; much smoothing gives that of SGD."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, Interval, out_of_reach, t_interval
from curvlab.lab import judge as judge_claim
from experiments.ngd.fig3.compute import SWEEPS
from experiments.ngd.fig3.equal_loss import MIN_VALUES


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge both constants on each task; intervals are over seeds."""
    table, trends = computed["table"], computed["trends"]
    results = []
    for task in table.task.unique():
        for sweep in SWEEPS:
            own = trends[(trends.task == task) & (trends.sweep == sweep)]
            swept = table[(table.task == task) & (table.sweep == sweep)]
            if swept.empty:
                continue
            results += [
                _falls(claims.claim(f"llc-falls-with-{sweep}", of=task), sweep, own, swept),
                _never_rises(claims.claim(f"llc-never-rises-with-{sweep}", of=task), sweep, swept),
                _approaches_sgd(claims.claim(f"llc-approaches-sgd-{sweep}", of=task), sweep, own),
            ]
        equal, trends_there = (
            computed[name][computed[name].task == task] for name in ("equal_loss", "equal_loss_trends")
        )
        results.append(_falls_at_equal_loss(claims.claim("llc-falls-at-equal-loss", of=task), trends_there, equal))
    return results


def _falls(claim: Claim, sweep: str, trends: pd.DataFrame, table: pd.DataFrame) -> ClaimResult:
    used = trends.dropna(subset="rank_correlation")
    if len(used) < 2:
        reason = f"Fewer than two seeds have {MIN_VALUES} estimates that count: {_left_out(table)}"
        return out_of_reach(claim, reason)
    slope = t_interval(used.slope.to_numpy())
    why = (
        f"Over a decade of {sweep} the LLC changes by {100 * np.expm1(used.slope.mean()):+.1f} % "
        f"({100 * np.expm1(slope.low):+.1f} to {100 * np.expm1(slope.high):+.1f}); the training loss, which the "
        f"LLC depends on, correlates with {sweep} by {used.loss_rank_correlation.mean():+.2f}. {_left_out(table)}"
    )
    values = used.rank_correlation.to_numpy()
    return judge_claim(claim, values.mean(), _of_correlations(values), if_not_reproduced=why)


def _of_correlations(values: np.ndarray) -> Interval:
    """Return the t interval over seeds, cut where correlations end."""
    interval = t_interval(values)
    return replace(interval, low=max(interval.low, -1.0), high=min(interval.high, 1.0))


def _never_rises(claim: Claim, sweep: str, table: pd.DataFrame) -> ClaimResult:
    """Judge the step from one value to the next larger at which the LLC rises most."""
    logs = table.pivot_table(index="seed", columns="value", values="llc").apply(np.log)
    steps = logs.diff(axis="columns").iloc[:, 1:]
    steps = steps.loc[:, steps.count() >= 2]
    if steps.empty:
        return out_of_reach(claim, f"Nowhere have two seeds an LLC at neighbouring values of {sweep}.")
    values, means = [float(value) for value in logs.columns], steps.mean()
    after = float(means.idxmax())  # type: ignore[arg-type]
    before = values[values.index(after) - 1]
    # As many steps are looked at, so many chances there are for one to rise.
    interval = t_interval(steps[after].dropna().to_numpy(), confidence=1 - 0.05 / steps.shape[1])
    ratios = replace(interval, low=float(np.exp(interval.low)), high=float(np.exp(interval.high)))
    why = f"From {sweep} = {before:g} to {after:g}. {_left_out(table)}"
    return judge_claim(claim, float(np.exp(means.max())), ratios, if_not_reproduced=why)


def _falls_at_equal_loss(claim: Claim, trends: pd.DataFrame, table: pd.DataFrame) -> ClaimResult:
    swept = table[table.value.notna()]
    lacking = swept[swept.llc.isna()]
    left_out = f"{len(lacking)} of {len(swept)} networks have no LLC at the level." if len(lacking) else ""
    used = trends.dropna(subset="rank_correlation")
    if len(used) < 2:
        return out_of_reach(claim, f"Fewer than two seeds have {MIN_VALUES} estimates that count. {left_out}")
    above = (used.llc_there / used.sgd).dropna().to_numpy()
    beside = f" {100 * (above.mean() - 1):+.0f} % on SGD's there" if len(above) else ""
    why = (
        f"At a training loss of {used.level.min():.3g} to {used.level.max():.3g}, which all networks of a seed "
        f"pass, the LLC at the smallest alpha is {used.llc_there.mean():.3g}{beside}. {left_out}"
    )
    values = used.rank_correlation.to_numpy()
    return judge_claim(claim, values.mean(), _of_correlations(values), if_not_reproduced=why)


def _approaches_sgd(claim: Claim, sweep: str, trends: pd.DataFrame) -> ClaimResult:
    ratios = (trends.llc_there / trends.sgd).dropna().to_numpy()
    if len(ratios) < 2:
        return out_of_reach(claim, f"At the largest {sweep}, or for SGD, fewer than two seeds have an LLC.")
    why = (
        f"At the largest {sweep}, {trends.most_smoothed.iloc[0]:g}, NGD is not yet SGD, or {len(ratios)} seeds "
        "are too few to tell: compare the training losses in the figure."
    )
    return judge_claim(claim, ratios.mean(), t_interval(ratios), if_not_reproduced=why)


def _left_out(table: pd.DataFrame) -> str:
    lacking = table[table.llc.isna()]
    if lacking.empty:
        return "Every estimate counts."
    values = ", ".join(f"{value:g}" for value in sorted(lacking.value.unique()))
    return f"{len(lacking)} of {len(table)} estimates are left out (at {values}): not converged, or not valid."
