"""Residuals against products, and LiSSA's distance from the solution."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Computed, plots

TOP = 1e3  # errors above it are not drawn: where they start is marked


def draw(computed: Computed) -> dict[str, Figure]:
    """Return one column for each task: residuals by products above, LiSSA's errors by passes below."""
    table, steps = computed["table"], computed["lissa_steps"]
    tasks = table.task.unique().tolist()
    figure, axes = plots.figure(2, len(tasks), panel_size=(4.6, 2.8))
    for column, task in enumerate(tasks):
        own = table[table.task == task]
        kind = "fitted" if bool(own.fitted.iloc[0]) else "stopped early"
        axes[0, column].set_title(f"{task}, {kind}", fontsize=9)
        _products(axes[0, column], own)
        _errors(axes[1, column], steps[steps.task == task])
    axes[0, 0].set_ylabel("residual")
    axes[1, 0].set_ylabel("LiSSA: relative error")
    for row in axes:
        handles, labels = row[0].get_legend_handles_labels()
        row[-1].legend(handles, labels, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=7)
    return {"figure.png": figure}


def _products(ax: Axes, own: pd.DataFrame) -> None:
    """Draw a line for each preconditioner; those with rows are solid."""
    for index, (label, curve) in enumerate(own.groupby("preconditioner", sort=False)):
        if not curve.products.notna().any():
            continue
        ax.plot(
            curve.products,
            curve.target,
            color=plots.PALETTE[index % len(plots.PALETTE)],
            linestyle="-" if "rows" in str(label) else "--",
            marker="os^v"[index // len(plots.PALETTE) % 4],
            markersize=max(3.5, 7.5 - 0.5 * index),  # smaller on larger: equal curves are both seen
            label=str(label),
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("products a system, set-up included")


def _errors(ax: Axes, own: pd.DataFrame) -> None:
    for index, (label, curve) in enumerate(own.groupby("sampling", sort=False)):
        color, width = plots.PALETTE[index], 3.6 - 1.2 * index  # thinner on wider: equal curves are both seen
        shown = curve.error <= TOP
        ax.plot(curve.passes[shown], curve.error[shown], color=color, linewidth=max(width, 0.8), label=str(label))
        above = curve.passes[~shown]
        if len(above):
            ax.plot(above.iloc[:1], [TOP], "^", color=color, label=f"above {TOP:g} from here")
    ax.axhline(1, color="#555555", linestyle=":", linewidth=1)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("products with all data a system")
