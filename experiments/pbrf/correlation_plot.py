"""Correlations as bars: one panel for each task, ours with intervals over seeds, the paper's as diamonds."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.reporting import plots
from experiments.pbrf.correlations import COEFFICIENTS
from experiments.target import Computed

LABELS = {
    "cold": "cold start",
    "warm": "warm start",
    "two_stage": "two stages",
    "proximal_bregman": "PBRF",
    "linearised": "linearised",
}
CURVATURES = {"gauss_newton": "Gauss-Newton", "hessian": "Hessian"}


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figure, a row for each curvature and a column for each task."""
    table = computed["table"]
    tasks, curvatures = table.task.unique().tolist(), table.curvature.unique().tolist()
    figure, axes = plots.figure(len(curvatures), len(tasks), panel_size=(3.1, 2.5))
    for row, curvature in zip(axes, curvatures, strict=True):
        for ax, task in zip(row, tasks, strict=True):
            _draw_panel(ax, table[(table.task == task) & (table.curvature == curvature)])
            ax.set_title(f"{task}\ninfluence by the {CURVATURES[curvature]} matrix", fontsize=8)
    for row in axes:
        row[0].set_ylabel("correlation with influence", fontsize=8)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return {"figure.png": figure}


def _draw_panel(ax: Axes, own: pd.DataFrame) -> None:
    places = np.arange(len(own))
    for index, coefficient in enumerate(COEFFICIENTS):
        middle, shift = own[f"{coefficient} over_test"], 0.36 * index - 0.18
        error = np.stack([middle - own[f"{coefficient} low"], own[f"{coefficient} high"] - middle]).clip(min=0)
        ax.bar(places + shift, middle, 0.34, color=plots.PALETTE[index], label=f"{coefficient.capitalize()}, ours")
        ax.errorbar(places + shift, middle, yerr=error, fmt="none", ecolor="0.2", capsize=2, linewidth=0.9)
        ax.scatter(
            places + shift, own[f"{coefficient} paper"], marker="D", s=14, color=plots.PALETTE[index],
            edgecolors="0.1", zorder=3, label=f"{coefficient.capitalize()}, paper",
        )  # fmt: skip
    ax.axhline(0, color="0.6", linewidth=0.8)
    ax.set_xticks(places, [LABELS[name] for name in own.response], fontsize=8)
    ax.set_ylim(-1.05, 1.05)
