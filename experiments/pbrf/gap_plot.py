"""The gaps as stacked bars, one for each task, as Fig. 4: ours, and the paper's where it has the row."""

from __future__ import annotations

import textwrap

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from curvlab.influence.retraining import GAPS
from curvlab.lab import Computed, plots
from experiments.pbrf.gap_claims import why_out_of_reach

LABELS = {
    "warm_start": "warm-start gap",
    "proximity": "proximity gap",
    "non_convergence": "non-convergence gap",
    "linearisation": "linearisation error",
    "solver": "solver error",
}
_HATCH = "//"
_PALE = 0.35  # of what means nothing
_NOISE = 1e-6  # outputs: what two optimisations of one convex cost differ by; smaller gaps lie below the panel
_LABEL_WIDTH = 14  # characters of a task's name on a line
_MIN_WIDTH = 7.2  # inches, for the legend's longest line


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figure: shares of the gaps in their sum, and below it the sizes, on a logarithmic scale.

    Beside ours stands the paper's row, or that which a stand-in stands for, marked with a star. The paper does
    not say whether its distances are divided by √N, ours are. Bars of the sizes are t intervals over seeds,
    and end at the lower edge of the panel where they reach 0; one seed has none.
    """
    table = computed["table"].reset_index(drop=True)  # a row's place is its index
    figure, axes = plots.figure(2, 1, panel_size=(max(_MIN_WIDTH, 1.5 + 0.95 * len(table)), 3.0))
    _draw_shares(axes[0, 0], table)
    _draw_sizes(axes[1, 0], table)
    labels = list(LABELS.values())
    handles: list[Artist] = [Patch(color=color, alpha=0.9) for color in plots.PALETTE[: len(labels)]]
    if (table.reindex(columns=_printed()).sum(axis=1) > 0).any():
        handles.append(Patch(facecolor="white", edgecolor="black", hatch=_HATCH))
        labels.append("hatched: the paper's")
    if _has_paper(table).any():
        handles.append(Line2D([], [], color="black", marker="o", markersize=4, linestyle="none", fillstyle="none"))
        labels.append("hollow: the paper's, ± as printed (0.000 left out)")
    handles.append(Line2D([], [], color="black", marker="_", markersize=12, linestyle="none"))
    labels.append("line: how far the influence estimate moves")
    handles.append(Line2D([], [], color="black", marker="|", markersize=8, linestyle="none"))
    # The paper's tables give arithmetic means; seeds are judged by geometric ones, which fewer of them rule.
    labels.append(
        "t 95 % over seeds of the arithmetic mean (claims:\nthe geometric); to the edge where it reaches 0"
    )
    if (_stands_for(table)[_has_paper(table)] != "").any():
        handles.append(Patch(facecolor="none", edgecolor="none"))
        labels.append("*: row that ours stands in for")
    if not _counts(table).all():
        handles.append(Patch(facecolor="#555555", alpha=_PALE))
        labels.append("pale: not solved, or learned nothing")
    if not _has_paper(table).all():
        handles.append(Patch(facecolor="none", edgecolor="none"))
        labels.append("one bar: no value of the paper's")
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return {"figure.png": figure}


def _printed(what: str = "mean") -> list[str]:
    return [f"{gap} paper {what}" for gap in GAPS]


def _has_paper(table: pd.DataFrame) -> pd.Series:
    return table.reindex(columns=_printed()).notna().all(axis=1)


def _counts(table: pd.DataFrame) -> pd.Series:
    """Return whether ours means something: its systems are solved, and its network learned."""
    return table.apply(lambda row: bool(row.get("learned", True)) and not why_out_of_reach(row), axis=1)


def _stands_for(table: pd.DataFrame) -> pd.Series:
    return table.get("stands for", pd.Series("", table.index)).fillna("")


def _draw_shares(ax: Axes, table: pd.DataFrame) -> None:
    """Draw ours, with their sum above; beside it, in rows that the paper has, the paper's, or that all are 0."""
    stands_for = _stands_for(table).tolist()
    counts = _counts(table).tolist()
    for place, (_, row), has_paper in zip(range(len(table)), table.iterrows(), _has_paper(table), strict=True):
        alpha = 0.9 if counts[place] else _PALE
        ours = np.array([row[f"{gap} per_example mean"] for gap in GAPS])
        _stack(ax, place - 0.2 if has_paper else place, ours, hatch="", alpha=alpha)
        if has_paper:
            printed = row[_printed()].to_numpy(float)
            star = "*" if stands_for[place] else ""
            _stack(ax, place + 0.2, printed, hatch=_HATCH, star=star)
            if printed.sum() == 0:
                words = f"paper{star}: 0.000 in all"
                ax.text(place + 0.2, 0.5, words, rotation=90, ha="center", va="center", fontsize=7)
    ax.set_xlim(-0.6, len(table) - 0.4)
    ax.set_xticks(np.arange(len(table)), [""] * len(table))
    ax.set_ylim(0, 1.12)
    ax.set_yticks(np.linspace(0, 1, 6))
    ax.set_ylabel("share of their sum\n(the sum, in outputs, on top)", fontsize=8)


