"""Fig. 4, plot: traces of both sides of the condition against the batch size."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from curvlab.lab import Computed, plots
from experiments.lissa.fig4.slopes import slopes


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figure: one panel for each task."""
    table = computed["table"]
    fitted = slopes(table).set_index("task")
    measured = computed["constants"].set_index("task")
    tasks = list(dict.fromkeys(table.task))
    figure, axes = plots.figure(1, len(tasks), panel_size=(3.1, 3.6))
    for ax, task in zip(axes[0], tasks, strict=True):
        _panel(ax, table[table.task == task], measured.loc[task], fitted.loc[task])
    axes[0, 0].set_ylabel("trace / P")
    shown: dict[str, Artist] = {}
    for ax in axes[0]:
        shown |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(
        list(shown.values()), list(shown), loc="outside lower center", ncols=2, frameon=False, fontsize=8
    )
    return {"figure.png": figure}


def _panel(ax: Axes, own: pd.DataFrame, constants: pd.Series, fitted: pd.Series) -> None:
    ours = own[own.sampling == "examples"]
    sizes = ours.batch_size.to_numpy()
    for constant, style, label in (
        (1.0, ":", "right side, C = 1 (band: 95 %)"),
        (constants["assumed"], "--", "right side, C = 2 (the paper's)"),
        (constants["at_least"], "-", "right side, C of the worst direction tried"),
    ):
        right = constant * ours.right.to_numpy()
        color = plots.PALETTE[1] if style != "-" else plots.PALETTE[2]
        ax.plot(sizes, right, color=color, linestyle=style, linewidth=1.2, label=label)
        if style == ":":
            half = 1.96 * ours.right_stderr.to_numpy()
            ax.fill_between(sizes, np.maximum(right - half, right / 100), right + half, color=color, alpha=0.15)
    for sampling, marker, label in (
        ("examples", 0, "left side (95 %)"),
        ("single tokens", 3, "left side, independent tokens (95 %)"),
    ):
        part = own[own.sampling == sampling]
        color = plots.PALETTE[0] if marker == 0 else plots.PALETTE[3]
        markers = {"color": color, "marker": plots.MARKERS[marker]}
        plots.measured(ax, part.batch_size, part.left, part.left_stderr, **markers, label=label)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ticks = sizes if fitted.isna()["coherence"] else own.batch_size.to_numpy()[[-1, *range(len(sizes))]]
    ax.xaxis.set_major_locator(FixedLocator(list(ticks)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xticklabels([f"{tick:.0f}" for tick in ticks])
    ax.set_xlabel(f"batch size |B|, {own.unit.iloc[0]}")
    ax.set_title(
        f"{own.task.iloc[0]}\nslope {fitted['slope']:.2f} ± {fitted['slope_stderr']:.2f}\n"
        f"C: {fitted['constant']:.2g} in the trace, worst direction\n{_reach(constants)}",
        fontsize=9,
    )


def _reach(constants: pd.Series) -> str:
    low, high = constants["at_least"], constants["at_most"]
    return f"between {low:.2g} and {high:.2g}" if np.isfinite(high) else f"at least {low:.2g}"
