"""The gaps as stacked bars, one for each task, as Fig. 4: ours, and the paper's where it has the row."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.influence.responses import GAPS
from curvlab.reporting import plots
from experiments.target import Computed

LABELS = {
    "warm_start": "warm-start gap",
    "proximity": "proximity gap",
    "non_convergence": "non-convergence gap",
    "linearisation": "linearisation error",
    "solver": "solver error",
}


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figure: shares of the gaps in their sum, and below it the sizes, on a logarithmic scale."""
    table = computed["table"]
    figure, axes = plots.figure(2, 1, panel_size=(1.5 + 0.95 * len(table), 2.9))
    _draw_shares(axes[0, 0], table)
    _draw_sizes(axes[1, 0], table)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return {"figure.png": figure}


def _draw_shares(ax: Axes, table: pd.DataFrame) -> None:
    places = np.arange(len(table))
    for offset, kind, hatch in ((-0.2, "per_example", ""), (0.2, "paper", "//")):
        columns = {gap: table.get(f"{gap} {kind} mean", pd.Series(np.nan, table.index)) for gap in GAPS}
        whole = sum(columns.values())
        bottom = np.zeros(len(table))
        for color, (gap, values) in zip(plots.PALETTE, columns.items(), strict=False):
            share = (values / whole).fillna(0.0).to_numpy()
            label = LABELS[gap] if kind == "per_example" else None
            ax.bar(places + offset, share, 0.36, bottom, color=color, hatch=hatch, alpha=0.9, label=label)
            bottom += share
    ax.set_xticks(places, [""] * len(table))
    ax.set_ylim(0, 1)
    ax.set_ylabel("share of their sum", fontsize=8)
    ax.set_title("left: ours; right, hatched: the paper's, where it has the row", fontsize=8)


def _draw_sizes(ax: Axes, table: pd.DataFrame) -> None:
    places = np.arange(len(table))
    for index, gap in enumerate(GAPS):
        mean, spread = table[f"{gap} per_example mean"], table[f"{gap} per_example std"]
        lower = np.minimum(spread, 0.9 * mean)
        ax.errorbar(
            places + 0.14 * (index - 2),
            mean,
            yerr=np.stack([lower, spread]),
            fmt=plots.MARKERS[index],
            color=plots.PALETTE[index],
            markersize=4,
            capsize=2,
        )
    ax.set_yscale("log")
    ax.set_xticks(places, table.task, rotation=20, ha="right", fontsize=7)
    ax.set_ylabel("gap / √N, mean ± std", fontsize=8)
