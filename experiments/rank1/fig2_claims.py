"""Mushrooms, claims: the only statement behind the slides' figures is that the method converges.

What else these runs show is in summary.csv: whether f ever rises, what gradient descent reaches in as many steps,
S against D, several directions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from curvlab.reporting import Claim, ClaimResult, Criterion, exact, judge, t_interval
from experiments.rank1.fig2_variants import last_rows

REACHED = 0.1  # of the first gradient norm: the method has converged for the claim's purpose
CONVERGES = Claim(
    id="lemma-converges",
    statement="With the lemma's α_k the method brings the gradient to zero on logistic regression.",
    source="Semenov 2025, slides, lemma on uniform directions ('for any ε') and figures on mushrooms",
    paper_value="shown in figures, no number in the text",
    measure="last over first gradient norm within the steps of this preset, mean over seeds",
    criterion=Criterion(at_most=REACHED, direction_at_most=1.0),
)


def judge_claims(table: pd.DataFrame, further: dict[str, Any]) -> list[ClaimResult]:
    """Judge the claim, interval over seeds.

    Args:
        table: the curves.
        further: steps, reached and bound of a longer run, see further.csv.
    """
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
        f"reaches {REACHED:g} after {further['steps']} steps"
        if further["reached"]
        else f"is at {further['gradient_norm_ratio']:.2g} after {further['steps']} steps"
    )
    return [
        judge(
            CONVERGES,
            float(sample.mean()),
            interval,
            if_not_reproduced="σ grows as λ n, so the step is about a gradient step of length 1/(λ n): n times "
            f"too short. A longer run, one seed, {found}; the lemma allows K = {further['bound']:.0f}.",
        )
    ]
