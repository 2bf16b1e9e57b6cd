"""LLC of both optimizers, and NGD over SGD, against the curvature cut-off and against the step size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import plots
from experiments.ngd.fig1.cutoffs import SWEEPS
from experiments.ngd.fig1.networks import PLACE, network_name

NAMES = ("sgd", "ngd")
_AXES = {"localization": "curvature_cutoff", "step_size": "step_size"}
_LABELS = {"localization": "curvature cut-off γ/(nβ)", "step_size": "step size ε"}


def draw_cutoffs(table: pd.DataFrame, summary: pd.DataFrame) -> Figure:
    """Return one row for each network: LLC and NGD over SGD against the cut-off, then against the step size.

    Args:
        table: `cutoffs`.
        summary: `cutoff_summary`.
    """
    networks = list(summary[[*PLACE]].drop_duplicates().itertuples(index=False, name=None))
    figure, axes = plots.figure(max(1, len(networks)), 2 * len(SWEEPS), panel_size=(3.2, 2.7))
    for row, (task, width) in zip(axes, networks, strict=False):
        for index, sweep in enumerate(SWEEPS):
            own, its_summary = (
                part[(part.task == task) & (part.width == width) & (part.sweep == sweep)]
                for part in (table, summary)
            )
            _draw_estimates(row[2 * index], own, its_summary, _AXES[sweep])
            _draw_difference(row[2 * index + 1], its_summary, _AXES[sweep])
            for ax in row[2 * index : 2 * index + 2]:
                if np.isfinite(ax.dataLim.minposx):  # a logarithm needs something drawn
                    ax.set_xscale("log")
                    plots.readable_log(ax.xaxis)
                ax.set_xlabel(_LABELS[sweep])
            for place, name in enumerate(NAMES):
                seeds = own[own.optimizer == name]
                color = plots.PALETTE[place]
                plots.counts_at_foot(row[2 * index], seeds[_AXES[sweep]], seeds.llc.notna(), color=color)
        row[0].set_title(network_name(task, width))
    handles, labels = axes[0, 0].get_legend_handles_labels()
    title = (
        "LLC: line: mean over the seeds that count, dots: seeds; NGD over SGD: 95 % t interval over seeds\n"
        f"{plots.COUNTS_NOTE}"
    )
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=2,
        fontsize=8,
        frameon=False,
        title=title,
        title_fontsize=8,
    )
    return figure


def _draw_estimates(ax: Axes, table: pd.DataFrame, summary: pd.DataFrame, column: str) -> None:
    for index, name in enumerate(NAMES):
        style: dict[str, Any] = {"color": plots.PALETTE[index], "marker": plots.MARKERS[index]}
        ax.plot(summary[column], summary[name], markersize=4, linewidth=1.2, label=name, **style)
        seeds = table[table.optimizer == name]
        ax.scatter(seeds[column], seeds.llc, s=6, alpha=0.5, **style)
    ax.set_ylabel("LLC from the minimum")


def _draw_difference(ax: Axes, summary: pd.DataFrame, column: str) -> None:
    mean = 100 * summary.relative_difference
    errors = np.array([mean - 100 * summary.low, 100 * summary.high - mean])
    style: dict[str, Any] = {"color": plots.PALETTE[2], "marker": plots.MARKERS[2]}
    ax.errorbar(summary[column], mean, yerr=errors, capsize=3, markersize=5, linewidth=1.2, **style)
    ax.axhline(0, color="#555555", linewidth=1, linestyle="--")
    ax.set_ylabel("NGD over SGD − 1 (%)")
