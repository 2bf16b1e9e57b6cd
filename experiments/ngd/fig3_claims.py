"""Fig. 3, claims: less smoothing gives a higher LLC; much smoothing gives that of SGD."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from curvlab.reporting import Claim, ClaimResult, Criterion, judge, out_of_reach, t_interval

SOURCE = "Saghir et al. 2024, Sec. 3.2, Fig. 3"
SWEEPS = {"alpha": "(a)", "epsilon": "(b)"}
_MIN_VALUES = 3  # of a sweep, for a seed's trend


def summary_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row a value: seeds, those that converged, those with an LLC, its mean and 95 % t interval."""
    rows = []
    for (sweep, value), own in table.groupby(["sweep", "value"], sort=False, dropna=False):
        llc = own.llc.dropna().to_numpy()
        row: dict[str, Any] = {"sweep": sweep, "value": value, "seeds": len(own)}
        row |= {"converged": int(own.converged.sum()), "llcs": len(llc), "llc": np.nan}
        row |= {"llc_low": np.nan, "llc_high": np.nan}
        if len(llc):
            interval = t_interval(llc)
            row |= {"llc": llc.mean(), "llc_low": interval.low, "llc_high": interval.high}
        row |= {"train_loss": own.train_loss.mean(), "validation_loss": own.validation_loss.mean()}
        rows.append(row | {"problems": "; ".join(sorted(set(own.problem.dropna())))})
    return pd.DataFrame(rows)


def trend_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row a sweep and seed, over the values that have an LLC.

    Columns: values, how many; rank_correlation, Spearman's, of LLC and value; slope, of ln LLC on log10 of the
    value; loss_rank_correlation, of the training loss and the value; most_smoothed, the largest value, with
    llc_there and sgd, the LLCs of NGD and of SGD at the same seed.
    """
    sgd = table[table.sweep == "sgd"].set_index("seed").llc
    rows = []
    for sweep in SWEEPS:
        for seed, own in table[table.sweep == sweep].groupby("seed", sort=False):
            used = own[own.llc.notna() & (own.llc > 0)].sort_values("value")
            row = {"sweep": sweep, "seed": seed, "values": len(used), "sgd": sgd.get(seed, np.nan)}
            row |= dict.fromkeys(("rank_correlation", "slope", "loss_rank_correlation"), np.nan)
            at_most = own.iloc[own.value.argmax()]
            row |= {"most_smoothed": at_most.value, "llc_there": at_most.llc}
            if len(used) >= _MIN_VALUES:
                row["rank_correlation"] = float(stats.spearmanr(used.value, used.llc).statistic)
                row["slope"] = float(np.polyfit(np.log10(used.value), np.log(used.llc), 1)[0])
                row["loss_rank_correlation"] = float(stats.spearmanr(used.value, used.train_loss).statistic)
            rows.append(row)
    return pd.DataFrame(rows)


def judge_claims(table: pd.DataFrame, trends: pd.DataFrame) -> list[ClaimResult]:
    """Judge the claims for each constant; intervals are over seeds."""
    results = []
    for sweep in SWEEPS:
        own = trends[trends.sweep == sweep]
        results += [_falls(sweep, own, table[table.sweep == sweep]), _approaches_sgd(sweep, own)]
    return results


def _falls(sweep: str, trends: pd.DataFrame, table: pd.DataFrame) -> ClaimResult:
    claim = Claim(
        id=f"llc-falls-with-{sweep}",
        statement=f"Reducing {sweep} increases the LLC of NGD.",
        source=SOURCE + SWEEPS[sweep],
        paper_value="increases, no number",
        measure=f"Spearman's correlation of {sweep} and LLC over the values with an LLC, mean over seeds",
        criterion=Criterion(at_most=0.0),
    )
    used = trends.dropna(subset="rank_correlation")
    if len(used) < 2:
        return out_of_reach(
            claim, f"Fewer than two seeds have {_MIN_VALUES} estimates that count: {_left_out(table)}"
        )
    slope = t_interval(used.slope.to_numpy())
    why = (
        f"Over a decade of {sweep} the LLC changes by {100 * np.expm1(used.slope.mean()):+.1f} % "
        f"({100 * np.expm1(slope.low):+.1f} to {100 * np.expm1(slope.high):+.1f}); the training loss, which the "
        f"LLC depends on, correlates with {sweep} by {used.loss_rank_correlation.mean():+.2f}. {_left_out(table)}"
    )
    values = used.rank_correlation.to_numpy()
    return judge(claim, values.mean(), t_interval(values), if_not_reproduced=why)


def _approaches_sgd(sweep: str, trends: pd.DataFrame) -> ClaimResult:
    claim = Claim(
        id=f"llc-approaches-sgd-{sweep}",
        statement=f"For large {sweep} the LLC of NGD approaches that of SGD.",
        source=SOURCE + SWEEPS[sweep],
        paper_value="expected from Eq. 7, no number",
        measure=f"LLC of NGD at the largest {sweep} over that of SGD, seed by seed; mean over seeds",
        criterion=Criterion(at_least=0.9, at_most=1.1),
    )
    ratios = (trends.llc_there / trends.sgd).dropna().to_numpy()
    if len(ratios) < 2:
        return out_of_reach(claim, f"At the largest {sweep}, or for SGD, fewer than two seeds have an LLC.")
    why = (
        f"At the largest {sweep}, {trends.most_smoothed.iloc[0]:g}, NGD is not yet SGD, or {len(ratios)} seeds "
        "are too few to tell: compare the training losses in the figure."
    )
    return judge(claim, ratios.mean(), t_interval(ratios), if_not_reproduced=why)


def _left_out(table: pd.DataFrame) -> str:
    lacking = table[table.llc.isna()]
    if lacking.empty:
        return "Every estimate counts."
    values = ", ".join(f"{value:g}" for value in sorted(lacking.value.unique()))
    return f"{len(lacking)} of {len(table)} estimates are left out (at {values}): not converged, or not valid."
