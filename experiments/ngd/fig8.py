"""WBIC of NGD against the validation loss while it overfits (Saghir et al. 2024, Fig. 8).

make ngd-fig8 PRESET=smoke|embedded|laptop|paper ARGS="label_noise=0.2"

The same networks and estimates as ngd-fig7's, from the store where they have been computed. WBIC = n E[L(w)] at
inverse temperature n/ln n, that is n L(w*) + LLC ln n, w* being the minimum near the weights: the figure shows
both terms: for the paper's claim the second must rise by more than the first falls.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, Target, out_of_reach, panels, t_interval
from curvlab.lab import judge as judge_claim
from experiments.ngd import overfitting
from experiments.ngd.overfitting import compute  # noqa: F401  compute is this target's

TARGET = Target(
    __name__,
    title="WBIC while overfitting",
    paper=overfitting.PAPER,
    after=("ngd/fig7",),
    curves=("table: llc, train_loss, trace over epoch by optimizer",),
)


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge NGD on each task; intervals are over seeds."""
    table, results = computed["table"], []
    for task, since in computed["summary"].groupby("task", sort=False):
        own = table[table.task == task]
        terms, of_task = _terms(own), str(task)
        changes = overfitting.changes_by_last_epoch(own)
        ends = overfitting.last_epoch_table(own, changes)
        results += [
            overfitting.judge_overfits(claims.claim("overfits-ngd", of=of_task), since, "ngd"),
            overfitting.judge_increases(
                claims.claim("wbic-increases-ngd", of=of_task), since, ends, "ngd", "wbic", terms
            ),
            overfitting.judge_sign(claims.claim("wbic-sign-ngd", of=of_task), changes, ends, "ngd", "wbic"),
            _follows_validation_loss(claims.claim("wbic-follows-validation-loss-ngd", of=of_task), since, terms),
            overfitting.judge_raw_increase(
                claims.claim("wbic-raw-increases-ngd", of=of_task), own, since, "ngd", "wbic"
            ),
        ]
    return results


def _follows_validation_loss(claim: Claim, since: pd.DataFrame, terms: str) -> ClaimResult:
    used = overfitting.overfitted(since, "ngd", "wbic").dropna(subset="rank_correlation")
    if (lacking := overfitting.why_none(since, "ngd", used)) is not None:
        return out_of_reach(claim, lacking)
    values = used.rank_correlation
    return judge_claim(claim, values.mean(), t_interval(values), if_not_reproduced=terms)


def _terms(table: pd.DataFrame) -> str:
    """Return how the two terms of WBIC = n L(w*) + LLC ln n change under NGD, from the minimum to the end."""
    changes = []
    for _, own in table[table.optimizer == "ngd"].groupby("seed"):
        ordered = own.sort_values("epoch")
        ends = ordered.loc[[ordered.validation_loss.idxmin(), ordered.index[-1]]]
        complexity = wbic_complexity(ends)
        changes.append([float(np.diff(part)[0]) for part in (ends.wbic - complexity, complexity)])
    fit, complexity_change = np.mean(changes, axis=0)
    return (
        f"From the minimum of the validation loss to the end n L(w*) changes by {fit:+.4g} nats, and "
        f"LLC ln n by {complexity_change:+.4g} (every estimate, valid or not): their sum is the WBIC."
    )


def wbic_complexity(table: pd.DataFrame) -> pd.Series:
    """Return LLC ln n, nats, with the LLC from the lowest sampled point w*: WBIC - n L(w*)."""
    return table.llc * np.log(table.num_train)


# ------------------------------------------------------------------------------------ draw
def draw(computed: Computed) -> dict[str, Figure]:
    """Return, of NGD alone, losses and WBIC over epochs, and WBIC over validation loss."""
    ngd = computed["table"].query("optimizer == 'ngd'")
    table = overfitting.for_readers(ngd)
    figure, rows = panels.rows(table, by="task", columns=2, panel_size=(3.6, 3.8))
    looks = {"NGD, WBIC": ("-", "s"), "NGD, n L(w*)": ("--", "v"), "NGD, LLC ln n": (":", "o")}
    terms = {
        name: {"color": overfitting.STYLES["NGD"]["color"], "linestyle": line, "marker": marker}
        for name, (line, marker) in looks.items()
    }
    for (losses, wbic), task, own in rows:
        overfitting.draw_losses(losses, own)
        complexity = wbic_complexity(own)
        parts = zip(terms, (own.wbic, own.wbic - complexity, complexity), strict=True)
        shown = pd.concat([own.assign(term=name, nats=values) for name, values in parts], ignore_index=True)
        overfitting.draw_estimates(wbic, shown, "nats", "nats", by="term", styles=terms)
        losses.set_title(task, loc="left")
    note = overfitting.note(computed, ["ngd"])
    panels.legend(figure, title=f"{note}; WBIC = n L(w*) + LLC ln n", columns=5)
    return {"figure.png": figure, "figure_more.png": overfitting.draw_paths(table, {"wbic": "WBIC (nats)"})}
