"""Correlations with influence: the paper's table, all responses, and the PBRF against LiSSA's σ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Computed, panels, plots
from experiments.pbrf.correlations import PBRF
from experiments.pbrf.gaps import LARGEST_RESIDUAL
from experiments.pbrf.minima import REACHED
from experiments.pbrf.responses import EXACT, OWN_LENGTH

LABELS = {
    "cold": "cold start",
    "warm": "warm start",
    "two_stage": "two stages",
    "slow_two_stage": "two stages, rate / 10",
    PBRF: "PBRF",
    "linearised": "PBRF, linearised",
    "carried_on": "PBRF, carried on",
    "minimum": "PBRF at its minimum",
    "small_weight": "PBRF, small weight",
    "linearised_minimum": "linearised minimum",
}
CURVATURES = {"gauss_newton": "Gauss-Newton", "hessian": "Hessian"}
ENTRIES = {"LiSSA": "LiSSA, its best σ", OWN_LENGTH: "filter of the PBRF's length", EXACT: "exact solve"}
COEFFICIENTS = {
    "pearson over_test": "Pearson",
    "spearman over_test": "Spearman",
    "pearson over_points": "Pearson over points",
}
PAPERS = "pearson over_test"
MOST = 2  # tasks of the headline picture


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the paper's responses of two tasks, by the matrix that is judged; all of all; LiSSA's scalings."""
    table = _shown(computed)
    own = table[(table.curvature == table.curvature.iloc[0]) & table["pearson paper low"].notna()]
    tasks = own.task.unique()[:MOST].tolist()
    headline, (axes,) = plots.figure(1, len(tasks), panel_size=(3.8, 1.8 + 0.55 * own.response.nunique()))
    for ax, task in zip(axes, tasks, strict=True):
        _forest(ax, own[own.task == task], PAPERS)
        panels.frame(ax, x="Pearson correlation with influence", title=task)
    for ax in axes[1:]:
        ax.set_yticklabels([])
    note = "mean over the points left out, 95 % t interval over seeds (one seed: over points)"
    panels.legend(headline, title=note)
    more, rows = panels.rows(table, by="place", columns=len(COEFFICIENTS), panel_size=(2.9, 3.4))
    for axes, place, of_place in rows:
        for ax, (column, label) in zip(axes, COEFFICIENTS.items(), strict=True):
            _forest(ax, of_place, column)
            panels.frame(ax, x=label)
        for ax in axes[1:]:
            ax.set_yticklabels([])
        axes[0].set_title(place, loc="left")
    panels.legend(more, title=f"{note}; hollow: not solved")
    figures = {"figure.png": headline, "figure_all.png": more}
    if not table.estimate.str.startswith("LiSSA").any():
        return figures
    return figures | {"figure_scalings.png": _scalings(computed["table"])}


def _shown(computed: Computed) -> pd.DataFrame:
    """Return what is drawn, with `name` of the response, `entry` of the estimate, and whether it is `hollow`."""
    table = computed["table"]
    table = table if "estimate" in table else table.assign(estimate=EXACT)
    parts = []
    for (task, matrix), own in table.groupby(["task", "curvature"], sort=False):
        residual = float(computed["networks"].query("task == @task")[f"{matrix} residual"].max(skipna=False))
        chosen = own[own.estimate.isin([best_lissa(own), OWN_LENGTH, EXACT])]
        names = dict(LABELS)
        if "minimum" in set(own.response):
            points = computed["points"].query("task == @task")["carried_on gradient norm"]
            names["minimum"] += f"\n({int((points <= REACHED).sum())} of {len(points)} points)"
        entries = chosen.estimate.str.partition(",")[0].map(ENTRIES)
        hollow = (chosen.estimate == EXACT) & (residual > LARGEST_RESIDUAL[str(matrix)])
        place = f"{task}, {CURVATURES[str(matrix)]} matrix, {int(own.seeds.max())} seeds"
        parts.append(chosen.assign(name=chosen.response.map(names), entry=entries, hollow=hollow, place=place))
    return pd.concat(parts, ignore_index=True).sort_values("estimate", key=_in_order, kind="stable")


