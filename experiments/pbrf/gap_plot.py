"""The gaps as stacked bars, one for each task, as Fig. 4: ours, and the paper's where it has the row."""

from __future__ import annotations

import textwrap

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

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
_HATCH = "//"
_LABEL_WIDTH = 14  # characters of a task's name on a line


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figure: shares of the gaps in their sum, and below it the sizes, on a logarithmic scale."""
    table = computed["table"]
    figure, axes = plots.figure(2, 1, panel_size=(1.5 + 0.95 * len(table), 2.9))
    _draw_shares(axes[0, 0], table)
    _draw_sizes(axes[1, 0], table)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    if (table.reindex(columns=_printed()).sum(axis=1) > 0).any():
        handles.append(Patch(facecolor="white", edgecolor="black", hatch=_HATCH))
        labels.append("hatched: the paper's")
    if not _has_paper(table).all():
        handles.append(Patch(facecolor="none", edgecolor="none"))
        labels.append("one bar: a stand-in, no value of the paper's")
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return {"figure.png": figure}


def _printed() -> list[str]:
    return [f"{gap} paper mean" for gap in GAPS]


def _has_paper(table: pd.DataFrame) -> pd.Series:
    return table.reindex(columns=_printed()).notna().all(axis=1)


def _draw_shares(ax: Axes, table: pd.DataFrame) -> None:
    """Draw ours; beside it, in rows that the paper has, the paper's, or that all of its gaps are 0."""
    for place, (_, row), has_paper in zip(range(len(table)), table.iterrows(), _has_paper(table), strict=True):
        ours = np.array([row[f"{gap} per_example mean"] for gap in GAPS])
        _stack(ax, place - 0.2 if has_paper else place, ours, hatch="", labelled=place == 0)
        if has_paper:
            printed = row[_printed()].to_numpy(float)
            _stack(ax, place + 0.2, printed, hatch=_HATCH, labelled=False)
            if printed.sum() == 0:
                words = "paper: 0.000 in all"
                ax.text(place + 0.2, 0.5, words, rotation=90, ha="center", va="center", fontsize=7)
    ax.set_xlim(-0.6, len(table) - 0.4)
    ax.set_xticks(np.arange(len(table)), [""] * len(table))
    ax.set_ylim(0, 1)
    ax.set_ylabel("share of their sum", fontsize=8)


def _stack(ax: Axes, place: float, sizes: np.ndarray, *, hatch: str, labelled: bool) -> None:
    if not sizes.sum() > 0:
        return
    bottom = 0.0
    for color, label, share in zip(plots.PALETTE, LABELS.values(), sizes / sizes.sum(), strict=False):
        ax.bar(place, share, 0.36, bottom, color=color, hatch=hatch, alpha=0.9, label=label if labelled else None)
        bottom += share


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
    ax.set_xlim(-0.6, len(table) - 0.4)
    ax.set_xticks(places, [textwrap.fill(task, _LABEL_WIDTH) for task in table.task], fontsize=7)
    ax.set_ylabel("gap / √N, mean ± std", fontsize=8)
