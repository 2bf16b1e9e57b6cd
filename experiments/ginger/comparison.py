"""Racers compared seed by seed: runs of one seed share their start and their batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Claim, ClaimResult, judge, out_of_reach, panels
from curvlab.lab.reporting.claims import OUT_OF_REACH
from experiments.shared import stats


def of_racer(table: pd.DataFrame, racer: str, column: str, rank: float | None = None) -> pd.Series:
    """Return a racer's results by seed, of one rank or, with None, the mean over its ranks; empty without it."""
    own = table[table.racer == racer]
    own = own if rank is None else own[own["rank"] == rank]
    return own.groupby("seed")[column].mean()


def best_of(table: pd.DataFrame, racers: Iterable[str], *, chosen_by: str = "accuracy") -> tuple[str, int | None]:
    """Return the racer and rank with the best mean over seeds: of accuracy on validation, or of a loss."""
    own = table[table.racer.isin(list(racers))]
    means = own.groupby(["racer", "rank"], dropna=False)[chosen_by].mean()
    place = int(means.argmax() if chosen_by == "accuracy" else means.argmin())
    racer, rank = means.index.tolist()[place]
    return str(racer), None if np.isnan(rank) else int(rank)


def judge_difference(claim: Claim, first: pd.Series, second: pd.Series, why: str) -> ClaimResult:
    """Judge the mean over seeds of first - second, with its t interval."""
    difference = (first - second).dropna()
    if difference.empty:
        return out_of_reach(claim, "One of the two takes no part in this preset, or is not installed.")
    return judge(claim, *stats.mean(difference), if_not_reproduced=why)


def gated(gate: ClaimResult, results: Iterable[ClaimResult]) -> list[ClaimResult]:
    """Return the gate and the results; where the gate's value fails they are out of reach, with what they have."""
    if gate.value is not None and gate.claim.criterion.holds([gate.value]):
        return [gate, *results]
    why = f"Training does not reach the paper's regime ({gate.claim.id}: {gate.value:.2g})."
    return [gate] + [
        ClaimResult(own.claim, own.value, own.interval, OUT_OF_REACH, f"{why} {own.explanation}".strip())
        for own in results
    ]


def draw_by_rank(ax: Axes, table: pd.DataFrame, value: str, *, styles: dict, hollow: str | None = None) -> None:
    """Draw means over seeds with 95 % t intervals: lines over the rank, and levels of what has none, by label."""
    ranked = table[table["rank"].notna()]
    panels.lines(ax, ranked, x="rank", y=value, by="label", bars=True, seeds=True, styles=styles)
    for label, own in table[table["rank"].isna()].groupby("label", sort=False):
        look = {"color": styles[label]["color"], "linewidth": 1.2}
        panels.rule(ax, y=own[value].mean(), label=str(label), **look)
        _, interval = stats.mean(own[value])
        if np.isfinite(interval.low):
            ax.axhspan(interval.low, interval.high, color=look["color"], alpha=0.12, linewidth=0)
    ranks = sorted(ranked["rank"].unique())
    ax.set_xscale("log", base=2)
    ax.set_xticks(ranks, [f"{rank:g}" for rank in ranks])
    ax.minorticks_off()


WORKING = {
    "momentum": "Momentum",
    "without_curvature": "Momentum, clipped",
    "ginger_unclipped": "Ginger, never clipped",
    "ginger_published": "Ginger as published",
}


def draw_what_works(
    table: pd.DataFrame, clipped: pd.DataFrame, quantities: Mapping[str, str], *, by: str, rank: int
) -> Figure:
    """Draw what of Ginger works: momentum, its clip, its curvature, both; and the share of entries at the clip.

    Args:
        table: runs; without curvature and unclipped at one rank alone.
        clipped: step and share of the racers that clip.
        quantities: columns with their labels, of which the difference to momentum is drawn, with 95 % t intervals.
        by: the column of rows of panels.
        rank: for the title.
    """
    table = table[table.racer.isin(list(WORKING))]
    figure, rows = panels.rows(table, by=by, columns=len(quantities) + 1, panel_size=(3.6, 2.2))
    styles = panels.styles_of(WORKING.values())
    for axes, name, own in rows:
        for ax, (column, label) in zip(axes, quantities.items(), strict=False):
            points = []
            for racer, entry in WORKING.items():
                value, interval = stats.mean(of_racer(own, racer, column) - of_racer(own, "momentum", column))
                points.append({"name": entry, "value": value, "low": interval.low, "high": interval.high})
            panels.forest(ax, pd.DataFrame(points), name="name", value="value", low="low", high="high")
            panels.rule(ax, x=0)
            panels.frame(ax, x=label, title=str(name), size=9)
        shares = clipped[clipped[by] == name].assign(label=lambda of: of.racer.map(WORKING))
        panels.lines(axes[-1], shares, x="step", y="share", by="label", styles=styles)
        axes[-1].set_ylim(0, 1.03)
        panels.frame(axes[-1], x="step", title=f"share of entries at the clip (τ = {rank})", log="x", size=9)
        axes[-1].legend(fontsize=7)
    return figure
