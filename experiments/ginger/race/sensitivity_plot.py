"""The grid of decay and rank beside the paper's, and the sweep of damping."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import plots
from experiments.ginger.race.sensitivity import DAMPING_SWEEPS, without_diverged

LABELS = {"test_accuracy": "test accuracy (%)", "min_train_loss": "smallest training loss (nats)"}
STYLES = {"damping": (0, "never clipped"), "damping, clipped": (1, "clipped at 1")}


def draw_sensitivity(table: pd.DataFrame, printed: pd.DataFrame, column: str) -> Figure:
    """Return for each task a row: our grid, the paper's, and the quantity against damping.

    Args:
        table: of `compute`.
        printed: decay, rank and one more column, in the units of `column`.
        column: "test_accuracy" or "min_train_loss".
    """
    tasks = table.task.unique().tolist()
    figure, axes = plots.figure(len(tasks), 3, panel_size=(3.4, 2.9))
    quantity = next(name for name in printed if name not in ("decay", "rank"))
    for row, task in zip(axes, tasks, strict=True):
        own = table[table.task == task]
        grid = own[own.sweep == "grid"]
        _heat_map(row[0], grid.pivot_table(column, "decay", "rank"), column, title=task)
        _heat_map(
            row[1], printed.pivot_table(quantity, "decay", "rank"), column, title="printed: ResNet-18, CIFAR-100"
        )
        _damping(row[2], own, column)
    handles, labels = axes[0, 2].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def _heat_map(ax: Axes, cells: pd.DataFrame, column: str, *, title: str) -> None:
    accuracy = column == "test_accuracy"
    values = 100 * cells.to_numpy() if accuracy else np.log10(cells.to_numpy())
    ax.imshow(values, cmap="viridis" if accuracy else "viridis_r", aspect="auto")
    middle = (np.nanmin(values) + np.nanmax(values)) / 2
    for (row, place), value in np.ndenumerate(values):
        text = f"{value:.2f}" if accuracy else f"{10**value:#.3g}"
        bright = value > middle if accuracy else value < middle
        ax.text(place, row, text, ha="center", va="center", fontsize=9, color="black" if bright else "white")
    ax.set_xticks(range(len(cells.columns)), [f"{rank:g}" for rank in cells.columns])
    ax.set_yticks(range(len(cells.index)), [f"{decay:g}" for decay in cells.index])
    ax.grid(visible=False)
    ax.set_xlabel("rank τ")
    ax.set_ylabel("decay α")
    ax.set_title(title, fontsize=9)


def _damping(ax: Axes, table: pd.DataFrame, column: str) -> None:
    scale = 100 if column == "test_accuracy" else 1
    for sweep in DAMPING_SWEEPS:
        color, label = STYLES[sweep]
        own = without_diverged(table[table.sweep == sweep]).dropna(subset=column)
        style: dict[str, Any] = {"color": plots.PALETTE[color]}
        means = scale * own.groupby("damping")[column].mean()
        line: dict[str, Any] = {"linestyle": "-" if sweep == "damping" else "--", "marker": plots.MARKERS[color]}
        ax.plot(means.index, means, markersize=5, linewidth=1.2, label=label, **line, **style)
        ax.scatter(own.damping, scale * own[column], s=8, alpha=0.5, **style)
    grid = scale * table[table.sweep == "grid"].groupby(["decay", "rank"])[column].mean()
    ax.axhspan(grid.min(), grid.max(), color=plots.PALETTE[2], alpha=0.25, linewidth=0, label="range of the grid")
    edge = table[(table.sweep != "grid") & table.at_edge.astype(bool) & table[column].notna()]
    if len(edge):
        ends = edge.groupby(["sweep", "damping"])[column].mean().reset_index()
        ring: dict[str, Any] = {"s": 90, "facecolors": "none", "edgecolors": "black", "linewidths": 0.8}
        ax.scatter(ends.damping, scale * ends[column], label="rate at the edge of those tried", **ring)
    lost = table[(table.sweep != "grid") & table.diverged.astype(bool)]
    if len(lost):  # at the lower edge: where they ended would squeeze the others
        at_edge = ax.get_xaxis_transform()
        styles: dict[str, Any] = {
            "s": 40,
            "marker": "x",
            "color": "black",
            "label": "a seed diverged",
            "clip_on": False,
        }
        ax.scatter(lost.damping, np.full(len(lost), 0.02), transform=at_edge, **styles)
    ax.set_xscale("log")
    if column == "min_train_loss":
        ax.set_yscale("log")
        plots.readable_log(ax.yaxis)
    ax.set_xlabel("damping γ, each with its own learning rate", fontsize=8)
    ax.set_ylabel(LABELS[column])
