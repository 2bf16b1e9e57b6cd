"""Error and correlation against work, and against seconds."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Computed, plots

FLOOR = 1e-7  # of 1 - correlation: below it is rounding of the reference
STYLES = ("-", "--")
ENDS = ("o", "s")  # of answers, for the same two: colours repeat


def draw(computed: Computed) -> dict[str, Figure]:
    """Return two figures, by work and by seconds: medians over the systems that were solved."""
    table = computed["table"]
    timed = table.assign(seconds=computed["timing"].seconds.to_numpy())
    return {
        "figure.png": _grid(table, "work", "products with G for each system"),
        "figure_seconds.png": _grid(timed, "seconds", "CPU seconds for each system"),
    }


def _grid(table: pd.DataFrame, x: str, label: str) -> Figure:
    """Draw one column for each task and number of systems: error above, 1 - correlation below."""
    panels = list(table.groupby(["task", "num_rhs"], sort=False))
    methods = table.method.unique().tolist()
    size = (max(2.7, 7.6 / len(panels)), 2.5)
    figure, axes = plots.figure(2, len(panels), panel_size=size, sharey="row", sharex="col")
    for column, ((task, num_rhs), own) in enumerate(panels):
        plural = "right-hand side" if num_rhs == 1 else "right-hand sides"
        axes[0, column].set_title(f"{task}\n{num_rhs} {plural}", fontsize=9)
        for index, method in enumerate(methods):
            curve = own[own.method == method]
            style = {
                "label": method,
                "color": plots.PALETTE[index % len(plots.PALETTE)],
                "linestyle": STYLES[index // len(plots.PALETTE)],
                "linewidth": 2.4 if "default" in method else 1.2,
                "zorder": 4 if "default" in method else 2,
            }
            end = ENDS[index // len(plots.PALETTE)]
            _curve(axes[0, column], curve, x, curve.error, style, end)
            _curve(axes[1, column], curve, x, (1 - curve.correlation).clip(lower=FLOOR), style, end)
        axes[1, column].set_xlabel(label)
        for ax in axes[:, column]:
            ax.set_xscale("log")
            ax.set_yscale("log")
    axes[0, 0].set_ylabel("relative error of x")
    axes[1, 0].set_ylabel("1 - correlation of scores")
    axes[0, 0].set_ylim(top=30)
    axes[1, 0].set_ylim(bottom=FLOOR, top=3)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _curve(ax: Axes, curve: pd.DataFrame, x: str, values: pd.Series, style: dict, end: str) -> None:  # noqa: PLR0917
    """Draw a trajectory with its end marked: `end` for an answer, a cross where it diverged."""
    if curve.empty:
        return
    ax.plot(curve[x], values, **style)
    diverged = str(curve.outcome.iloc[-1]).startswith("diverges")
    ax.plot(curve[x].iloc[-1:], values.iloc[-1:], **{**style, "label": None, "marker": "x" if diverged else end})
