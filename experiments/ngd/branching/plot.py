"""Figs. 4, 5 and 6: losses, update norm, step, LLC and WBIC around the split."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import MaxNLocator

from curvlab.lab import Computed, plots
from experiments.ngd.branching.measures import BEFORE

QUANTITIES = {
    "train_loss": "training loss (nats)",
    "validation_loss": "validation loss (nats)",
    "update_norm": "update norm ‖Δw‖/lr",
    "step_norm": "step ‖Δw‖",
    "llc": "LLC from the minimum",
    "wbic": "WBIC (nats)",
}
LOGARITHMIC = ("train_loss", "validation_loss", "update_norm", "step_norm")
GREY = "#555555"


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figure: one row of panels for each task."""
    table = computed["table"]
    tasks = table.task.unique().tolist()
    branches = [branch for branch in table.branch.unique() if branch != BEFORE]
    figure, axes = plots.figure(len(tasks), len(QUANTITIES), panel_size=(2.8, 2.7))
    for row, task in zip(axes, tasks, strict=True):
        own = table[table.task == task]
        split = own[own.branch == BEFORE].epoch.max()
        shown = own[own.epoch > split - (own.epoch.max() - split)]  # as many epochs before as after
        for ax, (quantity, label) in zip(row, QUANTITIES.items(), strict=True):
            _draw_quantity(ax, shown, quantity, branches, split)
            ax.set_ylabel(label)
            ax.set_xlabel("epoch")
            ax.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        row[0].set_title(task)
    for ax in axes[0, -2:]:
        ax.set_title("valid estimates", fontsize=8)
    entries: dict[str, Artist] = {}
    for ax in axes[:, 0]:
        entries |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    legend = figure.legend(
        list(entries.values()), list(entries), loc="outside lower center", ncols=6, fontsize=8, frameon=False
    )
    title = (
        "dotted: the split; mean over seeds, band: 95 % t interval; small dots: seeds, where there are two\n"
        f"{plots.COUNTS_NOTE}; of LLC and WBIC only valid estimates do"
    )
    legend.set_title(title, prop=FontProperties(size=8))
    return {"figure.png": figure}


def _draw_quantity(ax: Axes, table: pd.DataFrame, quantity: str, branches: list[str], split: int) -> None:
    usable = table[table.valid] if quantity in ("llc", "wbic") else table
    at_split = usable[(usable.branch == BEFORE) & (usable.epoch == split)]
    before = usable[usable.branch == BEFORE]
    measured_each = quantity not in ("llc", "wbic")
    style: dict[str, Any] = {"color": GREY, "marker": "" if measured_each else ".", "linestyle": "-"}
    _curve(ax, before, quantity, "SGD before", style)
    for branch in branches:
        own = usable[usable.branch == branch]
        if own.empty:
            continue
        # The norm is of the updates within an epoch, not of the state at its end: nothing joins it to the split.
        joined = own if quantity in ("update_norm", "step_norm") else pd.concat([at_split, own])
        style = _style(branch, branches)
        _curve(ax, joined, quantity, branch, style | ({"marker": ""} if measured_each else {}))
    ax.axvline(split, color=GREY, linestyle=":", linewidth=1)
    if quantity in LOGARITHMIC:
        ax.set_yscale("log")
        plots.readable_log(ax.yaxis)
    if not measured_each:
        _count(ax, table[table[quantity].notna()], branches)


def _count(ax: Axes, estimated: pd.DataFrame, branches: list[str]) -> None:
    before = estimated[estimated.branch == BEFORE]
    plots.counts_at_foot(ax, before.epoch, before.valid, color=GREY)
    for branch in branches:
        own, style = estimated[estimated.branch == branch], _style(branch, branches)
        plots.counts_at_foot(ax, own.epoch, own.valid, color=style["color"], linestyle=style["linestyle"])


def _style(branch: str, branches: list[str]) -> dict[str, Any]:
    index = list(dict.fromkeys(_base(name) for name in branches)).index(_base(branch))
    return {
        "color": plots.PALETTE[index % len(plots.PALETTE)],
        "marker": plots.MARKERS[index % len(plots.MARKERS)],
        "linestyle": "--" if branch.endswith("-unrescaled") else "-." if branch.startswith("exact-") else "-",
    }


def _base(branch: str) -> str:
    """Return what the readings of NGD share, and with it a colour; their lines tell them apart."""
    return branch.removeprefix("exact-").removesuffix("-unrescaled")


def _curve(ax: Axes, own: pd.DataFrame, column: str, label: str, style: dict[str, Any]) -> None:
    mean = own.groupby("epoch")[column].mean()
    ax.plot(mean.index, mean, label=label, markersize=3.5, linewidth=1.2, **style)
    least = 0.2 if column in LOGARITHMIC else 0.0  # a t interval may reach below zero, with no logarithm there
    plots.seeds_around_mean(ax, own.epoch, own[column], color=style["color"], alpha=0.12, least=least)
