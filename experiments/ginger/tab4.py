"""Training loss of Ginger over decay and rank, and over damping (Ginger 2024, Table 4).

make ginger-tab4 PRESET=smoke|embedded|laptop|paper ARGS="decays=[0.9,0.99] grid_ranks=[4]"

The trainings of ginger-tab3, of which this target reports the smallest loss of a training batch. The paper's text
says of both tables that Ginger is not sensitive to rank and decay; its printed losses, of single runs, differ by a
factor of nine, as single runs of ours do: printed and ours are judged alike, the noise of single runs taken off.
The paper's claims are judged on the grid of Ginger as published. A loss that reads 0 counts as the least that
float32 has (`log_losses`).
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from curvlab.lab import ClaimResult, ClaimSheet, Computed, Target, out_of_reach
from curvlab.lab import judge as verdict
from experiments.ginger.comparison import gated
from experiments.ginger.printed import sensitivity
from experiments.ginger.race import log_losses
from experiments.ginger.sensitivity import (  # noqa: F401  this target's
    GRID,
    PAPER,
    between_printed,
    compute,
    draw_sensitivity,
    judge_dampings,
    judge_grid,
    judge_regime,
)

TARGET = Target(
    __name__,
    title="Training loss of Ginger over decay, rank and damping",
    paper=PAPER,
    after=("ginger/tab1", "ginger/tab3"),
)


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge all claims on each task, and the printed table; intervals are over seeds."""
    table = computed["table"].assign(log=log_losses(computed["table"]))
    printed = np.log10(sensitivity("Table 4").min_train_loss)
    grid = table[(table.sweep == "published") & (table.task == table.task.iloc[0])]
    widths = grid.groupby("seed").log.agg(np.ptp)
    why = (
        f"The printed losses differ by a factor of {10 ** np.ptp(printed):.1f}, ours, within a seed, by "
        f"{10 ** widths.min():.1f} to {10 ** widths.max():.1f}."
    )
    claim, found = claims.claim("printed-insensitive"), between_printed(printed, grid, "log", GRID)
    left_out = claim.id in claims.left_out.get(str(computed.config.get("preset", "")), {})
    results = [out_of_reach(claim, why) if left_out else verdict(claim, *found, if_not_reproduced=why)]
    for task, own in table.groupby("task", sort=False):
        cells = "Means over seeds of log10 lie from {low:.2f} ({at_low}) to {high:.2f} ({at_high})."
        gate = judge_regime(claims.claim("reaches-regime", of=str(task)), own)
        sweeps = {"published-insensitive-loss": "published", "insensitive-loss": "grid"}
        published, tuned = (
            judge_grid(claims.claim(name, of=str(task)), own, sweep, "log", cells + _zeros(own, sweep))
            for name, sweep in sweeps.items()
        )
        results += [*gated(gate, [published]), tuned]
        results += [
            judge_dampings(
                claims.claim("damping-decides-loss", of=str(task)), own, "log", "{value:.2f} at {damping:g}"
            )
        ]
    return results


def _zeros(table: pd.DataFrame, sweep: str) -> str:
    """Say how many losses of a grid read 0, and at which decays: float32 cannot tell such cells apart."""
    own = table[table.sweep == sweep]
    zeros = own[own.min_train_loss == 0].groupby("decay").size()
    listed = ", ".join(f"{count} at decay {decay:g}" for decay, count in zeros.items())
    return f" Of {len(own)} losses {zeros.sum()} read 0 in float32: {listed}." if len(zeros) else ""


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the figure."""
    table, printed = computed["table"], sensitivity("Table 4")
    logarithms = log_losses(table)
    label = "log₁₀ of the smallest training loss (nats)"
    first = table[table.task == table.task.iloc[0]]
    return draw_sensitivity(
        table.assign(value=logarithms, of_dampings=logarithms),
        printed.assign(value=np.log10(printed.min_train_loss)),
        label=label,
        label_of_dampings=label,
        width=1.5,
        note=_zeros(first, "published"),
    )
