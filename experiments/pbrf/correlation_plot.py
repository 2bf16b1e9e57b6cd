"""Correlations with influence: the paper's table, all responses, and the PBRF against LiSSA's σ."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Computed, panels, plots
from curvlab.lab.names import reader_names
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
SCALED = {PBRF: "-", "slow_two_stage": "--", "two_stage": ":"}  # shown over σ, and by which line
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
    """Return the paper's responses of up to three tasks, by the matrix that is judged; and of all, over σ, too."""
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
    return {"figure.png": headline, "figure_more.png": _more(computed, table, f"{note}{stages or ''}")}


def _more(computed: Computed, table: pd.DataFrame, note: str) -> Figure:
    """Return all responses by each matrix; beside those of the paper's tasks Pearson over LiSSA's scaling, too."""
    height, width, note = 0.75 + 0.4 * table.response.nunique(), len(COEFFICIENTS), f"{note}; hollow: not solved"
    if is_papers := table["pearson paper"].notna().any():
        width += 1
        note += (
            "\nright: a band, and lines across (filter; exact if solved; dotted: the paper's), of the PBRF alone"
        )
        note += "; no point: LiSSA not finite"
    size = (8.7 / width, height)
    figure, rows = panels.rows(table, by="place", columns=width, panel_size=size, sharex="col")
    for axes, place, own in rows:
        is_last = axes is rows[-1][0]
        for ax, (column, label) in zip(axes, COEFFICIENTS.items(), strict=False):
            _forest(ax, own, column)
            panels.frame(ax, x=label if is_last else "")
        for ax in axes[1 : len(COEFFICIENTS)]:
            ax.set_yticklabels([])
        if is_papers:
            axes[-1].sharey(rows[0][0][-1])
            _scalings(axes[-1], computed["table"].merge(own[["task", "curvature"]].drop_duplicates()), own)
            panels.frame(axes[-1], x="LiSSA's σ" if is_last else "", y="Pearson", log="x")
        # In the middle: of a long title at the left constrained layout keeps the half free beside the first panel.
        panels.frame(axes[1], title=place, size=9)
    panels.legend(figure, title=note)
    return figure


def _scalings(ax: Axes, own: pd.DataFrame, shown: pd.DataFrame) -> None:
    """Draw LiSSA's correlations over σ; with the PBRF also the interval, other estimates and the paper's."""
    own = own[own.estimate.str.startswith("LiSSA")]
    own = own.assign(scaling=own.estimate.str.rpartition("= ")[2].astype(float))
    ends: dict[str, Any] = {"low": f"{PAPERS} low", "high": f"{PAPERS} high"}
    for response, line in SCALED.items():
        curve = own[own.response == response]
        if len(curve):
            label = f"LiSSA over σ: {LABELS[response]}"
            look: dict[str, Any] = {"linestyle": line, "marker": "." if response == PBRF else ""}
            panels.lines(
                ax, curve, x="scaling", y=PAPERS, label=label, **(ends if response == PBRF else {}), **look
            )
    styles, of_pbrf = panels.styles_of(ORDER), shown[(shown.response == PBRF) & ~shown.hollow]
    for row in of_pbrf[of_pbrf.entry.isin(ENTRIES.values())].to_dict("records"):
        panels.rule(ax, y=row[PAPERS], color=styles[row["entry"]]["color"], linestyle="-")
    for number in of_pbrf["pearson paper"].dropna().unique():
        panels.rule(ax, y=float(number), color="black", linestyle=":")


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
        name = textwrap.fill(reader_names([str(task)], whole=True)[str(task)], 32)
        place = f"{name}\n{CURVATURES[str(matrix)]} matrix, {panels.seeds([own.seeds.max()])}"
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
