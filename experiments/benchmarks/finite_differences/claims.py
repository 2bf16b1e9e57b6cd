"""Is the default step of each precision good enough on each task?"""

from __future__ import annotations

from curvlab.lab import ClaimResult, ClaimSheet, Computed
from curvlab.lab import judge as judge_claim
from experiments.benchmarks.finite_differences.compute import geometric_mean


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge the error at the default step; intervals are over directions."""
    table, summary, results = computed["table"], computed["summary"], []
    for (task, precision), curve in summary.groupby(["task", "precision"], sort=False):
        (step,) = curve[curve.default].step
        own = table[(table.task == task) & (table.precision == precision) & (table.step == step)]
        value, interval = geometric_mean(own.relative_error)
        claim = claims.claim(f"default-step-{precision}", of=str(task), step=f"{step:g}")
        explanation = "The figure shows which step does better."
        results.append(judge_claim(claim, value, interval, if_not_reproduced=explanation))
    return results
