"""Mushrooms: the only statement behind the slides' figures is that the method converges.

What else these runs show is in summary.csv: whether f ever rises, what gradient descent reaches in as many steps,
S against D, several directions.
"""

from __future__ import annotations

import numpy as np

from curvlab.reporting import ClaimResult, ClaimSheet, exact, t_interval
from curvlab.reporting import judge as verdict
from experiments.rank1.fig2.variants import REACHED, last_rows
from experiments.target import Computed


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge the claim, interval over seeds."""
    table, further = computed["table"], computed["further"].iloc[0]
    last = last_rows(table)
    lemma = last[
        (last.method == "uniform direction")
        & (last.rule == "given")
        & (last.num_directions == 1)
        & (last.delta_scale == 0)
        & (last.sigma_scale == 1)
        & last.symmetrize.eq(True)
        & last.safeguard.eq(False)
    ]
    first = float(table[table.step == 0].gradient_norm.iloc[0])
    sample = (lemma.gradient_norm / first).to_numpy(dtype=float)
    interval = exact(sample[0], kind="every seed alike") if np.ptp(sample) == 0 else t_interval(sample)
    found = (
        f"reaches {REACHED:g} after {further.steps} steps"
        if further.reached
        else f"is at {further.gradient_norm_ratio:.2g} after {further.steps} steps"
    )
    return [
        verdict(
            claims.claim("lemma-converges"),
            float(sample.mean()),
            interval,
            if_not_reproduced="σ grows as λ n, so the step is about a gradient step of length 1/(λ n): n times "
            f"too short. A longer run, one seed, {found}; the lemma allows K = {further.bound:.0f}.",
        )
    ]
