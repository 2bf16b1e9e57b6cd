"""App. D: agreement of influence with TF-IDF over dampings, and the formulas behind it."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from curvlab.lab import Computed, plots

IDF = {"root": "TF-IDF, sqrt(1/DF) (App. D)", "log": "TF-IDF, log(1/DF)", "none": "TF products, no IDF"}
PANELS = {
    ("text", "all"): "text, frequent words",
    ("text", "rare"): "text, rare words",
    ("model", "rare"): "drawn from the model, rare words",
}


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the agreement over dampings, one figure for each corpus, and the formulas behind it."""
    table = computed["table"]
    corpora = list(dict.fromkeys(table.corpus))
    figures = {
        ("figure.png" if index == 0 else f"figure_{corpus}.png"): _agreement(table[table.corpus == corpus], corpus)
        for index, corpus in enumerate(corpora)
    }
    return {**figures, "figure_formulas.png": _formulas(computed)}


def _agreement(own: pd.DataFrame, corpus: str) -> Figure:
    figure, axes = plots.figure(2, len(PANELS), panel_size=(3.5, 2.7), sharex=True, sharey="row")
    for column, ((source, vocabulary), title) in enumerate(PANELS.items()):
        rows = own[(own.source == source) & (own.vocabulary == vocabulary)]
        for line, statistic in enumerate(("spearman", "overlap")):
            ax = axes[line, column]
            for index, (idf, label) in enumerate(IDF.items()):
                chosen = rows[rows.idf == idf].sort_values("damping_ratio")
                ax.errorbar(
                    chosen.damping_ratio,
                    chosen[statistic],
                    yerr=1.96 * chosen[f"{statistic}_stderr"],
                    color=plots.PALETTE[index],
                    marker=plots.MARKERS[index],
                    markersize=4,
                    linewidth=1,
                    label=label,
                )
            ax.set_xscale("log")
            ax.set_ylim(None, 1.02)
        axes[0, column].set_title(title)
        axes[1, column].set_xlabel("damping λ / smallest p")
    axes[0, 0].set_ylabel("Spearman correlation,\nmean over queries")
    axes[1, 0].set_ylabel("shared of the 10 most similar,\nmean over queries")
    figure.suptitle(f"influence in a bag-of-words model, {corpus}", fontsize=11)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _formulas(computed: Computed) -> Figure:
    figure, axes = plots.figure(1, 3, panel_size=(3.7, 3.3))
    _inverse(axes[0, 0], computed["inverse"])
    _limit(axes[0, 1], computed["limit"])
    _frequencies(axes[0, 2], computed["frequencies"])
    return figure


def _inverse(ax: Axes, inverse: pd.DataFrame) -> None:
    forms = {"printed": "printed, minus", "factored": "factored, as printed", "corrected": "corrected, plus"}
    for index, (form, label) in enumerate(forms.items()):
        ax.plot(
            inverse.damping,
            inverse[form].clip(lower=1e-17),
            color=plots.PALETTE[index],
            marker=plots.MARKERS[index],
            markersize=4,
            linestyle="none",
            label=label,
        )
    ax.axhline(1e-12, color="#555555", linestyle="--", linewidth=1)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("damping λ")
    ax.set_ylabel("largest error / largest entry")
    ax.set_title("closed forms against Direct")
    ax.legend(fontsize=7, loc="center right")


def _limit(ax: Axes, limit: pd.DataFrame) -> None:
    lines = {
        "error_scaled": "printed limit, times |d|²",
        "error_corrected": "|d|² (Σ TF TF / p - 1)",
        "rank_one": "rank-one term",
    }
    for index, (column, label) in enumerate(lines.items()):
        for number, (_, own) in enumerate(limit.groupby(["corpus", "vocabulary"], sort=False)):
            ax.plot(
                own.damping_ratio,
                own[column],
                color=plots.PALETTE[index],
                marker=plots.MARKERS[index],
                markersize=3,
                linewidth=1,
                label=label if number == 0 else None,
            )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("damping λ / smallest p")
    ax.set_ylabel("relative to the limit")
    ax.set_title("influence and its limit (lines: corpora)")
    ax.legend(fontsize=7)


def _frequencies(ax: Axes, frequencies: pd.DataFrame) -> None:
    own = frequencies[frequencies.vocabulary == "all"]
    index = 0
    for source in ("model", "text"):
        for corpus, rows in own[own.source == source].groupby("corpus", sort=False):
            ax.fill_between(
                rows.expected, rows.ratio_low, rows.ratio_high, color=plots.PALETTE[index], alpha=0.15, linewidth=0
            )
            ax.plot(
                rows.expected,
                rows.ratio,
                color=plots.PALETTE[index],
                marker=plots.MARKERS[index],
                markersize=4,
                linewidth=1,
                label=f"{corpus}, {'text' if source == 'text' else 'drawn from the model'}",
            )
            index += 1
    ax.plot(own.expected.sort_values(), own.independent[own.expected.sort_values().index], "k:", linewidth=1)
    ax.set_xscale("log")
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_ylim(0, None)
    ax.set_xlabel("|d| p (bins; band: 10 to 90 % of words)")
    ax.set_ylabel("DF / (|d| p)")
    ax.set_title("document frequency (dotted:\nindependent words)")
    ax.legend(fontsize=7)
