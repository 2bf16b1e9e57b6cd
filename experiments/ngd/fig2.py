"""LLC and tr(H) over epochs, NGD against SGD (Saghir et al. 2024, Fig. 2), and at matched training loss.

make ngd-fig2 PRESET=smoke|embedded|laptop|paper ARGS="data=fashion_mnist optimizers.ngd.alpha=4"

Both optimizers start from the same weights and see the same batches. NGD is Kaldi's online natural gradient with
its output rescaled to the gradient's norm, our reading of the paper's Eqs. 6 and 7 (see curvlab.optim.NGD). An
estimate counts as an LLC only where the chains have mixed and stayed above the start; the others are in the table,
marked. `llc` is measured from the lowest sampled point; the paper's, from the weights, is `llc_raw`, and lacks
`descent`. The paper compares at equal epochs; since the optimizers fit at different speed, the last panel and
matched.csv compare at equal training loss. tr(H) is the mean Hessian's over a fixed part of the training data, by
as many probes as an error of `trace.rtol` takes, `trace.max_matvecs` at most. Nothing is tuned: both train at one
learning rate, as in the paper.

The published `laptop` estimates are older than the rule that a step must be stable where the chains end, at
most 0.25 of the limit (`LLC.stability`). All five seeds were measured again at a quarter of the step, γ 1,600 in
place of 1,250 (an H200, commit 9f1b5639): estimates are lower by a fifth, and where both optimizers have one NGD's
is about as many times SGD's as here. They do not replace these, since at that γ
the loss no longer held five of the chains, and no checkpoint was left at which all seeds have both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from omegaconf import DictConfig

from curvlab.lab import Computed, Run, Target, panels
from curvlab.lab.claims import Claim, ClaimResult, ClaimSheet, out_of_reach, t_interval
from curvlab.lab.claims import judge as judge_claim
from experiments.ngd.matched_loss import matched_differences
from experiments.ngd.sampling import LOWEST, measured_both_ways
from experiments.ngd.trajectories import trajectories

MIN_CHECKPOINTS = 2  # with estimates of both optimizers in every seed: one says nothing of "across epochs"

TARGET = Target(
    __name__,
    title="LLC and Hessian trace over epochs",
    paper={
        "tasks": "FFNN and LeNet-5",
        "seeds": "not stated",
        "training.num_epochs": "not stated",
        "optimizers.*.lr": 0.01,
        "optimizers.ngd.alpha": 0.1,
        "training.batch_size": 128,
        "trace.max_matvecs": 10000,
    },
    curves=("table: llc, train_loss, trace over epoch by optimizer",),
)


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each task, optimizer, seed and checkpoint, and `matched`.

    Further columns of `table` as of `trajectory`; `matched` is of `matched_differences`.

    Args:
        run: seeds, store, device.
        cfg: `tasks`, and for all of them or for one: `seeds`, `optimizers` by name, and what `trajectory` takes.
    """
    table = trajectories(run, cfg).drop(columns="num_train")
    return {"table": table, "matched": matched_differences(table)}


# ------------------------------------------------------------------------------------ judge
def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge the claims on each task; intervals are over seeds."""
    table, matched, results = computed["table"], computed["matched"], []
    for task, own in table.groupby("task", sort=False):
        there = matched[matched.task == task]
        results.append(_higher(claims.claim("trace-higher", of=str(task)), own, "trace", there))
        for column, words in measured_both_ways(str(task)):
            results.append(_higher(claims.claim("llc-higher", **words), own, column, there))
            for name in ("sgd", "ngd"):
                of = words | {"of": f"{name}-{words['of']}", "optimizer": name.upper()}
                results.append(_plateau(claims.claim("llc-plateaus", **of), own, name, column))
        results.append(_falls(claims.claim("trace-decreases", of=str(task)), own))
    return results


def _counted(table: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """Return the rows that count: of the LLC the valid ones; of the raw one, the paper's, and the trace, all."""
    return table[table.valid] if quantity == "llc" else table[table[quantity].notna()]


def _higher(claim: Claim, table: pd.DataFrame, quantity: str, matched: pd.DataFrame) -> ClaimResult:
    wide = _counted(table, quantity).pivot_table(index="seed", columns=["optimizer", "epoch"], values=quantity)
    wide = wide.reindex(table.seed.unique()).dropna(axis="columns")  # what every seed has
    epochs = [epoch for epoch in table.epoch.unique() if {("sgd", epoch), ("ngd", epoch)} <= set(wide.columns)]
    if not epochs:
        reason = "At no checkpoint have all seeds a learning coefficient of both (see `problem`)."
        return out_of_reach(claim, reason)
    sgd, ngd = (wide[[(name, epoch) for epoch in epochs]].mean(axis=1) for name in ("sgd", "ngd"))
    if sgd.mean() <= 0:
        reason = (
            f"SGD's mean is {sgd.mean():.3g}, though no LLC is below 0: an excess over it says nothing. From "
            "weights that have not converged such estimates come out negative."
        )
        return out_of_reach(claim, reason)
    values = (ngd - sgd) / sgd.mean()  # SGD's of one seed may lie near 0
    if len(epochs) < MIN_CHECKPOINTS:
        reason = (
            f"All seeds have both at epoch {epochs[0]} alone (the excess is {values.mean():.3g} there); "
            f"“across epochs” takes at least {MIN_CHECKPOINTS} checkpoints (see `problem`)."
        )
        return out_of_reach(claim, reason)
    of = f"Of epochs {', '.join(map(str, epochs))}."
    why = f"{of} {_at_matched_loss(matched, quantity.removesuffix('_raw'))}"
    result = judge_claim(claim, values.mean(), t_interval(values), if_not_reproduced=why)
    return replace(result, explanation=result.explanation or of)


