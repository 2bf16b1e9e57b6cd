"""Correlation with the exact scores, time and memory."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from curvlab.lab import Computed, plots


def draw(computed: Computed) -> dict[str, Figure]:
    """Return one bar for each method: mean over queries, the worst query marked; time and memory beside it."""
    table = computed["table"]
    done = table[table.status == "done"].iloc[::-1].reset_index(drop=True)
    figure, axes = plots.figure(
        1, 3, panel_size=(2.9, 0.8 + 0.32 * len(done)), sharey=True, width_ratios=[1.5, 1.0, 1.0]
    )
    colors = [plots.PALETTE[0] if library == "curvlab" else "#999999" for library in done.library]
    columns = ("pearson_mean", "seconds", "peak_gib")
    labels = ("Pearson correlation with exact scores", "processor time (s)", "peak memory (GiB)")
    for ax, column, label in zip(axes[0], columns, labels, strict=True):
        ax.barh(done.index, done[column], color=colors, height=0.6)
        ax.set_xlabel(label)
        ax.grid(axis="y", visible=False)
    axes[0, 0].scatter(
        done.pearson_worst, done.index, marker="|", s=70, color="black", zorder=3, label="worst query"
    )
    axes[0, 0].set_yticks(done.index, done.method)
    axes[0, 0].axvline(0, color="black", linewidth=0.8)
    axes[0, 0].set_xlim(min(-0.3, float(done.pearson_worst.min()) - 0.05) if len(done) else -0.3, 1.05)
    axes[0, 1].set_xscale("log")
    axes[0, 1].xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axes[0, 1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes[0, 1].xaxis.set_minor_formatter(NullFormatter())
    figure.legend(loc="outside lower center", fontsize=8, frameon=False)
    return {"figure.png": figure}
