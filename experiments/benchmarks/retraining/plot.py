"""Ratios with their intervals beside the aims, and where the time of a step goes."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Computed, plots
from experiments.benchmarks.retraining.compute import HALVES, LEFT_OUT

AIMS = {LEFT_OUT: 3.0, HALVES: 10.0}
LABELS = {
    LEFT_OUT: "one by one / together\n(right of the line: aim reached)",
    HALVES: "together / one single training\n(left of the line: aim reached)",
}
SHADES = {"float64": plots.PALETTE[0], "float32": plots.PALETTE[1]}


def draw(computed: Computed) -> dict[str, Figure]:
    """Return ratios of both comparisons, and milliseconds of a step."""
    table, floors = computed["table"], computed["floors"]
    tasks = table.task.unique().tolist()
    figure, axes = plots.figure(1, 3, panel_size=(3.9, 1.6 + 0.5 * len(tasks)))
    for ax, what in zip(axes[0, :2], AIMS, strict=True):
        _draw_ratios(ax, table[table.what == what], what, tasks)
    _draw_step(axes[0, 2], table[table.what == LEFT_OUT], floors, tasks)
    for ax in axes[0, 1:]:
        ax.set_yticklabels([])
    return {"figure.png": figure}


def _draw_ratios(ax: Axes, own: pd.DataFrame, what: str, tasks: list[str]) -> None:
    for shift, (dtype, rows) in zip((-0.12, 0.12), own.groupby("dtype", sort=False), strict=False):
        places = [tasks.index(task) + shift for task in rows.task]
        errors = np.abs(np.stack([rows.ratio - rows["ratio low"], rows["ratio high"] - rows.ratio]))
        errors = np.minimum(errors, 0.9 * rows.ratio.to_numpy())  # the axis is logarithmic
        ax.errorbar(
            rows.ratio, places, xerr=errors, fmt="o", ms=4, capsize=3, color=SHADES[str(dtype)], label=str(dtype)
        )
    ax.axvline(AIMS[what], color="black", linestyle="--", linewidth=1)
    ax.set_xscale("log")
    usual = (0.5, 20.0) if what == LEFT_OUT else (3.0, 150.0)
    ax.set_xlim(min(usual[0], 0.8 * own.ratio.min()), max(usual[1], 1.2 * own.ratio.max()))
    plots.readable_log(ax.xaxis)
    ax.set_yticks(range(len(tasks)), tasks)
    ax.set_ylim(len(tasks) - 0.5, -0.5)
    ax.set_xlabel(LABELS[what], fontsize=8)
    count = int(own.copies.max()) if len(own) else 0
    ax.set_title(f"{count} networks: {what} (95 %, repeats)", fontsize=9)
    ax.legend(fontsize=7, frameon=False, loc="upper right")


def _draw_step(ax: Axes, own: pd.DataFrame, floors: pd.DataFrame, tasks: list[str]) -> None:
    rows = own.merge(floors, on=["task", "dtype"])
    rows["floor"] = rows["batched_products ms"] + rows["update ms"]
    columns = {
        "ms one step one by one": "by itself",
        "ms one step together, each": "together, each",
        "floor": "batched products and update alone",
    }
    for dtype, shift in (("float64", -0.12), ("float32", 0.12)):
        some = rows[rows.dtype == dtype]
        places = [tasks.index(task) + shift for task in some.task]
        for marker, (column, label) in zip(plots.MARKERS, columns.items(), strict=False):
            ax.plot(
                some[column], places, marker=marker, linestyle="none", markersize=5, color=SHADES[dtype],
                fillstyle="none", label=label if dtype == "float64" else None,
            )  # fmt: skip
    ax.set_xscale("log")
    ax.set_ylim(len(tasks) - 0.5, -0.5)
    ax.set_yticks(range(len(tasks)), tasks)
    ax.set_xlabel("CPU milliseconds of one step of one network", fontsize=8)
    ax.set_title("where the time goes", fontsize=9)
    ax.legend(fontsize=7, frameon=False, loc="best")
