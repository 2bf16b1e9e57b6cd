"""The Fisher preconditioner: bounds on ‖∇²f - F‖ and the steps that follow from them."""

from __future__ import annotations

import pandas as pd

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed
from experiments.rank1.verdicts import judge_extreme, judge_steps


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge all claims; each value is an extreme over settings, so it has no interval."""
    bounds, rates = computed["bounds"], computed["rates"]
    curved = bounds[bounds.smoothness > 0]
    squares, softmax = (curved[curved.kind == kind] for kind in ("least squares", "softmax"))
    return [
        _largest(
            claims.claim("lemma-squared"),
            curved,
            curved.squared / curved.lemma,
            "Under f -> c f the left side grows as c², the right side as c: no constant saves it. One parameter, "
            "φ = L x²/2, one example with residual r, x = 0: the left side is (L r)², the right side L |r|.",
        ),
        _largest(
            claims.claim("lemma-unsquared"),
            curved,
            curved.gap / curved.one_norm_bound,
            "It follows from the triangle inequality.",
        ),
        _largest(
            claims.claim("least-squares-sigma"),
            squares,
            squares.gap / squares.loss_bound,
            "It follows from Cauchy-Schwarz.",
        ),
        _largest(
            claims.claim("softmax-sigma-printed"),
            softmax,
            softmax.gap / softmax.loss_bound_without_L,
            "Outputs (L x²/2, 0) and the first label give f = log 2 and a gap of L/2 at x = 0: the bound fails "
            f"for L > 4 log 2 = 2.8. On networks the ratio is {_worst_network(softmax):.2g} at "
            "most.",
        ),
        _largest(
            claims.claim("softmax-sigma"),
            softmax,
            softmax.gap / softmax.loss_bound,
            "It follows from 1 - p <= -log p.",
        ),
        judge_steps(
            claims.claim("least-squares-steps"),
            rates[rates.kind == "least squares"],
            why="It contradicts the proof: a bug.",
        ),
        judge_steps(
            claims.claim("softmax-steps-printed"),
            rates[rates.method == "lemma as printed"],
            why="f = log(1 + exp(κ x²/2)), κ = 20, is convex and has L = κ. At its minimum F = 0 and α = 2 f = "
            "1.4, less than half the curvature κ/2: steps overshoot, and the method ends in a cycle around it.",
        ),
        judge_steps(
            claims.claim("softmax-steps"),
            rates[(rates.kind == "softmax") & (rates.method == "lemma")],
            why="It contradicts the proof: a bug.",
        ),
    ]


def _largest(claim: Claim, table: pd.DataFrame, ratios: pd.Series, why: str) -> ClaimResult:
    row = table.iloc[int(ratios.to_numpy().argmax())]
    where = f"{why} Largest: {row.model}, {row.state}, L = {row.smoothness:.3g}."
    return judge_extreme(claim, float(ratios.max()), f"largest of {len(table)} settings", why=where)


def _worst_network(softmax: pd.DataFrame) -> float:
    networks = softmax[softmax.state != "constructed"]
    return float((networks.gap / networks.loss_bound_without_L).max())
