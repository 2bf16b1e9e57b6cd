"""Table 8, claims: two stages stand between warm start and PBRF."""

from __future__ import annotations

from curvlab.reporting import ClaimResult, ClaimSheet
from experiments.pbrf.correlation_claims import judge_difference
from experiments.target import Computed

PAIRS = {"above-warm-start": ("two_stage", "warm"), "below-pbrf": ("proximal_bregman", "two_stage")}


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every task by the Hessian's influence, as the paper's table."""
    return [
        judge_difference(claims.claim(name, of=str(task)), computed, str(task), "hessian", pair, "pearson")
        for task in computed["table"].task.unique()
        for name, pair in PAIRS.items()
    ]
