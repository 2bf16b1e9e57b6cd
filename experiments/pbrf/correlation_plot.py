"""Correlations as bars: a column for each task, a row for each curvature; over test examples and over points."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from curvlab.lab import Computed, plots
from experiments.pbrf.carried_on import REACHED
from experiments.pbrf.correlation_claims import MAX_RESIDUAL, largest_residual
from experiments.pbrf.correlations import COEFFICIENTS

LABELS = {
    "cold": "cold\nstart",
    "warm": "warm\nstart",
    "two_stage": "two\nstages",
    "proximal_bregman": "PBRF",
    "linearised": "linear-\nised",
    "carried_on": "carried\non",
    "minimum": "at its\nminimum",
    "small_weight": "small\nweight",
    "linearised_minimum": "linearised\nminimum",
}
CURVATURES = {"gauss_newton": "Gauss-Newton", "hessian": "Hessian"}
DRAWN = {"over_test": "over test examples", "over_points": "over points"}
WIDTH = 0.2
_BARS = "t 95 % over seeds (one seed: over points)"


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figure: bars, t intervals over seeds (one seed: bootstrap over points), the paper's range."""
    table = computed["table"]
    tasks, curvatures = table.task.unique().tolist(), table.curvature.unique().tolist()
    num_responses = table.response.nunique()
    figure, axes = plots.figure(len(tasks), len(curvatures), panel_size=(1.6 + 0.72 * num_responses, 2.6))
    for column, curvature in enumerate(curvatures):
        for row, task in enumerate(tasks):
            own = table[(table.task == task) & (table.curvature == curvature)]
            residual = largest_residual(computed, task, curvature)
            is_solved = residual <= MAX_RESIDUAL[curvature]
            _draw_panel(axes[row, column], own, faded=not is_solved)
            place = f"{task}, {_seeds_text(own)}\n{CURVATURES[curvature]} matrix"
            solved = "" if is_solved else f", not solved (residual {residual:.1g}): no estimate"
            axes[row, column].set_title(f"{place}{solved}", fontsize=7.5)
            if "minimum" in set(own.response):
                _count_minima(axes[row, column], own, computed["points"])
    for row_of_axes in axes:
        row_of_axes[0].set_ylabel("correlation with influence", fontsize=8)
    figure.legend(
        handles=_legend(table),
        loc="outside lower center",
        ncols=2,
        fontsize=7,
        frameon=False,
    )
    return {"figure.png": figure}


def _count_minima(ax: Axes, own: pd.DataFrame, points: pd.DataFrame) -> None:
    """Write below the bars of the points at their minimum how many these are."""
    task = own.task.iloc[0]
    norms = points[points.task == task]["carried_on gradient norm"]
    place = own.response.tolist().index("minimum")
    text = f"{int((norms <= REACHED).sum())} of\n{len(norms)}"
    ax.text(place, -1.0, text, ha="center", va="bottom", fontsize=6.5)


def _draw_panel(ax: Axes, own: pd.DataFrame, *, faded: bool) -> None:
    alpha = 0.25 if faded else None
    places = np.arange(len(own))
    for index, coefficient in enumerate(COEFFICIENTS):
        color = plots.PALETTE[index]
        for second, way in enumerate(DRAWN):
            x = places + WIDTH * (2 * index + second - 1.5)
            middle = own[f"{coefficient} {way}"].to_numpy()
            ends = [own[f"{coefficient} {way} {end}"].to_numpy() for end in ("low", "high")]
            face: dict[str, Any] = (
                {"facecolor": "white", "edgecolor": color, "hatch": "////"} if second else {"color": color}
            )
            ax.bar(x, middle, 0.9 * WIDTH, linewidth=0.8, alpha=alpha, **face)
            error = np.stack([middle - ends[0], ends[1] - middle]).clip(min=0)
            ax.errorbar(x, middle, yerr=error, fmt="none", ecolor="0.2", capsize=1.5, linewidth=0.8)
        # The paper does not say over what it correlates: its range spans both of ours.
        low, high = (_numbers(own, f"{coefficient} paper {end}") for end in ("low", "high"))
        left = places + WIDTH * (2 * index - 2)
        for start, bottom, top in zip(left, low, high, strict=True):
            if np.isfinite(bottom):
                ax.fill_between([start, start + 2 * WIDTH], bottom, top, color=color, alpha=0.22, linewidth=0)
        centre, printed = left + WIDTH, _numbers(own, f"{coefficient} paper")
        ax.scatter(centre, printed, marker="D", s=16, color=color, edgecolors="0.1", zorder=3)
    ax.axhline(0, color="0.6", linewidth=0.8)
    ax.set_xticks(places, [LABELS[name] for name in own.response], fontsize=7.5)
    ax.set_ylim(-1.05, 1.1)


def _legend(table: pd.DataFrame) -> list[object]:
    """Return what is drawn, and nothing else."""
    handles: list[object] = []
    for index, coefficient in enumerate(COEFFICIENTS):
        name, color = coefficient.capitalize(), plots.PALETTE[index]
        handles.append(Patch(color=color, label=f"{name}, {DRAWN['over_test']}"))
        handles.append(
            Patch(facecolor="white", edgecolor=color, hatch="////", label=f"{name}, {DRAWN['over_points']}")
        )
        if np.isfinite(_numbers(table, f"{coefficient} paper low")).any():
            handles.append(Patch(color=color, alpha=0.22, label=f"{name}, the paper's range over its data"))
    handles.append(Line2D([], [], color="0.2", marker="|", markersize=8, linestyle="none", label=_BARS))
    if any(np.isfinite(_numbers(table, f"{coefficient} paper")).any() for coefficient in COEFFICIENTS):
        handles.append(
            Line2D(
                [], [], color="0.5", marker="D", markersize=4, linestyle="none", label="the paper's, on these data"
            )
        )
    return handles


def _seeds_text(own: pd.DataFrame) -> str:
    count = int(own.seeds.max())
    return f"{count} seeds" if count > 1 else "1 seed"


def _numbers(own: pd.DataFrame, column: str) -> np.ndarray:
    """Return a column that may be missing or empty."""
    if column not in own:
        return np.full(len(own), np.nan)
    numbers: np.ndarray = pd.to_numeric(own[column], errors="coerce").to_numpy(dtype=float)
    return numbers
