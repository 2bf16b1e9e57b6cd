"""LLC and tr(H) of SGD and NGD while they overfit (Saghir et al. 2024, Fig. 7).

make ngd-fig7 PRESET=smoke|embedded|laptop|paper ARGS="label_noise=0.2"

Trained until the validation loss has long passed its minimum; what happens from there on is judged. The estimates
of early checkpoints are often no LLC, since training has not converged and the chains still move: they are drawn
hollow and count in no claim; the paper counts every estimate. The LLC is measured from the lowest sampled
point; the paper's, from the weights, is `llc_raw`, and lacks `descent`. Data and labels: `overfitting.compute`.
When training ends is ours to choose: last_epoch.csv has every change as it would be had it ended earlier, and
claims ask whether its sign depends on that. tr(H) takes as many probes as an error of `trace.rtol` takes,
`trace.max_matvecs` at most.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from curvlab.lab import ClaimResult, ClaimSheet, Computed, Target, panels
from experiments.ngd import overfitting
from experiments.ngd.overfitting import compute  # noqa: F401  compute is this target's

TARGET = Target(
    __name__,
    title="LLC and Hessian trace while overfitting",
    paper=overfitting.PAPER,
    curves=("table: llc, train_loss, trace over epoch by optimizer",),
)
QUANTITIES = {"llc": "LLC", "trace": "Hessian trace"}


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge SGD and NGD on each task; intervals are over seeds."""
    table, results = computed["table"], []
    for task, since in computed["summary"].groupby("task", sort=False):
        own = table[table.task == task]
        changes = overfitting.changes_by_last_epoch(own)
        ends = overfitting.last_epoch_table(own, changes)
        for optimizer in ("sgd", "ngd"):
            words = {"task": task, "optimizer": optimizer.upper()}
            overfits = claims.claim("overfits", of=f"{optimizer}-{task}", **words)
            results.append(overfitting.judge_overfits(overfits, since, optimizer))
            for quantity in QUANTITIES:
                claim = claims.claim(f"{quantity}-increases", of=f"{optimizer}-{task}", **words)
                results.append(overfitting.judge_increases(claim, since, ends, optimizer, quantity))
            raw = claims.claim("llc-raw-increases", of=f"{optimizer}-{task}", **words)
            results.append(overfitting.judge_raw_increase(raw, own, since, optimizer))
            for quantity in QUANTITIES:
                claim = claims.claim(f"{quantity}-sign", of=f"{optimizer}-{task}", **words)
                results.append(overfitting.judge_sign(claim, changes, ends, optimizer, quantity))
    return results


def draw(computed: Computed) -> dict[str, Figure]:
    """Return LLC and tr(H) over epochs; and losses, and LLC and tr(H) over the validation loss."""
    table = overfitting.for_readers(computed["table"])
    figure, rows = panels.rows(table, by="task", columns=2, panel_size=(4.0, 3.6))
    labels = {"llc": "LLC from the lowest point", "trace": "tr(H) (nats/parameter²)"}
    for (llc, trace), task, own in rows:
        overfitting.draw_estimates(llc, own, "llc", labels["llc"])
        overfitting.draw_trace(trace, own, labels["trace"])
        llc.set_title(task, loc="left")
    panels.legend(
        figure, title=f"{overfitting.note(computed)}; of tr(H) the geometric mean", axes=[figure.axes[1]]
    )
    paths = overfitting.draw_paths(table, labels | {"validation_accuracy": "validation accuracy"}, losses=True)
    return {"figure.png": figure, "figure_more.png": paths}
