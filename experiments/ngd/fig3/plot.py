"""Fig. 3: LLC, after equal epochs and at equal loss, and training loss against the smoothing constants."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from curvlab.lab import Computed, plots, t_interval
from experiments.ngd.fig3.compute import SWEEPS

CONSTANTS = {"alpha": "smoothing α", "epsilon": "floor ε"}
QUANTITIES = {"llc": "LLC from the minimum", "train_loss": "training loss (nats)"}


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figure, for each task a row: LLC and training loss against alpha and epsilon, SGD as a band."""
    table, equal = computed["table"], computed["equal_loss"]
    tasks = table.task.unique().tolist()
    figure, axes = plots.figure(len(tasks), 4, panel_size=(3.2, 2.6))
    for row, task in zip(axes, tasks, strict=True):
        for pair, quantity in ((row[:2], "llc"), (row[2:], "train_loss")):
            pair[0].sharey(pair[1])
            pair[0].set_ylabel(QUANTITIES[quantity])
            for ax, sweep in zip(pair, SWEEPS, strict=True):
                _draw_panel(ax, table[table.task == task], sweep, quantity)
        _draw_equal_loss(row[0], equal[equal.task == task])
        _count(row[:2], table[table.task == task], equal[equal.task == task])
        row[0].set_title(task)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    legend = figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    legend.set_title(
        f"mean over seeds, 95 % t interval (from three on); dots: seeds; {plots.COUNTS_NOTE}, SGD's at its line",
        prop=FontProperties(size=8),
    )
    return {"figure.png": figure}


def _draw_panel(ax: Axes, table: pd.DataFrame, sweep: str, quantity: str) -> None:
    own = table[table.sweep == sweep]
    if own.empty:  # a task without this sweep
        ax.set_axis_off()
        return
    _draw_sweep(ax, own, quantity)
    _draw_band(ax, table[table.sweep == "sgd"][quantity])
    ax.set_xscale("log")
    ax.set_xlabel(CONSTANTS[sweep])
    if quantity == "train_loss":
        ax.set_yscale("log")
        plots.readable_log(ax.yaxis)
        return
    left_out = own[own.llc.isna() & own.estimate.notna()]
    ax.scatter(
        left_out.value,
        left_out.estimate,
        s=22,
        facecolors="none",
        edgecolors=plots.PALETTE[1],
        marker=plots.MARKERS[1],
        label="NGD, not converged or not valid",
    )


def _draw_sweep(ax: Axes, own: pd.DataFrame, quantity: str) -> None:
    counted = own.dropna(subset=quantity)
    means = counted.groupby("value")[quantity].mean()
    ends = [_ends(rows[quantity].to_numpy()) for _, rows in counted.groupby("value")]
    errors = np.array([means - [low for low, _ in ends], [high for _, high in ends] - means])
    style: dict[str, Any] = {"color": plots.PALETTE[1], "marker": plots.MARKERS[1]}
    ax.errorbar(means.index, means, yerr=errors, capsize=3, markersize=5, linewidth=1.2, label="NGD", **style)
    ax.scatter(counted.value, counted[quantity], s=6, alpha=0.5, color=plots.PALETTE[1])


def _draw_equal_loss(ax: Axes, equal: pd.DataFrame) -> None:
    """Draw the LLCs at equal training loss, a little to the right of those after equal epochs; SGD's as a line."""
    counted = equal.dropna(subset=["value", "llc"])
    groups = [(float(value), rows.llc.to_numpy()) for value, rows in counted.groupby("value")]  # type: ignore[arg-type]
    if groups:
        places = np.array([1.25 * value for value, _ in groups])
        means = np.array([llcs.mean() for _, llcs in groups])
        ends = np.array([_ends(llcs) for _, llcs in groups]).T
        style: dict[str, Any] = {"color": plots.PALETTE[2], "marker": plots.MARKERS[2], "linestyle": "--"}
        errors = np.array([means - ends[0], ends[1] - means])
        label = "NGD, at equal training loss"
        ax.errorbar(places, means, yerr=errors, capsize=3, markersize=4, linewidth=1.0, label=label, **style)
    sgd = equal[equal.value.isna()].llc.dropna()
    if len(sgd):
        ax.axhline(
            sgd.mean(), color=plots.PALETTE[2], linewidth=1.0, linestyle=":", label="SGD, at equal training loss"
        )


def _count(axes: np.ndarray, table: pd.DataFrame, equal: pd.DataFrame) -> None:
    """Write how many seeds have an LLC, once all is drawn."""
    for ax, sweep in zip(axes, SWEEPS, strict=True):
        own = table[table.sweep == sweep]
        plots.counts_at_foot(ax, own.value, own.llc.notna(), color=plots.PALETTE[1])
    swept = equal[equal.value.notna()]
    plots.counts_at_foot(axes[0], 1.25 * swept.value, swept.llc.notna(), color=plots.PALETTE[2], linestyle="--")


def _draw_band(ax: Axes, seeds: pd.Series) -> None:
    """Draw SGD's mean and interval, and at the line's end how many seeds count where not all do."""
    values = seeds.dropna().to_numpy()
    if not len(values):
        return
    low, high = _ends(values)
    color = plots.PALETTE[0]
    ax.axhline(values.mean(), color=color, linewidth=1.2, linestyle="--", label="SGD")
    if len(values) < len(seeds):
        at_end: dict[str, Any] = {"xycoords": ax.get_yaxis_transform(), "va": "center", "fontsize": 7}
        ax.annotate(str(len(values)), (1.01, values.mean()), color=color, **at_end)
    if np.isfinite(low):
        ax.axhspan(low, high, color=color, alpha=0.15, linewidth=0)


def _ends(values: np.ndarray) -> tuple[float, float]:
    """Return the ends of the 95 % t interval over seeds; nan with fewer than three."""
    interval = t_interval(values)
    return (interval.low, interval.high) if len(values) >= plots.MIN_SEEDS else (np.nan, np.nan)
