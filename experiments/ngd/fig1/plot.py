"""Fig. 1: LLC over widths; and in other settings than the paper's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from curvlab.lab import Computed, plots
from experiments.ngd.fig1.cutoffs_plot import draw_cutoffs
from experiments.ngd.fig1.tuned_and_matched import TunedAndMatched
from experiments.ngd.fig1.tuned_and_matched_plot import draw_tuned_and_matched


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the paper's figure, and those of the settings which it does not have."""
    extra = draw_tuned_and_matched(TunedAndMatched.of(computed), computed["settings"])
    return {
        "figure.png": _draw_widths(computed["table"], computed["summary"]),
        "figure_tuned_and_matched.png": extra,
        "figure_cutoffs.png": draw_cutoffs(computed["cutoffs"], computed["cutoff_summary"]),
    }


def _draw_widths(table: pd.DataFrame, summary: pd.DataFrame) -> Figure:
    """Return one column for each task: LLC over widths above, training loss below."""
    tasks = summary.task.unique().tolist()
    figure, axes = plots.figure(2, len(tasks), panel_size=(3.6, 2.7))
    names = summary.optimizer.unique().tolist()
    for column, task in zip(axes.T, tasks, strict=True):
        own = summary[summary.task == task]
        widths = own.width.unique().tolist()
        for index, name in enumerate(names):
            shift = 0.12 * (index - (len(names) - 1) / 2)
            rows = own[own.optimizer == name]
            places = np.array([widths.index(width) for width in rows.width]) + shift
            style: dict[str, Any] = {
                "color": plots.PALETTE[index],
                "marker": plots.MARKERS[index],
                "linestyle": "none",
            }
            errors = np.array([rows.llc - rows.llc_low, rows.llc_high - rows.llc])
            column[0].errorbar(places, rows.llc, yerr=errors, capsize=3, markersize=5, label=name, **style)
            column[0].plot(places + 0.05, rows.llc_raw, markersize=4, markerfacecolor="none", **style)
            for place, (_, row) in zip(places, rows.iterrows(), strict=True):
                seeds = table[(table.task == task) & (table.width == row.width) & (table.optimizer == name)]
                column[0].plot(np.full(len(seeds), place), seeds.llc, markersize=2, alpha=0.5, **style)
                column[1].plot(np.full(len(seeds), place), seeds.train_loss, markersize=3, **style)
        for index, name in enumerate(names):
            seeds = table[(table.task == task) & (table.optimizer == name)]
            places = seeds.width.map(widths.index)
            plots.counts_at_foot(column[0], places, seeds.llc.notna(), color=plots.PALETTE[index])
        _annotate_p(column[0], own, widths)
        column[0].set_title(task)
        column[1].set_yscale("log")
        plots.readable_log(column[1].yaxis)
        for ax in column:
            ax.set_xticks(range(len(widths)), ["" if width == 0 else f"{width}" for width in widths])
            ax.set_xlim(-0.5, len(widths) - 0.5)
            ax.set_xlabel("" if widths == [0] else "width")
        column[0].set_ylabel("LLC from the minimum")
        column[1].set_ylabel("training loss (nats)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    legend = figure.legend(
        handles, labels, loc="outside lower center", ncols=len(names), fontsize=8, frameon=False
    )
    legend.set_title(
        "mean over seeds, 95 % t interval; hollow: LLC from the weights; dots: seeds\n"
        f"p: Welch's test against sgd; {plots.COUNTS_NOTE}",
        prop=FontProperties(size=8),
    )
    return figure


def _annotate_p(ax: Axes, summary: pd.DataFrame, widths: list[int]) -> None:
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.2 * (high - low))
    tested = summary[summary.p.notna()].drop_duplicates("width")
    for _, row in tested.iterrows():
        ax.text(widths.index(row.width), high + 0.08 * (high - low), f"p = {row.p:.1g}", ha="center", fontsize=8)
