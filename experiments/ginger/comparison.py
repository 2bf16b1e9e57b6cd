"""Racers compared seed by seed: runs of one seed share their start and their batches."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from curvlab.lab import Claim, ClaimResult, judge, out_of_reach, panels
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
