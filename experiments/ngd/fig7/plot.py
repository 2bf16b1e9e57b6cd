"""Fig. 7: losses, accuracy, LLC and tr(H) over epochs, and over the validation loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from curvlab.lab import Computed, plots
from experiments.ngd.overfitting.plot import (
    OPTIMIZERS,
    count_valid,
    draw_estimates,
    draw_last_epoch,
    draw_losses,
    mark_minimum,
)

QUANTITIES = {"llc": "LLC from the minimum", "trace": "tr(H) (nats/parameter²)"}


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figure, for each task over epochs and over the validation loss; and that of the last epoch."""
    table = computed["table"]
    tasks = table.task.unique().tolist()
    figure, axes = plots.figure(2 * len(tasks), 3, panel_size=(3.5, 2.6))
    for index, task in enumerate(tasks):
        _draw_task(axes[2 * index : 2 * index + 2], table[table.task == task])
        axes[2 * index, 0].set_title(task)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    legend = figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    title = (
        "mean over seeds, band: 95 % t interval (of three or more); hollow: not valid, or not for every seed\n"
        f"dotted: minimum of the validation loss; {plots.COUNTS_NOTE}"
    )
    legend.set_title(title, prop=FontProperties(size=8))
    names = {"llc": "the LLC", "trace": "tr(H)"}
    return {"figure.png": figure, "figure_last_epoch.png": draw_last_epoch(table, names, OPTIMIZERS)}


def _draw_task(axes: np.ndarray, table: pd.DataFrame) -> None:
    styles: dict[str, dict[str, Any]] = {}
    for index, (name, own) in enumerate(table.groupby("optimizer", sort=False)):
        style: dict[str, Any] = {"color": plots.PALETTE[index], "marker": plots.MARKERS[index]}
        styles[str(name)] = style
        draw_losses(axes[0, 0], own, str(name), style)
        draw_estimates(axes[1, 0], own.assign(valid=True), "validation_accuracy", style)
        for column, quantity in enumerate(QUANTITIES, start=1):
            shown = own if quantity == "llc" else own.assign(valid=True)
            draw_estimates(axes[0, column], shown, quantity, style)
            _draw_paths(axes[1, column], shown, quantity, style)
        for ax in (*axes[0], axes[1, 0]):
            mark_minimum(ax, own, style)
    count_valid(axes[0, 1], table, styles)
    axes[0, 0].set_yscale("log")
    axes[0, 0].set_ylabel("loss (nats)")
    plots.readable_log(axes[0, 0].yaxis)
    axes[1, 0].set_ylabel("validation accuracy")
    for ax in (*axes[0], axes[1, 0]):
        ax.set_xscale("log")
        plots.readable_log(ax.xaxis)
        ax.set_xlabel("epoch")
    for column, label in enumerate(QUANTITIES.values(), start=1):
        for ax in axes[:, column]:
            ax.set_ylabel(label)
        axes[1, column].set_xlabel("validation loss (nats)")
        axes[1, column].set_title("one line for each seed, from its start (×)", fontsize=8)


def _draw_paths(ax: Axes, own: pd.DataFrame, quantity: str, style: dict[str, Any]) -> None:
    """Draw every seed's path through (validation loss, quantity)."""
    for _, rows in own.groupby("seed"):
        path = rows.sort_values("epoch")
        ax.plot(path.validation_loss, path[quantity], color=style["color"], linewidth=0.8, alpha=0.7)
        valid = path.valid.astype(bool)
        kind = {"s": 14, "marker": style["marker"], "edgecolors": style["color"], "linewidths": 0.7}
        ax.scatter(path[valid].validation_loss, path[valid][quantity], color=style["color"], **kind)
        ax.scatter(path[~valid].validation_loss, path[~valid][quantity], facecolors="none", **kind)
        first = path.iloc[:1]
        ax.scatter(first.validation_loss, first[quantity], s=40, marker="x", color=style["color"], linewidths=1)
