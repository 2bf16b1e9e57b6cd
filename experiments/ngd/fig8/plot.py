"""Fig. 8: losses, WBIC with its two terms over epochs, and the WBIC over the validation loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from curvlab.lab import Computed, plots
from experiments.ngd.overfitting.plot import (
    count_valid,
    draw_estimates,
    draw_last_epoch,
    draw_losses,
    mark_minimum,
)


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figure, one row of panels for each task, of NGD alone; and that of the last epoch."""
    table = computed["table"]
    tasks = table.task.unique().tolist()
    figure, axes = plots.figure(len(tasks), 3, panel_size=(3.7, 2.9))
    for row, task in zip(axes, tasks, strict=True):
        _draw_task(row, table[table.task == task])
        row[0].set_title(task)
    note = (
        "mean over seeds, band: 95 % t interval (of three or more); hollow: not valid, or not for every seed\n"
        f"dotted: minimum of the validation loss; {plots.COUNTS_NOTE}"
    )
    figure.legend(
        [], [], loc="outside lower center", frameon=False, title=note, title_fontproperties=FontProperties(size=8)
    )
    return {"figure.png": figure, "figure_last_epoch.png": draw_last_epoch(table, {"wbic": "the WBIC"}, ["ngd"])}


def _draw_task(axes: np.ndarray, table: pd.DataFrame) -> None:
    ngd = table[table.optimizer == "ngd"]
    ngd = ngd.assign(fit=ngd.wbic - wbic_complexity(ngd), complexity=wbic_complexity(ngd))
    own: dict[str, Any] = {"color": plots.PALETTE[1], "marker": plots.MARKERS[1]}
    draw_losses(axes[0], ngd, "ngd", own)
    axes[0].set_yscale("log")
    axes[0].set_ylabel("loss (nats)")
    plots.readable_log(axes[0].yaxis)
    axes[0].legend(fontsize=7, frameon=False)
    names = {"wbic": "WBIC", "fit": "n L(w*)", "complexity": "LLC ln n"}
    for index, (quantity, label) in enumerate(names.items(), start=1):
        style: dict[str, Any] = {"color": plots.PALETTE[index], "marker": plots.MARKERS[index]}
        shown = ngd.assign(valid=True) if quantity == "fit" else ngd
        draw_estimates(axes[1], shown, quantity, style, label=label)
    count_valid(axes[1], ngd, {"ngd": {"color": plots.PALETTE[1]}})
    axes[1].set_ylabel("nats")
    axes[1].legend(fontsize=7, frameon=False)
    for ax in axes[:2]:
        mark_minimum(ax, ngd, own)
        ax.set_xscale("log")
        plots.readable_log(ax.xaxis)
        ax.set_xlabel("epoch")
    last = axes[2]
    for _, rows in ngd.groupby("seed"):
        path = rows.sort_values("epoch")
        last.plot(path.validation_loss, path.wbic, color=own["color"], linewidth=0.8, alpha=0.7)
        valid = path.valid.astype(bool)
        kind = {"s": 18, "marker": own["marker"], "edgecolors": own["color"], "linewidths": 0.8}
        last.scatter(path[valid].validation_loss, path[valid].wbic, color=own["color"], **kind)
        last.scatter(path[~valid].validation_loss, path[~valid].wbic, facecolors="white", zorder=3, **kind)
    rightmost = ngd.loc[ngd.groupby("epoch").validation_loss.idxmax()].set_index("epoch")
    for epoch, place in _apart(rightmost[["validation_loss", "wbic"]]):
        last.annotate(str(epoch), place, xytext=(8, -3), textcoords="offset points", fontsize=7, va="center")
    last.margins(x=0.1)  # for the last number
    last.set_xlabel("validation loss (nats)")
    last.set_ylabel("WBIC (nats)")
    last.set_title("one line for each seed; the numbers: epochs", fontsize=8)


def _apart(path: pd.DataFrame) -> Iterator[tuple[Any, pd.Series]]:
    """Return the points, without those so near the one named before that their labels would overlap."""
    spread, named = path.max() - path.min(), None
    for epoch, place in path.iterrows():
        if named is None or ((place - named).abs() / spread).max() > 0.12:
            named = place
            yield epoch, place


def wbic_complexity(table: pd.DataFrame) -> pd.Series:
    """Return LLC ln n, nats, with the LLC from the minimum w*: WBIC - n L(w*)."""
    return table.llc * np.log(table.num_train)
