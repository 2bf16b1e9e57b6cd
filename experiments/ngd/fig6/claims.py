"""Fig. 6: a raised SGD learning rate brings larger steps and lower losses, but no larger LLC."""

from __future__ import annotations

from curvlab.lab import ClaimResult, ClaimSheet, Computed
from experiments.ngd.branching.compute import judged_branches
from experiments.ngd.branching.measures import BranchResults


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge SGD at the raised learning rate on each task."""
    found, results = BranchResults.of(computed["table"]), []
    for task, branches in judged_branches(computed.config).items():
        (branch,) = branches
        llc = found.by_seed(task, branch, "llc_change")
        why = found.all_branches(task, "llc_change", "train_loss_ratio")
        if llc.mean() <= 0.1:
            why = f"It does not on average; {len(llc)} seeds are too few to tell. {why}"
        results += [
            # The paper defines the step size as ‖∇L‖, which does not contain the learning rate.
            found.judge_measure(
                claims.claim("step-rises", of=task),
                task,
                branch,
                "update_norm_ratio",
                why=f"{found.all_branches(task, 'update_norm_ratio')} "
                f"With the learning rate: {found.all_branches(task, 'step_norm_ratio')}",
            ),
            found.judge_measure(
                claims.claim("step-decreases", of=task),
                task,
                branch,
                "step_norm_end",
                why="The batches' gradients do not shrink with the loss at this learning rate: see the figure.",
            ),
            found.judge_values(claims.claim("llc-does-not-increase", of=task), task, [branch], llc, why=why),
            *(
                found.judge_measure(claims.claim(f"{name}-loss-falls", of=task), task, branch, measure)
                for name, measure in (("training", "train_loss_ratio"), ("validation", "validation_loss_ratio"))
            ),
        ]
    return results
