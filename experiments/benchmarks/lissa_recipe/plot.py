"""Error and cost of the recipes."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from curvlab.lab import Computed, plots

COLORS = (1, 0, 2)  # of the recipes, in their order
TOP = 1e3  # errors above it are drawn here
QUANTITIES = {
    "error_worst": "relative error, worst system",
    "constant": "constant C",
    "passes": "passes over the data\nfor each system",
}


def draw(computed: Computed) -> dict[str, Figure]:
    """Return one panel for each quantity: a line for each case, markers by recipe, crosses where it diverges."""
    table = computed["table"]
    cases = table.case.unique().tolist()
    figure, axes = plots.figure(1, 3, panel_size=(3.2, 1.2 + 0.34 * len(cases)), sharey=True)
    for ax, (quantity, label) in zip(axes[0], QUANTITIES.items(), strict=True):
        _panel(ax, table, quantity, cases)
        ax.set_xlabel(label)
        ax.set_xscale("log")
        ax.xaxis.set_minor_formatter(NullFormatter())  # decades are labelled, however few
        low, high = ax.get_xlim()
        ax.set_xlim(10 ** np.floor(np.log10(low)), 10 ** np.ceil(np.log10(high)))
    axes[0, 0].set_ylabel("model, data and damping")
    axes[0, 0].set_yticks(range(len(cases)), cases)
    axes[0, 0].invert_yaxis()
    axes[0, 0].axvline(0.2, color="#555555", linestyle="--", linewidth=1, label="0.2")
    axes[0, 0].axvline(1, color="#555555", linestyle=":", linewidth=1, label="error of zero")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return {"figure.png": figure}


def _panel(ax: Axes, table: pd.DataFrame, quantity: str, cases: list[str]) -> None:
    for index, recipe in enumerate(table.recipe.unique()):
        own = table[table.recipe == recipe].set_index("case").loc[cases]
        values = own[quantity].clip(upper=TOP if quantity == "error_worst" else np.inf)
        places = np.arange(len(cases)) + 0.24 * (index - 1)
        diverged = own.outcome.str.startswith("diverges").to_numpy()
        color = plots.PALETTE[COLORS[index]]
        ax.scatter(values[~diverged], places[~diverged], color=color, marker="o", s=26, label=recipe)
        if diverged.any():
            label = f"{recipe}: stopped, diverging"
            ax.scatter(values[diverged], places[diverged], color=color, marker="x", s=34, label=label)
