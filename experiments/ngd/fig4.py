"""One state, then SGD and NGD: update size and LLC after the split (Saghir et al. 2024, Fig. 4).

make ngd-fig4 PRESET=smoke|embedded|laptop|paper ARGS="branches.ngd.alpha=4 seeds=[0,1,2,3,4]"

SGD trains to the split; from there it goes on, beside NGD at the same learning rate. The paper's update size is
‖∇L‖ for SGD and ‖F_s⁻¹∇L‖ for NGD, ours is ‖Δw‖/lr, which is the same. The claims are judged on Kaldi's NGD with
its output rescaled to the gradient's norm (`ngd`, as in all targets), whose update size is ‖∇L‖ by construction,
on the same without rescaling (`ngd-unrescaled`), which only shrinks the gradient, by a factor that Kaldi's code
has and Eq. 5 has not, and on a small net on Eqs. 6 and 7 literally, with the full Fisher matrix of each batch
(`exact-ngd`), where nothing bounds the size. Branches see the same batches. In the paper's own setting the LLC
is estimated at the split and at the end alone. An estimate counts as an LLC only where the chains have mixed and
stayed above the minimum near the weights (`valid`), from which it is measured: the split is no minimum, and from
the weights, as in the paper (`llc_raw`), the estimate lacks what the loss can still fall (`descent`).

The paper splits when the LLC has stabilised. In its own setting (`laptop`, 256-256) this is not quite so: SGD's
LLC goes on from 65 to 77 in the eight epochs after the split, so NGD's rise is to be compared with SGD's.
"""

from __future__ import annotations

from collections.abc import Iterator

from curvlab.lab import ClaimResult, ClaimSheet, Computed, Target, out_of_reach
from experiments.ngd.branching import PAPER, Branches, compute, draw  # noqa: F401  this target's
from experiments.ngd.sampling import measured_both_ways, whose

TARGET = Target(
    __name__,
    title="One state, then SGD and NGD: update size and LLC",
    paper=PAPER
    | {"data._target_": "FashionMNIST", "before.optimizer.lr": 0.01, "branches.*.lr": "SGD 0.01, NGD 0.01"},
    curves=("table: update_norm, llc, train_loss over epoch by branch",),
)

READINGS = {  # of Eqs. 6 and 7: how ids of claims on the size begin, and of all others; what bounds the update
    "ngd-unrescaled": ("", "unrescaled-", "without rescaling to the gradient's length"),
    "ngd": ("rescaled-", "", "rescaled to the gradient's length, which keeps it by construction"),
    "exact-ngd": ("", "", "with nothing that bounds it"),
}


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every reading of each task's NGD against its SGD; intervals are over seeds."""
    found, results = Branches.of(computed["table"]), []
    for task, branches in found.tasks():
        readings = [reading for reading in READINGS if reading in branches]
        results += [_steady(found, claims, task, reading) for reading in readings]
        results += [_fluctuation(found, claims, task, reading) for reading in readings]
        for reading in readings:
            results += _of_llc(found, claims, task, reading)
    return results


def _words(task: str, reading: str) -> dict[str, str]:
    """Return {of}, {branch} and {whose} of all claims but the one on the size itself."""
    return {"of": f"{READINGS[reading][1]}{task}", "branch": reading, **whose(reading == "exact-ngd")}


def _steady(found: Branches, claims: ClaimSheet, task: str, reading: str) -> ClaimResult:
    prefix, _, words = READINGS[reading]
    of = _words(task, reading) | {"of": f"{prefix}{task}", "task": task, "reading": words}
    why = f"{found.told(task, 'update_norm_ratio')} SGD's own number shows what comes of further training."
    return found.judge_measure(
        claims.claim("update-norm-steady", **of), task, reading, "update_norm_ratio", why=why
    )


def _fluctuation(found: Branches, claims: ClaimSheet, task: str, reading: str) -> ClaimResult:
    claim = claims.claim("update-norm-fluctuates", task=task, **_words(task, reading))
    values = found.by_seed(task, reading, "fluctuation") / found.by_seed(task, "sgd", "fluctuation")
    if values.count() < 2:
        return out_of_reach(claim, "It needs three epochs after the split and two seeds.")
    return found.judge_values(claim, task, [reading], values, why=found.told(task, "fluctuation"))


def _of_llc(found: Branches, claims: ClaimSheet, task: str, reading: str) -> Iterator[ClaimResult]:
    """Yield the claims on the LLC: of unrescaled NGD none at equal length, none where it is not sampled."""
    estimates = found.table[(found.table.task == task) & (found.table.branch == reading)].llc
    if reading == "ngd-unrescaled" and estimates.isna().all():
        return
    for column, stated in measured_both_ways(task):
        words = _words(stated["of"], reading)
        own = stated | words | {"how": stated["how"] + _how_often(found, task, reading, column)}
        why = found.told(task, f"{column}_slope", "train_loss_ratio")
        slopes = [found.by_seed(task, name, f"{column}_slope") for name in (reading, "sgd")]
        faster = claims.claim("llc-rises-faster", **own)
        yield found.judge_measure(claims.claim("llc-rises", **own), task, reading, f"{column}_slope")
        if reason := found.below_zero(task, ["sgd", reading], column):
            yield out_of_reach(faster, reason)
        else:
            yield found.judge_values(faster, task, ["sgd", reading], slopes[0] - slopes[1], why=why)
        if reading != "ngd-unrescaled":
            direction = claims.claim("direction-not-length", **own)
            yield found.judge_direction(direction, task, "sgd", reading, column)


def _how_often(found: Branches, task: str, branch: str, column: str) -> str:
    """Say so where the LLC is estimated once after the split: that tells a change, and not how steady it is."""
    own = found.table[(found.table.task == task) & (found.table.branch == branch)].dropna(subset=column)
    return "" if own.epoch.nunique() != 1 else ", from two points, which tell a rise and not a steady one"
