"""Correlations with influence: the paper's table, all responses, and the PBRF against LiSSA's σ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Computed, panels, plots
from experiments.pbrf.correlations import PBRF, chosen_lissa
from experiments.pbrf.gaps import LARGEST_RESIDUAL
from experiments.pbrf.minima import REACHED
from experiments.pbrf.responses import EXACT, OWN_LENGTH

LABELS = {
    "cold": "cold start",
    "warm": "warm start",
    "two_stage": "two stages, base rate",
    "slow_two_stage": "two stages, PBRF's rate",
    PBRF: "PBRF",
    "linearised": "PBRF, linearised",
    "carried_on": "PBRF, carried on",
    "minimum": "PBRF at its minimum",
    "small_weight": "PBRF, small weight",
    "linearised_minimum": "linearised minimum",
}
CURVATURES = {"gauss_newton": "Gauss-Newton", "hessian": "Hessian"}
BEST, SMALLEST = "LiSSA, its best σ", "LiSSA, its smallest σ"
ENTRIES = {OWN_LENGTH: "filter of the PBRF's length", EXACT: "exact solve"}
ORDER = (BEST, SMALLEST, *ENTRIES.values())
COEFFICIENTS = {
    "pearson over_test": "Pearson",
    "spearman over_test": "Spearman",
    "pearson over_points": "Pearson over points",
}
PAPERS = "pearson over_test"
MOST = 3  # panels of the headline picture


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the paper's responses of up to three tasks, by the matrix that is judged; and all of all."""
    table = _shown(computed)
    own = table[(table.curvature == table.curvature.iloc[0]) & table["pearson paper low"].notna()]
    tasks = own.task.unique()[:MOST].tolist()
    headline, (axes,) = plots.figure(
        1, len(tasks), panel_size=(7.8 / len(tasks), 1.8 + 0.55 * own.response.nunique())
    )
    for ax, task in zip(axes, tasks, strict=True):
        _forest(ax, own[own.task == task], PAPERS)
        number = panels.seeds([own[own.task == task].seeds.max()])
        panels.frame(ax, x="correlation with influence", title=f"{task}\n{number}")
    for ax in axes[1:]:
        ax.set_yticklabels([])
    note = "mean over the points left out; bars: 95 % interval over seeds"
    stages = "two_stage" in set(own.response) and "\nthe paper has one row of two stages, of no stated rate"
    panels.legend(headline, title=f"Pearson, {note}{stages or ''}", columns=5)
    more, rows = panels.rows(table, by="place", columns=len(COEFFICIENTS), panel_size=(2.9, 3.4))
    for axes, place, of_place in rows:
        for ax, (column, label) in zip(axes, COEFFICIENTS.items(), strict=True):
            _forest(ax, of_place, column)
            panels.frame(ax, x=label)
        for ax in axes[1:]:
            ax.set_yticklabels([])
        # In the middle: of a long title at the left constrained layout keeps the half free beside the first panel.
        panels.frame(axes[len(axes) // 2], title=place, size=9)
    panels.legend(more, title=f"{note}; hollow: not solved")
    return {"figure.png": headline, "figure_more.png": more}


def _shown(computed: Computed) -> pd.DataFrame:
    """Return what is drawn, with `name` of the response, `entry` of the estimate, and whether it is `hollow`."""
    parts = []
    for (task, matrix), own in computed["table"].groupby(["task", "curvature"], sort=False):
        residual = float(computed["networks"].query("task == @task")[f"{matrix} residual"].max(skipna=False))
        means = own[own.response == PBRF].set_index("estimate")[PAPERS].to_dict()
        names = {chosen_lissa(means, smallest=True): SMALLEST, chosen_lissa(means): BEST} | ENTRIES  # may be one
        chosen = own[own.estimate.isin(names)].copy()
        if (slow := chosen.response == "slow_two_stage").any():  # the paper's row, at either learning rate
            printed = [str(column) for column in chosen if " paper" in str(column)]
            stages = chosen[chosen.response == "two_stage"].iloc[0]
            chosen.loc[slow, printed] = stages[printed].to_numpy()
        rows = dict(LABELS)
        if "minimum" in set(own.response):
            points = computed["points"].query("task == @task")["carried_on gradient norm"]
            rows["minimum"] += f"\n({int((points <= REACHED).sum())} of {len(points)} points)"
        entries = chosen.estimate.map(names)
        hollow = (chosen.estimate == EXACT) & (residual > LARGEST_RESIDUAL[str(matrix)])
        place = f"{task}\n{CURVATURES[str(matrix)]} matrix, {panels.seeds([own.seeds.max()])}"
        parts.append(chosen.assign(name=chosen.response.map(rows), entry=entries, hollow=hollow, place=place))
    shown = pd.concat(parts, ignore_index=True)
    return shown.sort_values("entry", key=lambda entries: entries.map(ORDER.index), kind="stable")


def _forest(ax: Axes, own: pd.DataFrame, column: str) -> None:
    """Draw a row for each response, an estimate beside another; the paper's number, or its range, behind them."""
    own = own.sort_values("response", key=lambda names: names.map(list(LABELS).index), kind="stable")
    ends: dict[str, Any] = {"low": f"{column} low", "high": f"{column} high"}
    styles = panels.styles_of(ORDER)
    panels.forest(ax, own, name="name", value=column, by="entry", hollow="hollow", styles=styles, **ends)
    paper = f"{column.partition(' ')[0]} paper"
    printed = own.drop_duplicates("name")[[paper, f"{paper} low", f"{paper} high"]].apply(pd.to_numeric)
    for place, (number, low, high) in enumerate(printed.itertuples(index=False)):
        if np.isfinite(number):
            hollow: dict[str, Any] = {"facecolors": "none", "edgecolors": "black"}
            ax.scatter(number, place, 50, marker="D", zorder=4, label="the paper's", **hollow)
        elif np.isfinite(low):
            ax.barh(place, high - low, 0.8, low, color="black", alpha=0.15, label="the paper's range")
    panels.rule(ax, x=0, linestyle="-")
