"""Accuracy of Ginger over decay and rank, and over damping (Ginger 2024, Table 3).

make ginger-tab3 PRESET=smoke|embedded|laptop|paper ARGS="decays=[0.9,0.99] grid_ranks=[4]"

The paper varies decay and rank and finds Ginger not sensitive to them. It does not vary the damping, nor say what
it was. Its claims are judged on a grid of Ginger as published, with its code's damping and clip. Beside it stand
the grid with the learning rate and the damping that ginger-tab1 tunes, and dampings from 1e-5, the published
code's, to 1, each with a learning rate tuned as a racer's is, without clipping and with the published code's.

The grids are shown, and the spread of the published one is judged, by the best validation accuracy, as the paper
reports it; all else by the test accuracy of the epoch that validation prefers. Trainings are shared with
ginger-tab1 and ginger-tab4.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, Target, out_of_reach
from experiments.ginger.comparison import gated, judge_difference
from experiments.ginger.printed import sensitivity
from experiments.ginger.race import log_losses
from experiments.ginger.sensitivity import (  # noqa: F401  this target's
    GRID,
    PAPER,
    compute,
    draw_sensitivity,
    judge_dampings,
    judge_grid,
    judge_regime,
)

TARGET = Target(
    __name__, title="Accuracy of Ginger over decay, rank and damping", paper=PAPER, after=("ginger/tab1",)
)
ACCURACY = "test_accuracy"
DEFAULT_DECAY = 0.99


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge all claims on each task; intervals are over seeds."""
    results, config = [], computed.config
    table = computed["table"].assign(log=log_losses(computed["table"]))
    for task, own in table.groupby("task", sort=False):
        cells = "The cells' means over seeds lie from {low:.2f} % ({at_low}) to {high:.2f} % ({at_high})."
        gate = judge_regime(claims.claim("reaches-regime", of=str(task)), own)
        published, tuned = (claims.claim(name, of=str(task)) for name in ("published-insensitive", "insensitive"))
        above = claims.claim("published-above-default", of=str(task))
        results += gated(
            gate,
            [
                judge_grid(published, own, "published", "accuracy", cells, scale=100),
                _tuned(above, own, int(config["tuned_rank"])),
                judge_grid(tuned, own, "grid", ACCURACY, cells, scale=100),
            ],
        )
        results += [
            judge_dampings(
                claims.claim("damping-decides", of=str(task)),
                own,
                ACCURACY,
                "{value:.2f} % at {damping:g}",
                scale=100,
            ),
            _clipping(claims.claim("small-damping-needs-clipping", of=str(task)), own),
        ]
    return results


def _tuned(claim: Claim, table: pd.DataFrame, rank: int) -> ClaimResult:
    grid = table[table.sweep == "published"]
    cells = {place: own.set_index("seed") for place, own in grid.groupby(GRID)}
    if (DEFAULT_DECAY, rank) not in cells:
        return out_of_reach(claim, f"The grid lacks decay {DEFAULT_DECAY} with rank {rank}.")
    means = grid.groupby(GRID).accuracy.mean().drop((DEFAULT_DECAY, rank))
    if means.empty:
        return out_of_reach(claim, "The grid has no other cell.")
    best = means.index.tolist()[int(means.argmax())]
    why = f"Of the others validation prefers decay {best[0]:g} with rank {best[1]:.0f}."
    return judge_difference(claim, cells[best][ACCURACY], cells[DEFAULT_DECAY, rank][ACCURACY], why)


def _clipping(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    smallest = table[table.damping == table.damping.min()]
    plain, clipped = (smallest[smallest.sweep == sweep] for sweep in ("damping", "damping, clipped"))
    if plain.empty or clipped.empty:
        return out_of_reach(claim, "The smallest damping was not tried with and without clipping.")
    first, second = (own.groupby("seed")[ACCURACY].mean() for own in (clipped, plain))
    means = [100 * number for number in (first.mean(), second.mean(), plain[ACCURACY].max())]
    why = (
        f"At {smallest.damping.iloc[0]:g}: {means[0]:.2f} % with clipping, {means[1]:.2f} % without (at most "
        f"{means[2]:.2f} % in a seed), where {plain.diverged.sum()} of {len(plain)} seeds diverged."
    )
    return judge_difference(claim, first, second, why)


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figure."""
    table, printed = computed["table"], sensitivity("Table 3")
    return draw_sensitivity(
        table.assign(value=100 * table.accuracy, of_dampings=100 * table[ACCURACY]),
        printed.assign(value=100 * printed.accuracy),
        label="best validation accuracy (%)",
        label_of_dampings="test accuracy (%)",
        width=2,
    )
