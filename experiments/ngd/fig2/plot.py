"""Fig. 2: losses, update norm, LLC and tr(H) over epochs, and the LLC against the training loss."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from curvlab.lab import Computed, plots

PANELS = {
    "loss": "loss (nats)",
    "update_norm": "update norm ‖Δw‖/lr",
    "llc": "LLC from the minimum",
    "trace": "tr(H) (nats/parameter²)",
}


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figure: one row of panels for each task."""
    table = computed["table"]
    tasks = table.task.unique().tolist()
    figure, axes = plots.figure(len(tasks), len(PANELS) + 1, panel_size=(3.0, 2.8))
    for row, task in zip(axes, tasks, strict=True):
        for index, (optimizer, own) in enumerate(table[table.task == task].groupby("optimizer", sort=False)):
            style: dict[str, Any] = {"color": plots.PALETTE[index], "marker": plots.MARKERS[index]}
            for ax, quantity in zip(row, PANELS, strict=False):
                _draw_over_epochs(ax, own, quantity, str(optimizer), style)
            valid = own[own.valid]
            row[-1].scatter(valid.train_loss, valid.llc, s=14, label=str(optimizer), **style)
        for ax, label in zip(row, PANELS.values(), strict=False):
            ax.set_xscale("log")  # checkpoints are densest at the start, where estimates are least valid
            plots.readable_log(ax.xaxis)
            ax.set_xlabel("epoch")
            ax.set_ylabel(label)
        estimated = table[(table.task == task) & table.llc.notna()]
        for index, (_, own) in enumerate(estimated.groupby("optimizer", sort=False)):
            plots.counts_at_foot(row[2], own.epoch, own.valid, color=plots.PALETTE[index])
        row[1].set_ylim(bottom=max(0, row[1].get_ylim()[0]))  # an interval may reach below, a norm does not
        row[0].set_yscale("log")
        plots.readable_log(row[0].yaxis)
        row[0].set_title(task)
        row[-1].set_xscale("log")
        plots.readable_log(row[-1].xaxis)
        row[-1].set_xlabel("training loss (nats)")
        row[-1].set_ylabel("LLC from the minimum")
    axes[0, 2].set_title("valid estimates", fontsize=8)
    axes[0, -1].set_title("valid estimates over training loss", fontsize=8)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    title = (
        "mean over seeds, band: 95 % t interval (of losses from a fifth of the mean on); dots: seeds, where there "
        f"are two; {plots.COUNTS_NOTE}"
    )
    legend = figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    legend.set_title(title, prop=FontProperties(size=8))
    return {"figure.png": figure}


def _draw_over_epochs(ax: Axes, own: pd.DataFrame, quantity: str, name: str, style: dict[str, Any]) -> None:
    if quantity == "loss":
        _curve(ax, own, "train_loss", f"{name}, training", style)
        _curve(ax, own, "validation_loss", f"{name}, validation", style, linestyle="--")
    else:
        _curve(ax, own[own.valid] if quantity == "llc" else own, quantity, name, style)


def _curve(
    ax: Axes, own: pd.DataFrame, column: str, label: str, style: dict[str, Any], *, linestyle: str = "-"
) -> None:
    mean = own.groupby("epoch")[column].mean()
    ax.plot(mean.index, mean, label=label, linestyle=linestyle, markersize=3.5, linewidth=1.2, **style)
    least = 0.2 if column.endswith("loss") else 0.0  # a t interval may reach below zero, with no logarithm there
    plots.seeds_around_mean(ax, own.epoch, own[column], color=style["color"], alpha=0.18, least=least)
