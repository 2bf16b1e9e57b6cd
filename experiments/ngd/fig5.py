"""One state, then NGD at several learning rates (Saghir et al. 2024, Fig. 5).

make ngd-fig5 PRESET=smoke|embedded|laptop|paper ARGS="branches.ngd-high.lr=0.3"

SGD trains to the split; from there it goes on at its learning rate, beside NGD at one, ten and a hundred times
that rate. The claims are judged on Kaldi's NGD with rescaled output (`ngd-low`, `-middle`, `-high`); the same
without rescaling stands beside it, and on a small net Eqs. 6 and 7 literally (`exact-ngd-...`). See ngd-fig4 for
what is measured, and ngd-fig6 for SGD at the raised rate, which the comparison here lacks.
"""

from __future__ import annotations

from itertools import pairwise

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, Target, out_of_reach
from curvlab.lab.claims import withheld
from experiments.ngd.branching import PAPER, Branches, compute, draw  # noqa: F401  this target's
from experiments.ngd.sampling import measured_both_ways, whose

TARGET = Target(
    __name__,
    title="One state, then NGD at several learning rates",
    paper=PAPER
    | {
        "data.num_train": "60,000, not stated",
        "data._target_": "MNIST",
        "branches.*.lr": "SGD 1e-4; NGD 1e-4, 1e-3, 1e-2",
    },
    curves=("table: update_norm, llc, train_loss over epoch by branch",),
)


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge NGD at all rates (exact NGD where the task has that), in their order, and SGD."""
    found, results = Branches.of(computed["table"]), []
    for task, every in found.tasks():
        branches = [name for name in every if name.endswith(("-low", "-middle", "-high"))]
        source = whose(branches[0].startswith("exact-"))
        for column, words in measured_both_ways(task):
            faster, higher, steady = (
                claims.claim(name, **words, **source, branches=", ".join(branches))
                for name in ("llc-rises-faster", "llc-plateaus-higher", "llc-sgd-steady")
            )
            results += [
                _increasing(faster, found, task, branches, f"{column}_growth"),
                withheld(
                    _increasing(higher, found, task, branches, f"{column}_end"),
                    found.still_rising(task, branches, column),
                ),
                found.judge_measure(steady, task, "sgd", f"{column}_change"),
            ]
    return results


def _increasing(claim: Claim, found: Branches, task: str, branches: list[str], measure: str) -> ClaimResult:
    values = [found.by_seed(task, branch, measure) for branch in branches]
    steps = [(after - before).dropna() for before, after in pairwise(values)]
    if any(len(step) < 2 for step in steps):
        return out_of_reach(claim, found.why_no_llc(task, branches))
    smallest = min(steps, key=lambda step: step.mean())
    listed = ", ".join(f"{name} {step.mean():+.3g}" for name, step in zip(branches[1:], steps, strict=True))
    why = f"From each rate to the next: {listed}. {found.told(task, measure, 'train_loss_ratio')}"
    return found.judge_values(claim, task, branches, smallest, why=why)
