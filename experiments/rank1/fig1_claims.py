"""1-D function, claims: what the definition of D and the α_k rule mean for n = 1."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
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
ORDER = Claim(
    id="local-order",
    statement="With δ = 0 the rule α_k = sqrt(M |f'| / 2) leaves superlinear convergence of order 3/2.",
    source="follows from Semenov 2025, lemma's α_k, for n = 1 (σ = 0)",
    paper_value=None,
    measure="slope of log |f'_{k+1}| against log |f'_k| over iterates with |f'| < 1e-2, least over starts",
    criterion=Criterion(at_least=1.4, at_most=1.6, direction_at_least=1.05),
)
LINEAR = Claim(
    id="delta-linear-rate",
    statement="A shift δ > 0 makes convergence linear with factor 2δ / (f''(x*) + 2δ): δ enters twice, through D "
    "and through σ.",
    source="follows from Semenov 2025, D = S + δI and σ of the lemma, for n = 1",
    paper_value=None,
    measure="largest relative deviation of the last contraction factor from that number, over starts and δ > 0",
    criterion=Criterion(at_most=0.05),
)


def judge_claims(table: pd.DataFrame) -> list[ClaimResult]:
    """Judge all claims; everything is deterministic."""
    ours = table[table.delta.notna()]
    runs = [own for _, own in ours.groupby(["delta", "start"], sort=False)]
    ratio = max(own.gradient_norm.iloc[-1] / own.gradient_norm.iloc[0] for own in runs)
    orders = [_order(own.gradient_norm.to_numpy()) for own in runs if own.delta.iloc[0] == 0]
    order = min(orders)
    deviation = max(_deviation(own) for own in runs if own.delta.iloc[0] > 0)
    return [
        _judge(EXACT, float(table.error_of_D.max()), "See the definition: n u u' H with u = ±1 is H."),
        _judge(CONVERGES, ratio, "The number of steps is too small for the largest δ: raise num_steps."),
        _judge(ORDER, order, "Too few iterates below 1e-2 to see the order."),
        _judge(LINEAR, deviation, "The last iterates are not yet in the linear regime: raise num_steps."),
    ]


def _judge(claim: Claim, value: float, why: str) -> ClaimResult:
    return judge(claim, value, exact(value), if_not_reproduced=why)


def _order(norms: np.ndarray) -> float:
    """Return the slope of log |f'_{k+1}| on log |f'_k|; nan with fewer than two pairs."""
    pairs = [(a, b) for a, b in pairwise(norms) if b > 1e-12 and a < 1e-2]
    if len(pairs) < 2:
        return float("nan")
    x, y = np.log(np.array(pairs)).T
    return float(np.polyfit(x, y, 1)[0])


def _deviation(own: pd.DataFrame) -> float:
    """Return how far the contraction factor, late but above rounding, is from 2δ / (1 + 2δ); f''(x*) = 1."""
    norms = own.gradient_norm[own.gradient_norm > 1e-10].to_numpy()
    delta = float(own.delta.iloc[0])
    expected = 2 * delta / (1 + 2 * delta)
    return float(abs(norms[-1] / norms[-2] / expected - 1))
