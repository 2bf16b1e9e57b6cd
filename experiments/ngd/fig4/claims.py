"""Fig. 4: after the split the step size changes little but fluctuates, and the LLC of NGD rises faster."""

from __future__ import annotations

from functools import partial

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, out_of_reach
from experiments.ngd.branching.compute import judged_branches
from experiments.ngd.branching.measures import BranchResults

UNSCALED = {"ngd": "ngd-unrescaled"}
"""The branch whose updates have a length of their own, by the branch that claims are about."""


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge the branch that each task names against its sgd; intervals are over seeds."""
    found, results = BranchResults.of(computed["table"]), []
    for task, branches in judged_branches(computed.config).items():
        (branch,) = branches
        claim = partial(claims.claim, of=task, branch=branch)
        unscaled = UNSCALED.get(branch, branch)
        ratios = found.all_branches(task, "update_norm_ratio")
        steady = f"{ratios} SGD's own number shows what comes of further training."
        results += [
            found.judge_measure(
                claims.claim("update-norm-steady", of=task, branch=unscaled),
                task,
                unscaled,
                "update_norm_ratio",
                why=steady,
            ),
            _fluctuation(found, task, branch, claim("update-norm-fluctuates")),
            found.judge_measure(claim("llc-rises"), task, branch, "llc_slope"),
            found.judge_values(
                claim("llc-rises-faster"),
                task,
                ["sgd", branch],
                found.by_seed(task, branch, "llc_slope") - found.by_seed(task, "sgd", "llc_slope"),
                why=found.all_branches(task, "llc_slope", "train_loss_ratio"),
            ),
        ]
    return results


def _fluctuation(found: BranchResults, task: str, branch: str, claim: Claim) -> ClaimResult:
    values = found.by_seed(task, branch, "fluctuation") / found.by_seed(task, "sgd", "fluctuation")
    if values.count() < 2:
        return out_of_reach(claim, "It needs three epochs after the split and two seeds.")
    return found.judge_values(claim, task, [branch], values, why=found.all_branches(task, "fluctuation"))
