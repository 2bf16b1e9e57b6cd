"""Correlations with influence: bars for each response, and of the PBRF against LiSSA's scaling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from curvlab.lab import Computed, panels, plots
from experiments.pbrf.correlations import COEFFICIENTS, PBRF
from experiments.pbrf.gaps import LARGEST_RESIDUAL
from experiments.pbrf.minima import REACHED
from experiments.pbrf.responses import EXACT, OWN_LENGTH

LABELS = {
    "cold": "cold\nstart",
    "warm": "warm\nstart",
    "two_stage": "two\nstages",
    "slow_two_stage": "two, at\nlr / 10",
    PBRF: "PBRF",
    "linearised": "linear-\nised",
    "carried_on": "carried\non",
    "minimum": "at its\nminimum",
    "small_weight": "small\nweight",
    "linearised_minimum": "linearised\nminimum",
}
CURVATURES = {"gauss_newton": "Gauss-Newton", "hessian": "Hessian"}
WIDTH = 0.2
WAY = "over_test"


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figure: a row for each task and matrix, bars on the left, the scalings on the right.

    Filled bars are LiSSA at the best scaling of the paper's list, hatched ones the exact solve; t intervals over
    seeds (one seed: bootstrap over points). Small rings: over points instead of over test examples.
    """
    table = computed["table"]
    table = table if "estimate" in table else table.assign(estimate=EXACT)
    pairs = table[["task", "curvature"]].drop_duplicates().itertuples(index=False)
    shown = [(task, matrix, table.query("task == @task and curvature == @matrix")) for task, matrix in pairs]
    has_lissa = bool(table.estimate.str.startswith("LiSSA").any())
    width = max(1.4 + 0.62 * table.response.nunique(), 0.0 if has_lissa else 6.5)  # room for the legend
    ratios = {"width_ratios": [width, 3.4]} if has_lissa else {}
    size = ((width + 3.4 * has_lissa) / (1 + has_lissa), 2.6)
    figure, axes = plots.figure(len(shown), 1 + has_lissa, panel_size=size, **ratios)
    for row, (task, matrix, own) in zip(axes, shown, strict=True):
        residual = float(computed["networks"].query("task == @task")[f"{matrix} residual"].max(skipna=False))
        is_solved = residual <= LARGEST_RESIDUAL[matrix] or EXACT not in set(own.estimate)
        best = best_lissa(own)
        _bars(row[0], own, best, is_solved=is_solved)
        seeds = int(own.seeds.max())
        place = f"{task}, {seeds} seed{'s' * (seeds > 1)}, {CURVATURES[matrix]} matrix"
        solved = "" if is_solved else f"\nexact: not solved (residual {residual:.1g}), no estimate"
        row[0].set_title(f"{place}{solved}", fontsize=8)
        row[0].set_ylabel("correlation with influence", fontsize=8)
        if "minimum" in set(own.response):
            _count_minima(row[0], own, computed["points"])
        if has_lissa:
            _scalings(row[1], own)
    handles = _legend(table)
    if has_lissa:
        lines, names = axes[0, 1].get_legend_handles_labels()
        handles += list(dict(zip(names, lines, strict=True)).values())
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    return {"figure.png": figure}


def best_lissa(own: pd.DataFrame) -> str | None:
    """Return LiSSA at the scaling of the highest correlation with the PBRF, which the claims are judged by."""
    lissa = own[own.estimate.str.startswith("LiSSA") & (own.response == PBRF)]
    means = lissa.set_index("estimate")[f"pearson {WAY}"].dropna()
    return None if means.empty else str(means.idxmax())


