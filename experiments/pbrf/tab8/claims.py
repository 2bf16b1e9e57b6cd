"""Table 8, claims: two stages stand between warm start and PBRF."""

from __future__ import annotations

from dataclasses import replace

from curvlab.lab import ClaimResult, ClaimSheet, Computed
from curvlab.lab.reporting.claims import OUT_OF_REACH
from experiments.pbrf.correlation_claims import Tables, difference, judge_difference, seed_values

PAIRS = {"above-warm-start": ("two_stage", "warm"), "below-pbrf": ("proximal_bregman", "two_stage")}
AT_ALL = 0.5  # a mean correlation below which "worse than" compares two that are not there


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every task by the Hessian's influence, as the paper's table, the other beside it."""
    tables = dict(computed)
    return [_judge(tables, claims, str(task), name) for task in tables["table"].task.unique() for name in PAIRS]


def _judge(computed: Tables, claims: ClaimSheet, task: str, name: str) -> ClaimResult:
    pair = PAIRS[name]
    result = judge_difference(claims.claim(name, of=task), computed, task, "hessian", pair, "pearson")
    if "gauss_newton" in set(computed["table"].curvature):
        other = difference(computed, task, "gauss_newton", pair, "pearson").mean()
        text = f"{result.explanation} With the Gauss-Newton matrix: {other:.2f} over test examples."
        result = replace(result, explanation=text)
    largest = max(seed_values(computed, task, "hessian", response, "pearson").mean() for response in pair)
    if name == "below-pbrf" and largest < AT_ALL and result.verdict != OUT_OF_REACH:
        reason = f"Influence correlates with neither (at most {largest:.2f})."
        return replace(result, verdict=OUT_OF_REACH, explanation=f"{reason} {result.explanation}")
    return result
