"""Wrong labels found against the fraction inspected, as Fig. 6, one column of panels for each task."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Computed, plots
from experiments.pbrf.fig6.scores import (
    AREA,
    CONFIDENT,
    INFLUENCE,
    INFLUENCE_TOTAL,
    LOSS,
    MARGIN,
    PBRF,
    PBRF_TOTAL,
    RANDOM,
)

PANELS = {
    "the paper's": (PBRF, INFLUENCE, PBRF_TOTAL, INFLUENCE_TOTAL, RANDOM),
    "everyday": (INFLUENCE, LOSS, MARGIN, AREA, CONFIDENT),
}
# One colour and one line for a method in both rows; the total loss has its own score's colour, dashed.
STYLES = {
    PBRF: (plots.PALETTE[1], "-"),
    INFLUENCE: (plots.PALETTE[0], "-"),
    PBRF_TOTAL: (plots.PALETTE[1], ":"),
    INFLUENCE_TOTAL: (plots.PALETTE[0], ":"),
    LOSS: (plots.PALETTE[2], "-"),
    MARGIN: (plots.PALETTE[3], "--"),
    AREA: (plots.PALETTE[4], "-"),
    CONFIDENT: (plots.PALETTE[6], "-."),
    RANDOM: ("#888888", "-"),
}


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the paper's scores in the upper row, everyday ones in the lower, beside influence."""
    curves, table, networks = (computed[name] for name in ("curves", "table", "networks"))
    tasks = curves.task.unique().tolist()
    figure, axes = plots.figure(2, len(tasks), panel_size=(4.4, 3.4))
    for column, task in enumerate(tasks):
        own, state = curves[curves.task == task], networks[networks.task == task]
        for ax, methods in zip(axes[:, column], PANELS.values(), strict=True):
            _draw_panel(ax, own, table[table.task == task], methods)
        predicted = state["wrong labels predicted"].mean()
        axes[0, column].set_title(f"{task}\n{predicted:.0%} of the wrong labels are learnt", fontsize=9)
    return {"figure.png": figure}


def _draw_panel(ax: Axes, curves: pd.DataFrame, table: pd.DataFrame, methods: tuple[str, ...]) -> None:
    for method in methods:
        own = curves[curves.method == method]
        if own.empty:
            continue
        color, line = STYLES[method]
        seeds = own.groupby("inspected").found
        mean = seeds.mean()
        ax.fill_between(mean.index, seeds.min(), seeds.max(), color=color, alpha=0.12, linewidth=0)
        found = table[table.method == method]["found at 20 %"].iloc[0]
        ax.plot(mean.index, mean, color=color, linestyle=line, linewidth=1.4, label=f"{method}: {found:.2f}")
    # Hollow, so that it hides no curve.
    ax.plot([0.2], [0.8], marker="*", markersize=11, mfc="none", color="black", linestyle="none", zorder=3)
    ax.plot([0.2, 0.2], [0, 0.8], color="black", linewidth=0.8, linestyle=(0, (2, 2)))
    ax.plot(
        [0, 0.2], [0.8, 0.8], color="black", linewidth=0.8, linestyle=(0, (2, 2)), label="paper's mark: over 0.80"
    )
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1.02)
    ax.set_xlabel("fraction of the training set inspected")
    ax.set_ylabel("fraction of wrong labels found")
    ax.legend(
        loc="lower right", fontsize=7, frameon=True, title="found at 20 %; band: all seeds", title_fontsize=7
    )
