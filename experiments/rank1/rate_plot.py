"""Steps to ε, plot: drawn from the saved table alone.

python -m experiments.rank1.rate_plot results/rank1/rate/embedded
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.reporting import plots
from experiments.rank1.redraw import redraw


def draw(table: pd.DataFrame) -> dict[str, Figure]:
    """Return the figure: one panel a problem, steps and bounds against 1/ε."""
    shown = [own for key, own in table.groupby("key", sort=False) if key != "curve, scaled"]
    figure, axes = plots.figure(2, 3, panel_size=(3.5, 2.9))
    for ax, own in zip(axes.flat, shown, strict=False):
        _panel(ax, own)
    for ax in axes[:, 0]:
        ax.set_ylabel("steps")
    for ax in axes[-1]:
        ax.set_xlabel("‖∇f(x_0)‖ / ε")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return {"figure.png": figure}


def _panel(ax: Axes, own: pd.DataFrame) -> None:
    first = own[own.seed == own.seed.min()].sort_values("epsilon")
    ax.plot(1 / first.relative_epsilon, first.bound, color=plots.PALETTE[1], label="K(ε), log(‖∇f(x_0)‖/ε)")
    reached = own[own.steps.notna()]
    ax.plot(
        1 / reached.relative_epsilon,
        reached.steps,
        linestyle="none",
        marker="o",
        markersize=4,
        color=plots.PALETTE[0],
        label="steps taken (seeds)",
    )
    ax.axhline(
        own.steps_taken.max(), color="#555555", linestyle=":", linewidth=1, label="length of the longest run"
    )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_title(str(own.problem.iloc[0]))
    missing = own[own.steps.isna()]
    if len(missing):
        plots.annotate(ax, f"{len(missing)} of {len(own)} not reached", corner="lower right")


def main() -> None:
    """Redraw the figure of a result folder."""
    redraw(draw)


if __name__ == "__main__":
    main()
