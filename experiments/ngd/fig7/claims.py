"""Fig. 7: SGD and NGD overfit, and LLC and tr(H) increase meanwhile."""

from __future__ import annotations

from curvlab.lab import ClaimResult, ClaimSheet, Computed
from experiments.ngd.overfitting.last_epoch import judge_sign
from experiments.ngd.overfitting.measures import judge_increases, judge_overfits


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge SGD and NGD on each task; intervals are over seeds."""
    table, results = computed["table"], []
    for task, since in computed["summary"].groupby("task", sort=False):
        of_task = table[table.task == task]
        for optimizer in ("sgd", "ngd"):
            results.append(judge_overfits(claims.claim(f"overfits-{optimizer}", of=str(task)), since, optimizer))
            results += [
                judge_increases(
                    claims.claim(f"{quantity}-increases-{optimizer}", of=str(task)), since, optimizer, quantity
                )
                for quantity in ("llc", "trace")
            ]
            results += [
                judge_sign(
                    claims.claim(f"{quantity}-sign-{optimizer}", of=str(task)), of_task, optimizer, quantity
                )
                for quantity in ("llc", "trace")
            ]
    return results
