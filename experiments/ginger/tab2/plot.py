"""Table 2: ROUGE and training perplexity against rank, ours and the paper's; operations and memory likewise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Computed, plots

HALVES = {"full": "all weights", "lora": "LoRA"}
RACERS = {"momentum": 0, "adam": 1, "qng": 2, "ginger": 3, "without_curvature": 5}  # places in the palette
SCORES = {"rouge": "ROUGE, mean of 1, 2, L (%)", "train_perplexity": "training perplexity"}
COSTS = {"flops": "operations over Adam's", "memory": "memory over Adam's"}

HOLLOW = "hollow: without seeds that diverged"
LEAST = {"rouge": 0.0, "train_perplexity": 1.0}  # what a score can be
LOGARITHMIC_FROM = 10


def draw(computed: Computed) -> dict[str, Figure]:
    """Return `figure.png`, scores, and `cost.png`; a row for each task and half, ours left, the paper's right."""
    summary, paper = computed["summary"], computed["paper"]
    names = dict(zip(summary.racer, summary.label, strict=True))
    paper = paper.assign(label=[names.get(racer, racer) for racer in paper.racer])
    return {
        "figure.png": _drawn(
            summary,
            paper,
            SCORES,
            about="mean over seeds, 95 % t interval, to the edge where it goes on; " + HOLLOW,
        ),
        "cost.png": _drawn(_relative(summary), _relative(paper), COSTS, about="counted, of one step"),
    }


def _relative(table: pd.DataFrame) -> pd.DataFrame:
    """Return costs as multiples of Adam's."""
    parts = []
    for _, own in table.groupby([name for name in ("task", "weights") if name in table], sort=False):
        adam = own[own.racer == "adam"].iloc[0]
        parts.append(own.assign(**{name: own[name] / adam[name] for name in COSTS}))
    found = pd.concat(parts, ignore_index=True)
    return found[found.racer != "without_curvature"]


def _drawn(summary: pd.DataFrame, paper: pd.DataFrame, quantities: dict[str, str], *, about: str) -> Figure:
    places = list(summary[["task", "weights"]].drop_duplicates().itertuples(index=False))
    figure, axes = plots.figure(len(places), 4, panel_size=(2.9, 2.6))
    for row, place in zip(axes, places, strict=True):
        ours = summary[(summary.task == place.task) & (summary.weights == place.weights)]
        printed = paper[paper.weights == place.weights]
        for pair, (quantity, name) in zip((row[:2], row[2:]), quantities.items(), strict=True):
            _draw_panel(pair[0], ours, quantity)
            _draw_panel(pair[1], printed, quantity)
            half = HALVES[str(place.weights)]
            pair[0].set_title(f"{half}\n{place.task}")
            pair[1].set_title(f"{half}\nT5-small, the paper's")
            pair[0].set_ylabel(name)
            if quantity in COSTS:
                _scale_cost(pair)
            else:
                _bound_score(pair[0], ours, quantity)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    legend = figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False
    )
    legend.set_title(f"ours: {about}")
    return figure


def _scale_cost(pair: np.ndarray) -> None:
    """Begin at 0, or at 1 on a logarithmic axis where costs rise tenfold."""
    for ax in pair:
        if ax.get_ylim()[1] > LOGARITHMIC_FROM:
            ax.set_yscale("log")
            plots.readable_log(ax.yaxis)
        else:
            ax.set_ylim(0, 1.1 * ax.get_ylim()[1])


def _bound_score(ax: Axes, table: pd.DataFrame, quantity: str) -> None:
    """Keep intervals that reach values which a score cannot have from ruling the axis."""
    if f"{quantity}_low" not in table or not (table[f"{quantity}_low"] < LEAST[quantity]).any():
        return
    if quantity == "rouge":
        ax.set_ylim(bottom=LEAST[quantity])
        return
    ax.set_yscale("log", nonpositive="clip")
    ax.set_ylim(bottom=0.7 * table[quantity].min())
    plots.readable_log(ax.yaxis)


def _draw_panel(ax: Axes, table: pd.DataFrame, quantity: str) -> None:
    """Draw a curve over ranks for those that have one, a level across the panel for the others."""
    for racer, own in table.groupby("racer", sort=False):
        place = RACERS[str(racer)]
        color, marker, label = plots.PALETTE[place], plots.MARKERS[place], str(own.label.iloc[0])
        rank, values = own["rank"].to_numpy(float), own[quantity].to_numpy()
        has_ends = f"{quantity}_low" in own
        low, high = (own[f"{quantity}_{end}"].to_numpy() if has_ends else values for end in ("low", "high"))
        if racer in ("qng", "ginger"):
            shift = 1.04 if racer == "ginger" else 1 / 1.04  # intervals side by side
            errors = np.nan_to_num(np.array([values - low, high - values]))
            ax.errorbar(
                rank * shift,
                values,
                yerr=errors if has_ends else None,
                capsize=3,
                markersize=5,
                color=color,
                marker=marker,
                label=label,
            )
            if "diverged" in own:
                hollow = own.diverged.to_numpy() > 0
                face: dict[str, Any] = {"markerfacecolor": "white", "markeredgecolor": color, "markersize": 5}
                ax.plot(rank[hollow] * shift, values[hollow], marker, zorder=3, **face)
        else:
            line = "--" if racer != "without_curvature" else ":"
            ax.axhline(values[0], color=color, linestyle=line, linewidth=1.4, label=label)
            if has_ends and np.isfinite(low[0]):
                ax.axhspan(low[0], high[0], color=color, alpha=0.12, linewidth=0)
    ranks = sorted(table["rank"].dropna().unique())
    ax.set_xscale("log", base=2)
    ax.set_xticks(ranks, [f"{rank:g}" for rank in ranks])
    ax.minorticks_off()
    ax.set_xlabel("rank τ")
