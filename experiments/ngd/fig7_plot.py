"""Fig. 7, drawn from table.csv alone.

python -m experiments.ngd.fig7_plot results/ngd/fig7/embedded
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from curvlab.reporting import plots
from experiments.ngd.overfitting_plot import draw_estimates, draw_losses, mark_minimum

QUANTITIES = {"llc": "LLC", "trace": "tr(H) (nats/parameter²)"}


def draw(table: pd.DataFrame) -> Figure:
    """Return losses, LLC and tr(H) over epochs above; accuracy, LLC and tr(H) over validation loss below."""
    figure, axes = plots.figure(2, 3, panel_size=(3.5, 2.6))
    for index, (name, own) in enumerate(table.groupby("optimizer", sort=False)):
        style: dict[str, Any] = {"color": plots.PALETTE[index], "marker": plots.MARKERS[index]}
        draw_losses(axes[0, 0], own, str(name), style)
        draw_estimates(axes[1, 0], own.assign(valid=True), "validation_accuracy", style)
        for column, quantity in enumerate(QUANTITIES, start=1):
            shown = own if quantity == "llc" else own.assign(valid=True)
            draw_estimates(axes[0, column], shown, quantity, style)
            _draw_paths(axes[1, column], shown, quantity, style)
        for ax in (*axes[0], axes[1, 0]):
            mark_minimum(ax, own, style)
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
        axes[1, column].set_title("a line a seed, from its start (×)", fontsize=8)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    legend = figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    title = "mean over seeds, band: 95 % t interval; hollow: not valid; dotted: minimum of the validation loss"
    legend.set_title(title, prop=FontProperties(size=8))
    return figure


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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Redraw the figure of a result folder from its table.csv.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    draw(pd.read_csv(folder / "table.csv")).savefig(folder / "figure.png", dpi=110, metadata={"Software": None})