def _at_matched_loss(matched: pd.DataFrame, quantity: str) -> str:
    own = matched[(matched.quantity == quantity) & matched.difference.notna()]
    if own.empty:
        return "The two do not reach a common training loss (matched.csv)."
    interval = t_interval(own.difference)
    return (
        f"At equal training loss NGD - SGD is {own.difference.mean():.3g} ({interval.low:.3g} to "
        f"{interval.high:.3g}; SGD {own.sgd.mean():.3g}; matched.csv): at equal epochs the fit differs, too."
    )


def _second_half(table: pd.DataFrame, optimizer: str, quantity: str) -> pd.Series:
    """Return by seed the last checkpoint's value over that of the first one from half the epochs on."""
    own = _counted(table[table.optimizer == optimizer], quantity)
    epochs = np.sort(table.epoch.unique())
    middle, last = epochs[epochs >= epochs[-1] / 2][0], epochs[-1]
    wide = own.pivot_table(index="seed", columns="epoch", values=quantity)
    wide = wide.where(wide > 0)  # no LLC is below 0, and a ratio of two that are would look like a plateau
    if middle == last or not {middle, last} <= set(wide.columns):
        return pd.Series(dtype=float)
    return (wide[last] / wide[middle]).dropna()


def _plateau(claim: Claim, table: pd.DataFrame, optimizer: str, column: str) -> ClaimResult:
    ratios = _second_half(table, optimizer, column)
    if len(ratios) < 2:
        return out_of_reach(claim, "For fewer than two seeds the LLC is one both in the middle and at the end.")
    loss = _second_half(table, optimizer, "train_loss")
    why = (
        f"{len(ratios)} of {table.seed.nunique()} seeds have an estimate above 0 at both. The training loss at "
        f"the end is {loss.mean():.2g} times that at half the epochs."
    )
    return judge_claim(claim, ratios.mean(), t_interval(ratios), if_not_reproduced=why)


def _falls(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    ratios = [_second_half(table, name, "trace") for name in ("sgd", "ngd")]
    if min(map(len, ratios)) < 2:
        return out_of_reach(claim, "It needs checkpoints at half the epochs and at the end, of two seeds.")
    worst = max(ratios, key=lambda ratio: float(ratio.mean()))
    why = "Where tr(H) rises, the training loss still falls: see the figure."
    return judge_claim(claim, worst.mean(), t_interval(worst), if_not_reproduced=why)


# ------------------------------------------------------------------------------------ draw
def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figure, a row for each task: LLC and tr(H) as in the paper; and one of what explains them."""
    table = computed["table"]
    table = table.assign(counted=table.llc.where(table.valid), optimizer=table.optimizer.str.upper())
    styles = panels.styles_of(table.optimizer.unique())
    kind: dict[str, Any] = {"x": "epoch", "by": "optimizer", "styles": styles}
    figure, rows = panels.rows(table, by="task", columns=2, panel_size=(4.4, 2.8), sharex="row")
    for (llc, trace), task, own in rows:
        panels.lines(llc, own, y="counted", marker="", **kind)
        means = own.groupby(["optimizer", "epoch"], sort=False)[["counted", "valid"]].mean().reset_index()
        means["hollow"] = means.valid < 1
        panels.scatter(llc, means, y="counted", hollow="hollow", identity=False, zorder=3, **kind)
        panels.lines(trace, own, y="trace", **kind)
        panels.frame(llc, x="epoch", y="LLC from the lowest point", title=str(task), log="x")
        panels.frame(trace, x="epoch", y="tr(H) (nats/parameter²)", log="x")
    number = panels.seeds(table.groupby("task").seed.nunique())
    note = f"mean over {number}, band: 95 % t interval; of the LLC valid estimates alone"
    panels.legend(figure, title=f"{note} (hollow: not of all seeds)", axes=[figure.axes[1]])
    more, rows = panels.rows(table, by="task", columns=3, panel_size=(3.0, 2.8))
    for (loss, norm, against), task, own in rows:
        panels.lines(loss, own, y="train_loss", least=0.2, **kind)
        dashed = {
            f"{name}, validation": style | {"linestyle": "--", "marker": ""} for name, style in styles.items()
        }
        validation = own.assign(optimizer=own.optimizer + ", validation")
        panels.lines(loss, validation, y="validation_loss", least=0.2, **kind | {"styles": dashed})
        panels.lines(norm, own, y="update_norm", **kind)
        panels.scatter(against, own, x="train_loss", y="counted", by="optimizer", styles=styles, identity=False)
        panels.frame(loss, x="epoch", y="loss (nats)", title=str(task), log="xy")
        panels.frame(norm, x="epoch", y="update norm ‖Δw‖/lr", log="x")
        norm.set_ylim(bottom=max(0, norm.get_ylim()[0]))  # an interval may reach below, a norm does not
        panels.frame(against, x="training loss (nats)", y="LLC from the lowest point", log="x")
    panels.legend(more, title=f"{note}\n{LOWEST}")
    return {"figure.png": figure, "figure_more.png": more}