def _bars(ax: Axes, own: pd.DataFrame, best: str | None, *, is_solved: bool) -> None:
    responses = own.response.unique().tolist()
    for index, coefficient in enumerate(COEFFICIENTS):
        color, column = plots.PALETTE[index], f"{coefficient} {WAY}"
        for second, estimate in enumerate((best, EXACT)):
            rows = own[own.estimate == estimate]
            x = np.array([responses.index(name) for name in rows.response]) + WIDTH * (2 * index + second - 1.5)
            face: dict[str, Any] = {"color": color}
            if second:
                face = {
                    "facecolor": "white",
                    "edgecolor": color,
                    "hatch": "////",
                    "alpha": 1.0 if is_solved else 0.25,
                }
            ax.bar(x, rows[column], 0.9 * WIDTH, linewidth=0.8, **face)
            ends = np.clip([rows[column] - rows[f"{column} low"], rows[f"{column} high"] - rows[column]], 0, None)
            ax.errorbar(x, rows[column], yerr=ends, fmt="none", ecolor="0.2", capsize=1.5, linewidth=0.8)
            ring: dict[str, Any] = {
                "s": 9,
                "facecolors": "white",
                "edgecolors": color,
                "linewidths": 0.7,
                "zorder": 3,
            }
            ax.scatter(x, rows[f"{coefficient} over_points"], **ring)
        # The paper does not say over what it correlates: its range spans both of ours.
        for place, name in enumerate(responses):
            row = own[own.response == name].iloc[0]
            low, high, printed = (_number(row, f"{coefficient} paper{end}") for end in (" low", " high", ""))
            left = place + WIDTH * (2 * index - 2)
            if np.isfinite(low):
                ax.fill_between([left, left + 2 * WIDTH], low, high, color=color, alpha=0.22, linewidth=0)
            ax.scatter(left + WIDTH, printed, marker="D", s=16, color=color, edgecolors="0.1", zorder=4)
    ax.axhline(0, color="0.6", linewidth=0.8)
    ax.set_xticks(range(len(responses)), [LABELS[name] for name in responses], fontsize=7.5)
    ax.set_ylim(-0.45, 1.1)


def _scalings(ax: Axes, own: pd.DataFrame) -> None:
    """Draw the correlation with the PBRF against σ, beside the exact solve and the filter of its own length."""
    with_pbrf = own[own.response == PBRF]
    lissa = with_pbrf[with_pbrf.estimate.str.startswith("LiSSA")]
    lissa = lissa.assign(scale=lissa.estimate.str.rpartition("= ")[2].astype(float))
    for index, coefficient in enumerate(COEFFICIENTS):
        column, color = f"{coefficient} {WAY}", plots.PALETTE[index]
        ends: dict[str, Any] = {"low": f"{column} low", "high": f"{column} high"}
        look: dict[str, Any] = {"color": color, "marker": plots.MARKERS[index]}
        label = f"LiSSA, {coefficient.capitalize()}"
        panels.lines(ax, lissa, x="scale", y=column, label=label, **ends, **look)
        for estimate, line in ((EXACT, ":"), (OWN_LENGTH, "--")):
            found = with_pbrf[with_pbrf.estimate == estimate][column]
            text = f"{'exact solve' if estimate == EXACT else 'the PBRF’s own length'}, {coefficient.capitalize()}"
            for value in found:
                panels.rule(ax, y=value, color=color, linestyle=line, label=text)
    ax.set_ylim(-0.1, 1.05)
    panels.frame(ax, x="scaling σ of LiSSA, depth 5,000", y="correlation with the PBRF", log="x", size=8)


def _count_minima(ax: Axes, own: pd.DataFrame, points: pd.DataFrame) -> None:
    """Write below the bars of the points at their minimum how many these are."""
    norms = points[points.task == own.task.iloc[0]]["carried_on gradient norm"]
    text = f"{int((norms <= REACHED).sum())} of\n{len(norms)}"
    place = own.response.unique().tolist().index("minimum")
    ax.text(place, -0.42, text, ha="center", va="bottom", fontsize=6.5)


def _legend(table: pd.DataFrame) -> list[Any]:
    """Return what is drawn, and nothing else."""
    grey: dict[str, Any] = {"color": "0.4", "linestyle": "none"}
    handles: list[Any] = [
        Patch(color=color, label=name.capitalize())
        for color, name in zip(plots.PALETTE, COEFFICIENTS, strict=False)
    ]
    if table.estimate.nunique() > 1:
        handles.append(Patch(color="0.4", label="LiSSA, best σ"))
        handles.append(Line2D([], [], color="0.4", linestyle=":", label="exact, no σ"))
    handles += [
        Patch(facecolor="white", edgecolor="0.4", hatch="////", label="exact"),
        Line2D([], [], marker="o", markersize=3, markerfacecolor="white", label="over points", **grey),
        Line2D([], [], marker="|", markersize=8, label="t 95 % over seeds (one: points)", **grey),
    ]
    if table["pearson paper low"].notna().any():
        handles.append(Patch(color="0.4", alpha=0.22, label="the paper's range"))
    if table["pearson paper"].notna().any():
        handles.append(Line2D([], [], marker="D", markersize=4, label="the paper's, these data", **grey))
    return handles


def _number(row: pd.Series, column: str) -> float:
    found: Any = row.get(column)
    return float(pd.to_numeric(found, errors="coerce"))
