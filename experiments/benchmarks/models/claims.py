"""Whether a product fits where a gradient step fits, and how far it is from its floor."""

from __future__ import annotations

import pandas as pd

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, Interval, judge, out_of_reach, t_interval

SMALLEST_RISE = 50.0  # MiB: below, what Python and the system do is no longer negligible


def judge_claims(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge memory for each model, over repeats, and the largest times, over rounds."""
    table, results = computed["table"], []
    for name, own in computed["repeats"].groupby("model", sort=False):
        claim = claims.claim("memory", of=str(name))
        if not own.gradient_rise_mib.min() >= SMALLEST_RISE:
            reason = f"A gradient step rises by {own.gradient_rise_mib.min():.3g} MiB: too little to be measured."
            results.append(out_of_reach(claim, reason))
            results.append(out_of_reach(claims.claim("low-memory", of=str(name)), reason))
            continue
        interval = t_interval(own.memory_ratio, unit="repeats")
        mean = float(own.memory_ratio.mean())
        results.append(judge(claim, mean, interval, if_not_reproduced=_reason(own)))
        results.append(_judged_in_two_passes(own, claims.claim("low-memory", of=str(name))))
    results.append(_slowest(claims.claim("time"), table, "time_to_floor"))
    results.append(_slowest(claims.claim("low-memory-time"), table, "low_memory_time_to_floor"))
    return results


def _slowest(claim: Claim, table: pd.DataFrame, column: str) -> ClaimResult:
    """Judge the model that takes longest, over rounds."""
    row = table.sort_values(column).iloc[-1]
    kind = f"t 95 %, {row.rounds} rounds"
    interval = Interval(float(row[f"{column}_low"]), float(row[f"{column}_high"]), kind, int(row.rounds))
    reason = f"{row.model} is the slowest; the median is {table[column].median():.3g}."
    return judge(claim, float(row[column]), interval, if_not_reproduced=reason)


def _judged_in_two_passes(own: pd.DataFrame, claim: Claim) -> ClaimResult:
    if "low_memory_ratio" not in own:
        return out_of_reach(claim, "These tables are older than low_memory: compute them again.")
    interval = t_interval(own.low_memory_ratio, unit="repeats")
    row = own.median(numeric_only=True)
    reason = f"A gradient step holds {row.gradient_mib:.3g} MiB, a product in two passes {row.low_memory_mib:.3g}."
    return judge(claim, float(own.low_memory_ratio.mean()), interval, if_not_reproduced=reason)


def _reason(own: pd.DataFrame) -> str:
    """Return where the memory is."""
    row = own.median(numeric_only=True)
    return (
        f"A gradient step holds {row.gradient_mib:.3g} MiB, a product {row.product_mib:.3g}; by plain attention, "
        f"without the fused kernel, a gradient step holds {row.plain_gradient_mib:.3g}, and the ratio would be "
        f"{row.plain_ratio:.3g}. With jvp='finite_difference' in the product it is {row.differences_ratio:.3g}."
    )
