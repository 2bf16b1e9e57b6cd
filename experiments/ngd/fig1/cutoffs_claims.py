"""Does NGD's LLC stay the higher one, and by as much, with other settings of the sampler?"""

from __future__ import annotations

import pandas as pd

from curvlab.lab import Claim, ClaimResult, ClaimSheet, out_of_reach, t_interval
from curvlab.lab import judge as judge_claim
from experiments.ngd.fig1.cutoffs import SWEEPS, relative_differences
from experiments.ngd.fig1.networks import PLACE, network_name


def judge_cutoffs(table: pd.DataFrame, summary: pd.DataFrame, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge sign and size over the localizations, and the size over the step sizes, for each network.

    Args:
        table: `cutoffs`.
        summary: `cutoff_summary`.
        claims: those of the target.
    """
    results = []
    for task, width in table[[*PLACE]].drop_duplicates().itertuples(index=False, name=None):
        network = network_name(task, width)
        own, its_summary = (part[(part.task == task) & (part.width == width)] for part in (table, summary))
        over = {
            sweep: relative_differences(own[own.sweep == sweep]) for sweep in SWEEPS if sweep in set(own.sweep)
        }
        why = "NGD over SGD: " + "; ".join(_described(row) for _, row in its_summary.iterrows()) + "."
        for name, sweep in (
            ("llc-higher-every-cutoff", "localization"),
            ("size-whatever-cutoff", "localization"),
            ("size-whatever-step", "step_size"),
        ):
            claim = claims.claim(name, of=network)
            differences = over.get(sweep, pd.DataFrame())
            results.append(_judge(claim, differences, why, smallest=name.startswith("llc-higher")))
    return results


def _judge(claim: Claim, differences: pd.DataFrame, why: str, *, smallest: bool) -> ClaimResult:
    """Judge the smallest of the settings' means, or what changes from the first setting to the last."""
    lacking = [value for value in differences if differences[value].notna().sum() < 2]
    if differences.shape[1] < 2 or lacking:
        return out_of_reach(claim, f"Two settings at least need two seeds each with both estimates. {why}")
    if smallest:
        values = differences[differences.mean().idxmin()].dropna().to_numpy()
    else:
        values = (differences.iloc[:, -1] - differences.iloc[:, 0]).dropna().to_numpy()
    if len(values) < 2:
        return out_of_reach(claim, f"Fewer than two seeds have both estimates at both ends. {why}")
    return judge_claim(claim, values.mean(), t_interval(values), if_not_reproduced=why)


def _described(row: pd.Series) -> str:
    text = f"γ = {row.localization:g} (γ/(nβ) = {row.curvature_cutoff:.2g}), step size {row.step_size:g}: "
    if not row.seeds:
        return text + f"none ({row.problems or 'training has not converged'})"
    return text + f"{100 * row.relative_difference:+.0f} % ({100 * row.low:+.0f} to {100 * row.high:+.0f})"