def _in_order(estimates: pd.Series) -> pd.Series:
    return estimates.str.partition(",")[0].map(list(ENTRIES).index)


def best_lissa(own: pd.DataFrame) -> str | None:
    """Return LiSSA at the scaling of the highest correlation with the PBRF, which the claims are judged by."""
    lissa = own[own.estimate.str.startswith("LiSSA") & (own.response == PBRF)]
    means = lissa.set_index("estimate")[PAPERS].dropna()
    return None if means.empty else str(means.idxmax())


def _forest(ax: Axes, own: pd.DataFrame, column: str) -> None:
    """Draw a row for each response, an estimate beside another; the paper's number, or its range, behind them."""
    own = own.sort_values("response", key=lambda names: names.map(list(LABELS).index), kind="stable")
    ends: dict[str, Any] = {"low": f"{column} low", "high": f"{column} high"}
    styles = panels.styles_of(ENTRIES.values())
    panels.forest(ax, own, name="name", value=column, by="entry", hollow="hollow", styles=styles, **ends)
    paper = f"{column.partition(' ')[0]} paper"
    printed = own.drop_duplicates("name")[[paper, f"{paper} low", f"{paper} high"]].apply(pd.to_numeric)
    for place, (number, low, high) in enumerate(printed.itertuples(index=False)):
        if np.isfinite(number):
            look: dict[str, Any] = {
                "marker": "D",
                "s": 50,
                "facecolors": "none",
                "edgecolors": "black",
                "zorder": 4,
            }
            ax.scatter(number, place, label="the paper's", **look)
        elif np.isfinite(low):
            ax.barh(place, high - low, 0.8, low, color="black", alpha=0.15, label="the paper's range")
    panels.rule(ax, x=0, linestyle="-")


def _scalings(table: pd.DataFrame) -> Figure:
    """Draw the correlation with the PBRF against σ, beside the exact solve and the filter of its own length."""
    own = table[table.response == PBRF]
    places = own[["task", "curvature"]].drop_duplicates().itertuples(index=False)
    shown = [
        (f"{task}, {CURVATURES[matrix]}", own[(own.task == task) & (own.curvature == matrix)])
        for task, matrix in places
    ]
    figure, axes = plots.figure(int(np.ceil(len(shown) / 2)), 2, panel_size=(3.8, 2.6))
    styles = panels.styles_of(ENTRIES.values())
    for ax, (place, rows) in zip(axes.flat, shown, strict=False):
        lissa = rows[rows.estimate.str.startswith("LiSSA")]
        lissa = lissa.assign(scale=lissa.estimate.str.rpartition("= ")[2].astype(float))
        ends: dict[str, Any] = {"low": f"{PAPERS} low", "high": f"{PAPERS} high"}
        panels.lines(ax, lissa, x="scale", y=PAPERS, label="LiSSA", **ends, **styles[ENTRIES["LiSSA"]])
        for estimate in (OWN_LENGTH, EXACT):
            for value in rows[rows.estimate == estimate][PAPERS]:
                color = styles[ENTRIES[estimate]]["color"]
                panels.rule(ax, y=value, color=color, linewidth=1.5, label=ENTRIES[estimate])
        for low, high in (
            rows[["pearson paper low", "pearson paper high"]].drop_duplicates().itertuples(index=False)
        ):
            ax.axhspan(low, high, color="black", alpha=0.1, label="the paper's range")
        ax.set_ylim(-0.1, 1.05)
        panels.frame(ax, x="scaling σ of LiSSA, depth 5,000", y="Pearson with the PBRF", title=place, log="x")
    for ax in axes.flat[len(shown) :]:
        ax.remove()
    panels.legend(figure)
    return figure
