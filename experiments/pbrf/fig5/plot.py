"""Sec. 6.2, plot: a panel for each factor, the gaps as curves with error bars over seeds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.influence.retraining import GAPS
from curvlab.lab import Computed, plots, task_label, task_settings
from experiments.pbrf.fig5.factors import FACTORS, base_level
from experiments.pbrf.gap_plot import LABELS

AXES = {
    "width": "width",
    "depth": "depth (hidden layers)",
    "epochs": "training epochs",
    "weight_decay": "weight decay",
    "damping": "damping",
    "removed": "fraction of the training set removed",
}
LINEAR = ("depth", "removed")
DRAWN = {
    **LABELS,
    "whole": "cold optimum to influence",
    "moved": "what influence moves",
    "retrained": "what retraining moves",
}
GREY = {"moved": ":", "retrained": "-."}


def draw(computed: Computed) -> dict[str, Figure]:
    """Return a figure for each task, the first one as figure.png."""
    figures: dict[str, Figure] = {}
    for name, settings in task_settings(computed.config).items():
        table = computed["table"]
        own = table[table.task == task_label(name)]
        file = f"figure_{task_label(name)}.png" if figures else "figure.png"
        figures[file] = _draw_task(own, settings)
    return figures


def _draw_task(table: pd.DataFrame, settings: Any) -> Figure:
    figure, axes = plots.figure(2, 3, panel_size=(3.3, 2.7), sharey=True)
    for ax, factor in zip(axes.flat, FACTORS, strict=True):
        own = table[table.factor == factor]
        if own.empty:
            ax.set_axis_off()
            continue
        _draw_factor(ax, factor, own)
        base = base_level(settings, factor)
        if base is not None and own.level.min() <= base <= own.level.max():
            ax.axvline(base, color="#888888", linestyle=":", linewidth=1, zorder=0.5)
    for ax in axes[:, 0]:
        ax.set_ylabel("gap / √N")
    handles, labels = next(ax for ax in axes.flat if ax.axison).get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    task, size = table.task.iloc[0], int(table.N.iloc[0])
    figure.suptitle(
        f"{task}, N = {size}: mean over {int(table.groups.max())} points or groups, ± standard deviation of "
        f"{int(table.seeds.max())} seeds; dotted: level of the other panels",
        fontsize=9,
    )
    return figure


def _draw_factor(ax: Axes, factor: str, own: pd.DataFrame) -> None:
    for gap, style in GREY.items():
        curve = own[(own.gap == gap) & (own["mean"] > 0)].sort_values("level")
        ax.plot(curve.level, curve["mean"], color="#777777", linestyle=style, linewidth=1.5, label=DRAWN[gap])
    for index, gap in enumerate(("whole", *GAPS), start=-1):  # the whole behind its parts
        curve = own[(own.gap == gap) & (own["mean"] > 0)].sort_values("level")
        spread = curve["seed std"].fillna(0.0)
        ax.errorbar(
            curve.level,
            curve["mean"],
            yerr=np.stack([np.minimum(spread, 0.9 * curve["mean"]), spread]),
            color=plots.PALETTE[index],
            linestyle="--" if gap == "whole" else "-",
            marker=plots.MARKERS[index],
            markersize=8 if gap == "whole" else 4,
            markerfacecolor="none" if gap == "whole" else None,
            linewidth=1,
            capsize=2,
            label=DRAWN[gap],
        )
    ax.set_yscale("log")
    ax.set_xlabel(AXES[factor])
    if factor not in LINEAR:
        ax.set_xscale("log")
        plots.readable_log(ax.xaxis)
    ax.set_xticks(sorted(own.level.unique())) if own.level.nunique() <= 4 else None
    plots.readable_log(ax.yaxis)
