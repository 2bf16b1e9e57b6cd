"""One state, then SGD and NGD: update size and LLC after the split (Saghir et al. 2024, Fig. 4).

make ngd-fig4 PRESET=smoke|embedded|laptop|paper ARGS="branches.ngd.alpha=4 seeds=[0,1,2,3,4]"

SGD trains to the split; from there it goes on, beside NGD at the same learning rate. The paper's update size is
‖∇L‖ for SGD and ‖F_s⁻¹∇L‖ for NGD, ours is ‖Δw‖/lr, which is the same. The claims are judged on Kaldi's NGD with
its output rescaled to the gradient's norm (`ngd`, as in all targets), whose update size is ‖∇L‖ by construction.
Beside it stand the same without rescaling (`ngd-unrescaled`), which only shrinks the gradient, and on a small net
Eqs. 6 and 7 literally, with the full Fisher matrix of each batch (`exact-ngd`), where nothing bounds the size.
Branches see the same batches. An estimate counts as an LLC only where the chains have mixed and stayed above the
minimum near the weights (`valid`), from which it is measured: the split is no minimum, and from the weights, as in
the paper (`llc_raw`), the estimate lacks what the loss can still fall (`descent`).
"""

from __future__ import annotations

from functools import partial

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, Target, out_of_reach
from experiments.ngd.branching import PAPER, Branches

TARGET = Target(
    __name__,
    title="One state, then SGD and NGD: update size and LLC",
    paper=PAPER
    | {"data._target_": "FashionMNIST", "before.optimizer.lr": 0.01, "branches.*.lr": "SGD 0.01, NGD 0.01"},
    compute="experiments.ngd.branching:compute",
    draw="experiments.ngd.branching:draw",
)


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge each task's NGD (exact NGD where it has that) against its SGD; intervals are over seeds."""
    found, results = Branches.of(computed["table"]), []
    for task, branches in found.tasks():
        branch, unscaled = ("exact-ngd",) * 2 if "ngd" not in branches else ("ngd", "ngd-unrescaled")
        claim = partial(claims.claim, of=task, branch=branch)
        if unscaled not in branches:
            unscaled = branch
        steady = claims.claim("update-norm-steady", of=task, branch=unscaled)
        ratios = found.told(task, "update_norm_ratio")
        why = f"{ratios} SGD's own number shows what comes of further training."
        faster = found.by_seed(task, branch, "llc_slope") - found.by_seed(task, "sgd", "llc_slope")
        slopes = found.told(task, "llc_slope", "train_loss_ratio")
        results += [
            found.judge_measure(steady, task, unscaled, "update_norm_ratio", why=why),
            _fluctuation(found, task, branch, claim("update-norm-fluctuates")),
            found.judge_measure(claim("llc-rises"), task, branch, "llc_slope"),
            found.judge_values(claim("llc-rises-faster"), task, ["sgd", branch], faster, why=slopes),
        ]
    return results


def _fluctuation(found: Branches, task: str, branch: str, claim: Claim) -> ClaimResult:
    values = found.by_seed(task, branch, "fluctuation") / found.by_seed(task, "sgd", "fluctuation")
    if values.count() < 2:
        return out_of_reach(claim, "It needs three epochs after the split and two seeds.")
    return found.judge_values(claim, task, [branch], values, why=found.told(task, "fluctuation"))
