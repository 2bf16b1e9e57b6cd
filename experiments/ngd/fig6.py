"""One state, then SGD at a raised learning rate (Saghir et al. 2024, Fig. 6).

make ngd-fig6 PRESET=smoke|embedded|laptop|paper ARGS="branches.sgd-raised.lr=0.1"

SGD trains to the split; then its learning rate is raised a hundredfold (`sgd-raised`), beside NGD at the old one.
Is it the larger step that raises the LLC, or NGD? The paper leaves out the pair that tells: NGD at the raised rate
(`ngd-raised`, our addition), whose steps are as long as those of `sgd-raised`. Their difference is the paper's
conclusion itself: its direction, not its length, raises the LLC (`direction-not-length`). See ngd-fig4 for
what is measured, and for the readings of NGD.
"""

from __future__ import annotations

from curvlab.lab import ClaimResult, ClaimSheet, Computed, Target
from experiments.ngd.branching import PAPER, Branches, compute, draw  # noqa: F401  this target's
from experiments.ngd.sampling import measured_both_ways

TARGET = Target(
    __name__,
    title="One state, then SGD at a raised learning rate",
    paper=PAPER | {"data.num_train": "60,000, not stated", "branches.*.lr": "SGD 1e-4, then 1e-2; NGD 1e-4"},
    after=("ngd/fig5",),
    curves=("table: update_norm, llc, train_loss over epoch by branch",),
)
RAISED = "sgd-raised"


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge SGD at the raised learning rate on each task that has it."""
    found, results = Branches.of(computed["table"]), []
    for task, branches in found.tasks():
        if RAISED not in branches:
            continue
        # The paper defines the step size as ‖∇L‖, which does not contain the learning rate.
        with_rate = f"With the learning rate: {found.told(task, 'step_norm_ratio')}"
        rises = f"{found.told(task, 'update_norm_first', 'update_norm_ratio')} {with_rate}"
        shrinks = "The batches' gradients do not shrink with the loss at this learning rate: see the figure."
        of_steps_and_losses = [
            ("step-rises", "update_norm_first", rises),
            ("step-decreases", "step_norm_end", shrinks),
            ("training-loss-falls", "train_loss_ratio", ""),
            ("validation-loss-falls", "validation_loss_ratio", ""),
        ]
        results += [
            found.judge_measure(claims.claim(name, of=task), task, RAISED, measure, why=text)
            for name, measure, text in of_steps_and_losses
        ]
        for column, words in measured_both_ways(task):
            llc = found.by_seed(task, RAISED, f"{column}_change")
            why = found.told(task, f"{column}_change", "train_loss_ratio")
            if llc.mean() <= 0.1:
                why = f"It does not on average; {len(llc)} seeds are too few to tell. {why}"
            still = claims.claim("llc-does-not-increase", **words)
            direction = claims.claim("direction-not-length", **words)
            results += [
                found.judge_measure(still, task, RAISED, f"{column}_change", why=why),
                found.judge_direction(direction, task, RAISED, "ngd-raised", column),
            ]
    return results
