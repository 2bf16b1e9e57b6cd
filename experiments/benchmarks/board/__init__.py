"""An open board of attribution: which score predicts retraining, by which protocol, and at what price?

make bench-board PRESET=smoke|embedded|laptop|paper ARGS="peers_python=DIR/bin/python"

Three networks of each task, of three initialisations and orders of the batches, are scored by every method: how
does each training example change the loss of each query? Judges are networks that were trained again on random
halves of the training set, kept in a bank (results/banks; docs/enter.md), by three protocols, a column each. *Same
seed*: from a scored network's own start, in its order, for as many steps, which is twice the epochs of a half.
*Other seeds*: the same from the other networks' starts and orders. *Standard*: from starts and orders of neither,
for as many epochs of the half, mean of ten (`laptop`'s ConvNet and language models: of four). A cell is the linear
datamodelling score (LDS; Park et al. 2023): Spearman's correlation over the halves of predicted with measured
losses, mean over networks and queries. Intervals are 95 %, of a bootstrap that draws networks, halves and queries
anew. Of a method with a grid of dampings the best is shown, chosen by the column itself, an advantage over ours,
whose damping is the length of the retraining. Its
price is that of the whole grid.

The length of the retraining that one asks about is the damping: 1/(ηT) for halves that take as many steps, 1/(fηT)
for as many epochs of a fraction f. The unrolled derivative is that of one training, in one order from one start;
"over other seeds" it is averaged over trainings by which nothing is judged.

One task is trained by Adam. How far its run goes along a gradient is measured step by step, and influence has one
over that as its damping; with a damping for each parameter (`preconditioned_influence`) it is a row of its own.

Beside influence stand scores without gradients (labels alone; nearness of inputs, or of what the last layer reads,
times agreement of labels; of texts BM25 in place of these; the example's own loss), influence by 50 leading
eigenvectors alone, and Bayesian influence, the covariance of losses over Langevin chains at the same damping, with
the jackknife's error over its chains. EK-FAC as preconditioner of conjugate gradients changes the price of
influence alone. A library stands "as shipped", at its own default, and at the best of a grid; TRAK with 512, 2,048
and no projections, and over 10 networks that neither are scored nor judge. The ceiling is what a score would have
that knew the expected losses, by how well halves of the seeds agree.

"As good as the best" stands where the 95 % interval of the difference to the best of the column, with the same
networks, halves and queries drawn for both, reaches 0. The best was chosen by the same numbers, so the difference
is an upper estimate.

A price is processor time of one network's scores, over that of one training of it. A method's first call is not
timed: PyTorch loads and compiles parts for it. Every damping of a grid is a call of its own, ours and a peer's,
and the price is that of all of them: a peer whose factors could serve all dampings is charged for each fit, as its
own interface has it. The table `cost` has the number of dampings and the price of one, too. An average over other
trainings pays for these trainings.

residuals.csv has influence by plain conjugate gradients, cut off at several residuals: is an exact solve worth it?
fractions.csv has subsets of other sizes: what is beyond the first order grows as they shrink.

Note of 2026-11-24: dattri's EK-FAC was out of the published tables for a time, because its repair was applied
twice, to a call that was repeated for its seconds. It is applied once now.

Limits: most published tasks are MLPs; the ConvNet and the OPT have fewer subsets, seeds and methods. Damping by
Wang et al. (2025, arXiv 2505.24261) is not among the rows: they choose it without retraining, by an indicator of
the full data. What could be read of them, abstract and introduction, does not define it, and dattri 0.3.0, by some
of the authors, does not have it. Of the five per cent ranked first bench-attribution asks.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from curvlab.influence.bank import AGAINST, STANDARD
from curvlab.lab import Computed, Target, panels, plots
from curvlab.lab.names import reader_names
from experiments.benchmarks.attribution.methods import (
    DOT,
    EKFAC,
    FILTER,
    INFLUENCE,
    RUN_DAMPING,
    SEGMENTS,
    UNROLLED,
)
from experiments.benchmarks.board import compute as tasks
from experiments.benchmarks.board.compute import AVERAGED, FILTER_EPOCHS, RUN_EPOCHS

TARGET = Target(
    __name__,
    title="An open board: which score predicts retraining, by three protocols, on three networks a task",
    paper={"num_queries": "", "num_subsets": "", "num_networks": "", "num_standard": "", "dampings": ""},
    timings=("cost",),
)
compute = tasks.compute

RECOMMENDED, OTHERS = "influence, damping 1/length", "other rows of the table"
# Influence and the filter of the retraining that judges: of as many steps, or of as many epochs.
SAME_NAME = dict.fromkeys((RUN_EPOCHS, RUN_DAMPING), RECOMMENDED)
SAME_NAME |= dict.fromkeys((FILTER, FILTER_EPOCHS), "training filter")
# Rows that README tells of and the filter: a colour and a mark each; all others are grey.
TOLD = (RECOMMENDED, "training filter", EKFAC, "kronfluence EK-FAC", "TRAK", UNROLLED, AVERAGED, SEGMENTS, DOT)
LOOKS = {name: {key: style[key] for key in ("color", "marker")} for name, style in panels.styles_of(TOLD).items()}


# ---------------------------------------------------------------------------------------- draw
def draw(computed: Computed) -> dict[str, Figure]:
    """Return the LDS of each score by the standard protocol, and LDS against price by all protocols."""
    best = computed["best"].merge(computed["cost"], on=["task", "method"])
    shown = best[~best.method.isin((RUN_EPOCHS, FILTER_EPOCHS)) | (best.against == STANDARD)]
    shown = shown[~shown.method.isin((RUN_DAMPING, FILTER)) | (shown.against != STANDARD)]
    own, titles = shown[shown.against == STANDARD], reader_names(best.task)
    first = _scores(own, titles, computed.config["num_networks"])
    return {"figure.png": first, "figure_more.png": _prices(shown, computed)}


def _scores(own: pd.DataFrame, titles: Mapping[str, str], networks: int) -> Figure:
    """Draw a column for each task, a row for each score, the highest mean LDS first; ours and EK-FAC in colour."""
    order = own.groupby("method").lds.mean().sort_values(ascending=False).index
    own = own.assign(place=own.method.map(order.get_loc)).sort_values("place", kind="stable")
    tasks = own.task.unique().tolist()
    told = {RUN_EPOCHS: LOOKS[RECOMMENDED]["color"], EKFAC: LOOKS[EKFAC]["color"]}
    figure, axes = plots.figure(1, len(tasks), panel_size=(7.9 / len(tasks), 1.6 + 0.26 * len(order)), sharey=True)
    for ax, task in zip(axes[0], tasks, strict=True):
        for _, row in own[own.task == task].iterrows():
            errors = [[max(row.lds - row.lds_low, 0)], [max(row.lds_high - row.lds, 0)]]
            look = {"marker": "o", "linestyle": "none", "capsize": 2, "markersize": 5}
            ax.errorbar(row.lds, row.place, xerr=errors, color=told.get(row.method, "#777777"), **look)
        names = [_name(each) for each in order]
        ax.set(yticks=range(len(order)), yticklabels=names, ylim=(len(order) - 0.5, -0.5))
        panels.frame(ax, x="LDS", title=textwrap.fill(titles[str(task)], 13))
    note = f"LDS: rank correlation with retraining by the standard protocol, mean over {networks} networks\n"
    note += "bars: 95 % over networks, halves and queries; in blue: what the title tells of"
    note += "; BM25: a search engine's score of texts" if "BM25" in order else ""
    figure.supxlabel(note, fontsize=8.5)
    return figure


def _name(method: str) -> str:
    return {INFLUENCE: "influence, best of a grid"}.get(method, SAME_NAME.get(method, method))


def _prices(shown: pd.DataFrame, computed: Computed) -> Figure:
    """Draw a row for each task: LDS against the price by each protocol; methods without a look in grey.

    Below them, where a task asks for it, LDS against the residual of the solve and the size of the subsets.
    """
    shown = shown.assign(named=shown.method.map(_name))
    looks = {name: look for name, look in LOOKS.items() if (shown.named == name).any()}
    tasks, more = shown.task.unique().tolist(), int("residuals" in computed)
    figure, axes = plots.figure(len(tasks) + more, len(AGAINST), panel_size=(3.6, 2.6), sharey="row")
    for row, task in zip(axes, tasks, strict=False):
        own = shown[shown.task == task]
        for ax, against in zip(row, AGAINST, strict=True):
            points = own[own.against == against]
            others = points[~points.named.isin(looks)]
            ax.scatter(others.trainings, others.lds, s=14, color="#bbbbbb", zorder=0.95, label=OTHERS)
            for name, look in looks.items():
                each = points[points.named == name]
                errors = np.clip([each.lds - each.lds_low, each.lds_high - each.lds], 0, None)
                ax.errorbar(each.trainings, each.lds, yerr=errors, label=name, linestyle="none", **look)
            front = points.sort_values("trainings")
            front = front[front.lds >= front.lds.cummax()]
            ax.step(front.trainings, front.lds, where="post", color="#888888", linewidth=0.8, zorder=0.9)
            first = against == AGAINST[0]
            title = f"{task}: {against}" if first else against
            panels.frame(ax, x="price (trainings)", y="LDS" if first else "", title=title, log="x")
    if more:
        _beyond(axes[-1], computed["residuals"], computed["fractions"])
    note = "LDS: rank correlation with retraining; bars and bands: 95 % over networks, halves and queries\n"
    note += "line: what no cheaper score reaches; price: of the whole grid, where there is one"
    note += "; of texts grey at the left: BM25" if (shown.method == "BM25").any() else ""
    panels.legend(figure, columns=3, title=note)
    return figure


def _beyond(row: np.ndarray, residuals: pd.DataFrame, fractions: pd.DataFrame) -> None:
    """Draw influence cut off at several residuals, and five scores by how much of the training set is left."""
    ends: dict[str, Any] = {"y": "lds", "low": "lds_low", "high": "lds_high"}
    panels.lines(row[0], residuals, x="residual", by="against", **ends)
    panels.frame(row[0], x="residual of the solve", y="LDS", title=f"{residuals.task.iloc[0]}: influence", log="x")
    fractions = fractions.assign(named=fractions.method.map(_name))
    for ax, against in zip(row[1:], (AGAINST[0], AGAINST[-1]), strict=True):
        own = fractions[fractions.against == against]
        panels.lines(ax, own, x="fraction", by="named", styles=LOOKS, **ends)
        panels.frame(ax, x="share of examples kept", title=f"by the subsets' size: {against}")
