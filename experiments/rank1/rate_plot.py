"""Steps to ε, plot: drawn from the saved table alone.

python -m experiments.rank1.rate_plot results/rank1/rate/embedded
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from curvlab.reporting import plots
from experiments.rank1.redraw import redraw
from experiments.rank1.steps_plot import steps_panel


def draw(table: pd.DataFrame) -> dict[str, Figure]:
    """Return the figure: one panel a problem, steps and bounds against 1/ε."""
    shown = [own for key, own in table.groupby("key", sort=False) if key != "curve, scaled"]
    figure, axes = plots.figure(2, 4, panel_size=(3.2, 2.9))
    for ax, own in zip(axes.flat, shown, strict=False):
        steps_panel(ax, own)
        ax.set_title(str(own.problem.iloc[0]).replace(", n", "\nn"))
    for ax in axes[:, 1:].flat:
        ax.set_ylabel("")
    for ax in axes.flat[len(shown) :]:
        ax.set_axis_off()
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return {"figure.png": figure}


def main() -> None:
    """Redraw the figure of a result folder."""
    redraw(draw)


if __name__ == "__main__":
    main()
