"""1-D function: the method converges.

What follows from α_k for its local rate is ours, and in summary.csv.
"""

from __future__ import annotations

from curvlab.lab import ClaimResult, ClaimSheet, Computed
from experiments.rank1.verdicts import judge_extreme


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge all claims; everything is deterministic."""
    table = computed["table"]
    ours = table[table.delta.notna()]
    runs = [own for _, own in ours.groupby(["delta", "start"], sort=False)]
    ratio = max(own.gradient_norm.iloc[-1] / own.gradient_norm.iloc[0] for own in runs)
    return [
        judge_extreme(
            claims.claim("converges"),
            ratio,
            "deterministic",
            why="The number of steps is too small for the largest δ: raise num_steps.",
        ),
    ]
