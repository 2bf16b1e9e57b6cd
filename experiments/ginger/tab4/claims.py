"""Table 4, claims: what rank, decay and damping do to the smallest training loss."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.reporting import Claim, ClaimResult, ClaimSheet, exact, out_of_reach, t_interval
from curvlab.reporting import judge as judge_claim
from experiments.ginger.printed import sensitivity
from experiments.ginger.race.paired import judge_difference
from experiments.ginger.race.sensitivity import named_cell, spread, without_diverged
from experiments.target import Computed

LOSS = "log_loss"


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge all claims on each task, and the printed table; intervals are over seeds."""
    printed = np.log10(sensitivity("Table 4").min_train_loss)
    width = float(printed.max() - printed.min())
    results = [
        judge_claim(
            claims.claim("printed-insensitive"),
            width,
            exact(width, kind="printed"),
            if_not_reproduced=f"The printed losses differ by a factor of {10**width:.1f}.",
        )
    ]
    table = computed["table"]
    for task, own in table.assign(**{LOSS: np.log10(table.min_train_loss)}).groupby("task", sort=False):
        results += [
            _insensitive(claims.claim("insensitive-loss", of=str(task)), own[own.sweep == "grid"]),
            _damping(claims.claim("damping-decides-loss", of=str(task)), own),
        ]
    return results


def _insensitive(claim: Claim, grid: pd.DataFrame) -> ClaimResult:
    found = spread(grid, LOSS)
    means = grid.groupby(["decay", "rank"])[LOSS].mean()
    low, high = (named_cell(place) for place in (means.idxmin(), means.idxmax()))
    ends = [10 ** means.min(), 10 ** means.max()]
    why = f"Geometric means over seeds lie from {ends[0]:.2g} ({low}) to {ends[1]:.2g} nats ({high})."
    return judge_claim(claim, found.mean(), t_interval(found.to_numpy()), if_not_reproduced=why)


def _damping(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    kept, grid = without_diverged(table[table.sweep == "damping"]), table[table.sweep == "grid"]
    if kept.damping.nunique() < 2:
        return out_of_reach(claim, "Fewer than two dampings train without clipping in all seeds.")
    means = kept.groupby("damping")[LOSS].mean()
    why = ", ".join(f"{10**value:.2g} nats at damping {damping:g}" for damping, value in means.items())
    return judge_difference(claim, spread(kept, LOSS), spread(grid, LOSS), f"{why}.")
