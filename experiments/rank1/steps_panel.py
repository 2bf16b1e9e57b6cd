"""Steps to ε against the bound K(ε): the panel of the targets that measure rates."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from curvlab.lab import plots


def steps_panel(ax: Axes, rates: pd.DataFrame) -> None:
    """Draw K(ε) of the first seed, steps of all seeds, and how often ε was not reached; on log axes.

    Args:
        ax: labels its own axes; a legend of three entries is left to the caller.
        rates: rows of (seed, ε) with relative_epsilon, steps (nan: not reached), bound and steps_taken.
    """
    first = rates[rates.seed == rates.seed.min()].sort_values("relative_epsilon")
    ax.plot(1 / first.relative_epsilon, first.bound, color=plots.PALETTE[1], label="K(ε), first seed")
    reached = rates[rates.steps.notna()]
    ax.plot(
        1 / reached.relative_epsilon,
        reached.steps,
        linestyle="none",
        marker="o",
        markersize=4,
        color=plots.PALETTE[0],
        label="steps taken, all seeds",
    )
    longest = rates.steps_taken.max()
    ax.axhline(longest, color="#555555", linestyle=":", linewidth=1, label="length of the longest run")
    ax.set_xscale("log")
    ax.set_yscale("log")
    missing = len(rates) - len(reached)
    # Below the panel: in it, the note would cover the line of the longest run.
    ax.set_xlabel("‖∇f(x_0)‖ / ε" + (f"\n{missing} of {len(rates)} not reached" if missing else ""))
    ax.set_ylabel("steps")