def _stack(ax: Axes, place: float, sizes: np.ndarray, *, hatch: str, alpha: float = 0.9, star: str = "") -> None:
    if not sizes.sum() > 0:
        return
    bottom = 0.0
    for color, share in zip(plots.PALETTE, sizes / sizes.sum(), strict=False):
        ax.bar(place, share, 0.36, bottom, color=color, hatch=hatch, alpha=alpha)
        bottom += share
    ax.text(place, 1.01, f"{sizes.sum():.3g}{star}", ha="center", va="bottom", fontsize=6.5)


def _draw_sizes(ax: Axes, table: pd.DataFrame) -> None:
    ax.set_yscale("log", nonpositive="clip")  # a bar down to 0 or below ends at the lower edge
    for index, gap in enumerate(GAPS):
        shift = 0.16 * (index - 2) - 0.03
        mean = table[f"{gap} per_example mean"]
        low, high = (table[f"{gap} per_example {end}"] for end in ("low", "high"))
        counts = _counts(table)
        for rows, alpha in ((counts, 1.0), (~counts, _PALE)):
            _points(ax, index, shift, mean[rows], (mean - low)[rows], (high - mean)[rows], alpha=alpha)
        if f"{gap} paper mean" in table:
            printed = table[f"{gap} paper mean"]
            spread = table[f"{gap} paper ±"].where(printed > 0)
            _points(ax, index, shift + 0.07, printed.where(printed > 0), spread, spread, hollow=True)
    ax.scatter(np.arange(len(table)), table.moved, marker="_", s=420, color="black", linewidths=0.9, zorder=1)
    smallest = min(table[f"{gap} per_example mean"].where(lambda sizes: sizes > 0).min() for gap in GAPS)
    ax.set_ylim(bottom=max(smallest / 3, _NOISE))
    ax.set_xlim(-0.6, len(table) - 0.4)
    names = [_named(row) for _, row in table.iterrows()]
    ax.set_xticks(np.arange(len(table)), names, fontsize=7)
    ax.set_ylabel("‖Y_a − Y_b‖ / √N, in logits or\npredictions", fontsize=8)


def _named(row: pd.Series) -> str:
    """Return the task with what keeps its row from meaning anything."""
    name = textwrap.fill(row.task, _LABEL_WIDTH)
    if not row.get("learned", True):
        return f"{name}\nlearned nothing"
    return f"{name}\nnot solved" if why_out_of_reach(row) else name


def _points(  # noqa: PLR0917
    ax: Axes,
    index: int,
    shift: float,
    mean: pd.Series,
    below: pd.Series,
    above: pd.Series,
    *,
    hollow: bool = False,
    alpha: float = 1.0,
) -> None:
    if mean.empty:
        return
    ax.errorbar(
        mean.index + shift,
        mean,
        yerr=np.stack([below, above]),
        fmt=plots.MARKERS[index],
        color=plots.PALETTE[index],
        markerfacecolor="white" if hollow else None,
        markersize=3.5,
        capsize=1.5,
        elinewidth=0.8,
        alpha=alpha,
    )
