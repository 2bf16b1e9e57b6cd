"""Fig. 5: the larger NGD's learning rate, the faster its LLC rises, and the higher it ends."""

from __future__ import annotations

from itertools import pairwise

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, out_of_reach
from experiments.ngd.branching.compute import judged_branches
from experiments.ngd.branching.measures import BranchResults


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge the branches that each task names, in the order of their learning rates, and its sgd."""
    found, results = BranchResults.of(computed["table"]), []
    for task, branches in judged_branches(computed.config).items():
        words = {"of": task, "branches": ", ".join(branches)}
        results += [
            _increasing(claims.claim("llc-rises-faster", **words), found, task, branches, "llc_growth"),
            _increasing(claims.claim("llc-plateaus-higher", **words), found, task, branches, "llc_end"),
            found.judge_measure(claims.claim("llc-sgd-steady", of=task), task, "sgd", "llc_change"),
        ]
    return results


def _increasing(claim: Claim, found: BranchResults, task: str, branches: list[str], measure: str) -> ClaimResult:
    values = [found.by_seed(task, branch, measure) for branch in branches]
    steps = [(after - before).dropna() for before, after in pairwise(values)]
    if any(len(step) < 2 for step in steps):
        return out_of_reach(claim, found.why_no_llc(task, branches))
    smallest = min(steps, key=lambda step: step.mean())
    why = f"{found.all_branches(task, measure)} {found.all_branches(task, 'train_loss_ratio')}"
    return found.judge_values(claim, task, branches, smallest, why=why)
