"""1-D function, claims: what the definition of D means for n = 1, and that the method converges.

What follows from α_k for its local rate is ours, and in summary.csv.
"""

from __future__ import annotations

import pandas as pd

from curvlab.reporting import Claim, ClaimResult, Criterion, exact, judge

SOURCE = "Semenov 2025, slides, 1D function"

EXACT = Claim(
    id="exact-estimate",
    statement="For n = 1 the uniform-direction estimate is the second derivative itself, for every draw.",
    source="Semenov 2025, slides, definition of D with n = 1",
    paper_value=None,
    measure="largest |D - f''| / f'' over all iterates, one draw each",
    criterion=Criterion(at_most=1e-12),
)
CONVERGES = Claim(
    id="converges",
    statement="The method with the lemma's α_k converges on a 1-D function with f'' > 0, from every start and δ.",
    source=SOURCE,
    paper_value="shown in a figure, no number",
    measure="largest last |f'| over starts and δ, relative to the first",
    criterion=Criterion(at_most=1e-6, direction_at_most=0.1),
)


def judge_claims(table: pd.DataFrame) -> list[ClaimResult]:
    """Judge all claims; everything is deterministic."""
    ours = table[table.delta.notna()]
    runs = [own for _, own in ours.groupby(["delta", "start"], sort=False)]
    ratio = max(own.gradient_norm.iloc[-1] / own.gradient_norm.iloc[0] for own in runs)
    return [
        _judge(EXACT, float(table.error_of_D.max()), "See the definition: n u u' H with u = ±1 is H."),
        _judge(CONVERGES, ratio, "The number of steps is too small for the largest δ: raise num_steps."),
    ]


def _judge(claim: Claim, value: float, why: str) -> ClaimResult:
    return judge(claim, value, exact(value), if_not_reproduced=why)
