"""The claim of tab6 and tab7: influence answers what the PBRF asks, not what retraining asks."""

from __future__ import annotations

from curvlab.reporting import ClaimResult, ClaimSheet
from experiments.pbrf.correlation_claims import judge_correlation
from experiments.target import Computed

CLAIMS = {
    "pbrf": ("proximal_bregman", "pearson"),
    "pbrf-ranks": ("proximal_bregman", "spearman"),
    "linearised": ("linearised", "pearson"),
    "cold": ("cold", "pearson"),
    "warm": ("warm", "pearson"),
}


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every task; the table is of one curvature."""
    (curvature,) = computed["table"].curvature.unique()
    return [
        judge_correlation(
            claims.claim(name, of=str(task)), computed, str(task), str(curvature), response, coefficient
        )
        for task in computed["table"].task.unique()
        for name, (response, coefficient) in CLAIMS.items()
    ]
