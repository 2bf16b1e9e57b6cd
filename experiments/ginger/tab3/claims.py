"""Table 3, claims: neither rank nor decay matters much, and what damping and clipping do."""

from __future__ import annotations

import pandas as pd

from curvlab.reporting import Claim, ClaimResult, ClaimSheet, out_of_reach, t_interval
from curvlab.reporting import judge as judge_claim
from experiments.ginger.race.paired import judge_difference
from experiments.ginger.race.sensitivity import named_cell, spread, without_diverged
from experiments.target import Computed

ACCURACY = "test_accuracy"
DEFAULT_DECAY = 0.99


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge all claims on each task; intervals are over seeds."""
    results = []
    for task, table in computed["table"].groupby("task", sort=False):
        grid = table[table.sweep == "grid"]
        results += [
            _insensitive(claims.claim("insensitive", of=str(task)), grid),
            _tuned(claims.claim("tuned-above-default", of=str(task)), grid, int(computed.config["tuned_rank"])),
            _damping(claims.claim("damping-decides", of=str(task)), table, grid),
            _clipping(claims.claim("small-damping-needs-clipping", of=str(task)), table),
        ]
    return results


def _insensitive(claim: Claim, grid: pd.DataFrame) -> ClaimResult:
    found = spread(grid, ACCURACY)
    means = grid.groupby(["decay", "rank"])[ACCURACY].mean()
    low, high = (named_cell(place) for place in (means.idxmin(), means.idxmax()))
    ends = [100 * means.min(), 100 * means.max()]
    why = f"The cells' means over seeds lie from {ends[0]:.2f} % ({low}) to {ends[1]:.2f} % ({high})."
    return judge_claim(claim, found.mean(), t_interval(found.to_numpy()), if_not_reproduced=why)


def _tuned(claim: Claim, grid: pd.DataFrame, rank: int) -> ClaimResult:
    cells = {place: own.set_index("seed") for place, own in grid.groupby(["decay", "rank"])}
    if (DEFAULT_DECAY, rank) not in cells:
        return out_of_reach(claim, f"The grid lacks decay {DEFAULT_DECAY} with rank {rank}.")
    means = grid.groupby(["decay", "rank"]).accuracy.mean()
    best = means.index.tolist()[int(means.argmax())]
    why = f"Validation prefers decay {best[0]:g} with rank {best[1]:.0f}."
    return judge_difference(claim, cells[best][ACCURACY], cells[DEFAULT_DECAY, rank][ACCURACY], why)


def _damping(claim: Claim, table: pd.DataFrame, grid: pd.DataFrame) -> ClaimResult:
    kept = without_diverged(table[table.sweep == "damping"])
    if kept.damping.nunique() < 2:
        return out_of_reach(claim, "Fewer than two dampings train without clipping in all seeds.")
    means = kept.groupby("damping")[ACCURACY].mean()
    by_damping = ", ".join(f"{100 * value:.2f} % at {damping:g}" for damping, value in means.items())
    grid_spread = 100 * spread(grid, ACCURACY).mean()
    why = f"Over dampings: {by_damping}; over rank and decay a run's accuracy varies by {grid_spread:.2f} points."
    return judge_difference(claim, spread(kept, ACCURACY), spread(grid, ACCURACY), why)


def _clipping(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    smallest = table[table.damping == table.damping.min()]
    plain, clipped = (smallest[smallest.sweep == sweep] for sweep in ("damping", "damping, clipped"))
    if plain.empty or clipped.empty:
        return out_of_reach(claim, "The smallest damping was not tried with and without clipping.")
    first, second = (own.groupby("seed")[ACCURACY].mean() for own in (clipped, plain))
    why = (
        f"At {smallest.damping.iloc[0]:g}: {100 * first.mean():.2f} % with clipping, {100 * second.mean():.2f} % "
        f"without, where {plain.diverged.sum()} of {len(plain)} seeds diverged."
    )
    return judge_difference(claim, first, second, why)
