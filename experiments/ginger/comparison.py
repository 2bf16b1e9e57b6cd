"""Racers compared seed by seed: runs of one seed share their start and their batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvlab.lab import Claim, ClaimResult, judge, out_of_reach, panels
from curvlab.lab.claims import withheld
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
    """Return the gate and the results; where the gate's value fails they are out of reach, with what they have.

    A gate without a value was not measured, and closes nothing.
    """
    if gate.value is None or gate.claim.criterion.holds([gate.value]):
        return [gate, *results]
    why = f"Training does not end in the paper's regime ({gate.claim.id}: {gate.value:.2g})."
    return [gate, *(withheld(result, why) for result in results)]


def draw_by_rank(ax: Axes, table: pd.DataFrame, value: str, *, styles: dict) -> None:
    """Draw means over seeds with 95 % t intervals over the rank, by label; what has no rank stands on the left."""
    ranked, others = table[table["rank"].notna()], table[table["rank"].isna()]
    ranks = sorted(ranked["rank"].unique())
    names = others.label.unique().tolist()
    left = {name: ranks[0] / 2 ** (0.8 * (len(names) - place)) for place, name in enumerate(names)}
    for label, own in others.groupby("label", sort=False):
        placed = own.assign(rank=left[str(label)])
        panels.lines(ax, placed, x="rank", y=value, label=str(label), bars=True, styles=styles, linestyle="none")
        panels.rule(ax, y=own[value].mean(), color=styles[label]["color"], linestyle=":")
    panels.lines(ax, ranked, x="rank", y=value, by="label", bars=True, styles=styles)
    ax.set_xscale("log", base=2)
    ax.set_xticks([*ranks, *left.values()], [*(f"{rank:g}" for rank in ranks), *("–" for _ in left)])
    ax.minorticks_off()


TUNED = "ginger_tuned"  # in place of the unclipped one, where tuning chose no clip
WORKING = {
    "momentum": "Momentum",
    "without_curvature": "Momentum, clipped",
    "ginger_unclipped": "Ginger, never clipped",
    TUNED: "Ginger, tuned: no clip",
    "ginger_published": "Ginger as published",
}


def draw_what_works(
    table: pd.DataFrame, clipped: pd.DataFrame, quantities: Mapping[str, str], *, by: str, rank: int
) -> Figure:
    """Draw what of Ginger works: momentum, its clip, its curvature, both; and the share of entries at the clip.

    Args:
        table: runs; without curvature and unclipped at one rank alone. Tuned ones stand where no unclipped one ran
            and tuning chose no clip.
        clipped: step and share of the racers that clip.
        quantities: columns with their labels, of which the difference to momentum is drawn, with 95 % t intervals.
        by: the column of rows of panels.
        rank: for the title.
    """
    has_no_clip = (table.racer == "ginger") & table["clip"].isna()
    has_none_else = table.groupby(by).racer.transform(lambda racers: "ginger_unclipped" not in set(racers))
    table = table.assign(racer=table.racer.mask(has_no_clip & has_none_else, TUNED))
    table = table[table.racer.isin(list(WORKING))]
    table = table[table.groupby(by).racer.transform("nunique") > 1]  # momentum alone takes nothing apart
    figure, rows = panels.rows(table, by=by, columns=len(quantities) + 1, panel_size=(3.6, 2.2))
    styles = panels.styles_of(WORKING.values())
    for axes, name, own in rows:
        for ax, (column, label) in zip(axes, quantities.items(), strict=False):
            points = []
            for racer, entry in WORKING.items():
                if not (own.racer == racer).any():
                    continue
                value, interval = stats.mean(of_racer(own, racer, column) - of_racer(own, "momentum", column))
                points.append({"name": entry, "value": value, "low": interval.low, "high": interval.high})
            panels.forest(ax, pd.DataFrame(points), name="name", value="value", low="low", high="high")
            panels.rule(ax, x=0)
            panels.frame(ax, x=label, title=f"{name}\n({panels.seeds([own.seed.nunique()])})", size=9)
        shares = clipped[clipped[by] == name].assign(label=lambda of: of.racer.map(WORKING))
        panels.lines(axes[-1], shares, x="step", y="share", by="label", styles=styles)
        axes[-1].set_ylim(0, 1.03)
        panels.frame(axes[-1], x="step", title=f"share of entries at the clip (τ = {rank})", log="x", size=9)
        axes[-1].legend(fontsize=7)
    figure.supxlabel("differences: mean over seeds, 95 % t interval", fontsize=8)
    return figure
