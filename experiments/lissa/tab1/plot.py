"""Table 1, plot: trace, largest eigenvalue and batch size of each model above the paper's rows."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Computed, plots

OURS, OTHER, PAPER = plots.PALETTE[0], plots.PALETTE[1], "#777777"


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figure: trace, largest eigenvalue and batch size of each model, ours above the paper's rows."""
    table, paper = computed["table"], computed["paper"]
    names = [*table.task, *(f"{row} (paper)" for row in paper["row"])]
    places = np.arange(len(names))[::-1]
    ours, printed = places[: len(table)], places[len(table) :]
    figure, axes = plots.figure(1, 3, panel_size=(3.4, 0.32 * len(names) + 1.5), sharey=True)
    _trace(axes[0, 0], table, paper, ours, printed)
    _eigenvalue(axes[0, 1], table, paper, ours, printed)
    _batch(axes[0, 2], table, paper, ours, printed)
    axes[0, 0].set_yticks(places, names)
    for ax in axes[0]:
        ax.set_xscale("log")
        ax.axhline(printed[0] + 0.5, color="#999999", linewidth=0.8)
        ax.set_ylim(-0.6, len(names) - 0.4)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False, fontsize=8)
    return {"figure.png": figure}


def _points(
    ax: Axes,
    x: pd.Series,
    y: np.ndarray,
    *,
    color: str,
    label: str,
    marker: int = 0,
    error: pd.Series | None = None,
) -> None:
    ax.errorbar(
        x,
        y,
        xerr=None if error is None else 1.96 * error.fillna(0),
        color=color,
        marker=plots.MARKERS[marker],
        markersize=5,
        linestyle="none",
        label=label,
        alpha=0.9,
    )


def _trace(ax: Axes, table: pd.DataFrame, paper: pd.DataFrame, ours: np.ndarray, printed: np.ndarray) -> None:
    _points(
        ax,
        table.full_trace_per_parameter,
        ours + 0.13,
        color=OTHER,
        marker=1,
        error=table.full_trace_per_parameter_stderr,
        label="products with all the data",
    )
    _points(
        ax,
        table.trace_per_parameter,
        ours - 0.13,
        color=OURS,
        error=table.trace_per_parameter_stderr,
        label="forms by forward passes, 95 %",
    )
    _points(
        ax,
        paper.trace_per_parameter,
        printed,
        color=PAPER,
        error=paper.trace_per_parameter_stderr,
        label="printed, 95 %",
    )
    ax.set_xlabel("tr(G) / P")


def _eigenvalue(ax: Axes, table: pd.DataFrame, paper: pd.DataFrame, ours: np.ndarray, printed: np.ndarray) -> None:
    _points(ax, table.lambda_max, ours + 0.13, color=OTHER, marker=1, label="Lanczos")
    _points(
        ax,
        table.lambda_max_sketch,
        ours - 0.13,
        color=OURS,
        error=table.lambda_max_sketch_stderr,
        label="sketch, 95 %",
    )
    _points(ax, paper.lambda_max, printed, color=PAPER, label="printed (sketch)")
    ax.set_xlabel("λmax(G)")


def _batch(ax: Axes, table: pd.DataFrame, paper: pd.DataFrame, ours: np.ndarray, printed: np.ndarray) -> None:
    _points(ax, table.batch_size, ours - 0.13, color=OURS, label="2 tr / λmax (C = 2)")
    label = "twice C tr / λmax, C measured (at least 1)"
    _points(ax, table.batch_size_measured, ours + 0.13, color=OTHER, marker=1, label=label)
    known = np.isfinite(table.needed_at_most.to_numpy())
    ax.hlines(
        ours[known] + 0.3,
        table.needed_at_least[known],
        table.needed_at_most[known],
        color="#333333",
        linewidth=1.5,
        label="C tr / λmax lies here",
    )
    _points(ax, paper.batch_size_implied, printed - 0.13, color=OURS, label="_nolegend_")
    _points(ax, paper.batch_size, printed + 0.13, color=PAPER, label="printed")
    ax.set_xlabel("|B|, images or tokens")
