"""Steps to ε and the bound K(ε), one panel for each objective."""

from __future__ import annotations

from matplotlib.figure import Figure

from curvlab.lab import Computed, plots
from experiments.rank1.steps_panel import steps_panel


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figure: one panel for each objective, steps and bounds against 1/ε."""
    shown = [own for key, own in computed["table"].groupby("key", sort=False) if key != "curve, scaled"]
    figure, axes = plots.figure(2, 4, panel_size=(3.2, 2.9))
    for ax, own in zip(axes.flat, shown, strict=False):
        steps_panel(ax, own)
        ax.set_title(str(own.objective.iloc[0]).replace(", n", "\nn"))
    for ax in axes[:, 1:].flat:
        ax.set_ylabel("")
    for ax in axes.flat[len(shown) :]:
        ax.set_axis_off()
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return {"figure.png": figure}
