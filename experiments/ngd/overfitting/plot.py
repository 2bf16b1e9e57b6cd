"""What the figures of overfitting share: curves over epochs, the smallest validation loss, the last epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import plots
from experiments.ngd.overfitting.last_epoch import last_epoch_table

OPTIMIZERS = ("sgd", "ngd")


def draw_losses(ax: Axes, own: pd.DataFrame, name: str, style: dict[str, Any]) -> None:
    """Draw one optimizer's training and validation loss."""
    _draw_mean(ax, own, "train_loss", style, label=f"{name}, training")
    _draw_mean(ax, own, "validation_loss", style, label=f"{name}, validation", linestyle="--")


def draw_estimates(ax: Axes, own: pd.DataFrame, quantity: str, style: dict[str, Any], **kind: Any) -> None:
    """Draw the mean over every seed; its marker is filled where all of them are valid, hollow elsewhere."""
    _draw_mean(ax, own, quantity, {**style, "marker": "none"}, **kind)
    mean = own.groupby("epoch")[quantity].mean()
    valid = own.groupby("epoch").valid.agg(lambda flags: bool(flags.astype(bool).all()))
    for subset, face in ((mean[valid], style["color"]), (mean[~valid], "white")):
        marks = {"marker": style["marker"], "edgecolors": style["color"], "linewidths": 0.9, "zorder": 3}
        ax.scatter(subset.index, subset, s=18, facecolors=face, **marks)


def count_valid(ax: Axes, table: pd.DataFrame, styles: Mapping[str, Mapping[str, Any]]) -> None:
    """Write how many seeds are valid where not all are, for each optimizer in its colour, once all is drawn."""
    for name, own in table.groupby("optimizer", sort=False):
        plots.counts_at_foot(ax, own.epoch, own.valid, color=styles[str(name)]["color"])


def draw_last_epoch(table: pd.DataFrame, quantities: Mapping[str, str], optimizers: Sequence[str]) -> Figure:
    """Return one row for each task: the change of each quantity, against the epoch at which training might end.

    Args:
        table: see `last_epoch_table`, which is drawn.
        quantities: labels by name (llc, trace, wbic).
        optimizers: those shown.
    """
    ends = last_epoch_table(table)
    tasks = table.task.unique().tolist()
    figure, axes = plots.figure(len(tasks), len(quantities), panel_size=(4.2, 2.8))
    for row, task in zip(axes, tasks, strict=True):
        for ax, (quantity, label) in zip(row, quantities.items(), strict=True):
            for name in optimizers:
                own = ends[(ends.task == task) & (ends.quantity == quantity) & (ends.optimizer == name)]
                _draw_changes(ax, own[own.seeds > 0], name)
            ax.axhline(0, color="#555555", linewidth=1, linestyle="--")
            ax.set_xscale("log")
            ax.set_xlim(table[table.task == task].epoch.min(), 1.15 * table[table.task == task].epoch.max())
            plots.readable_log(ax.xaxis)
            for name in optimizers:
                _count_seeds(
                    ax, ends[(ends.task == task) & (ends.quantity == quantity)], name, table.seed.nunique()
                )
            ax.set_xlabel("epoch at which training ends")
            ax.set_ylabel(f"change of {label} (%)")
        row[0].set_title(task)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    title = (
        "from the smallest validation loss so far;\nmean over the seeds that overfit by then\n"
        f"bar: 95 % t interval of three or more, hollow: of fewer\n{plots.COUNTS_NOTE}"
    )
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": 2, "fontsize": 8, "frameon": False}
    figure.legend(handles, labels, title=title, title_fontsize=8, **place)
    return figure


def _draw_changes(ax: Axes, own: pd.DataFrame, name: str) -> None:
    index = OPTIMIZERS.index(name)
    style: dict[str, Any] = {"color": plots.PALETTE[index], "marker": plots.MARKERS[index], "markersize": 5}
    errors = 100 * np.array([own.change - own.low, own.high - own.change])
    places = own.last_epoch * (1 + 0.03 * index)  # beside each other
    ax.errorbar(places, 100 * own.change, yerr=errors, capsize=3, linewidth=1.2, label=name, **style)
    few = (own.seeds < plots.MIN_SEEDS).to_numpy()
    ax.plot(places[few], 100 * own.change[few], linestyle="none", markerfacecolor="white", zorder=4, **style)


def _count_seeds(ax: Axes, ends: pd.DataFrame, name: str, num_seeds: int) -> None:
    own = ends[ends.optimizer == name]
    each = own.loc[own.index.repeat(num_seeds)]
    counts = np.tile(np.arange(num_seeds), len(own)) < each.seeds.to_numpy()
    plots.counts_at_foot(ax, each.last_epoch, counts, color=plots.PALETTE[OPTIMIZERS.index(name)])


def mark_minimum(ax: Axes, own: pd.DataFrame, style: dict[str, Any]) -> None:
    """Draw a vertical line at each seed's epoch of smallest validation loss."""
    for epoch in own.loc[own.groupby("seed").validation_loss.idxmin()].epoch.unique():
        ax.axvline(epoch, color=style["color"], linestyle=":", linewidth=1, zorder=0.9)


def _draw_mean(ax: Axes, own: pd.DataFrame, column: str, style: dict[str, Any], **kind: Any) -> None:
    mean = own.groupby("epoch")[column].mean()
    ax.plot(mean.index, mean, markersize=3.5, linewidth=1.2, **{**style, **kind})
    least = 0.2 if column.endswith("loss") else 0.0  # a t interval may reach below zero, with no logarithm there
    plots.seeds_around_mean(ax, own.epoch, own[column], color=style["color"], least=least)
