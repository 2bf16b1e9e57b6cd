"""The Fisher preconditioner, claims: bounds on ‖∇²f - F‖ and the steps that follow from them."""

from __future__ import annotations

import pandas as pd

from curvlab.reporting import Claim, ClaimResult, Criterion, exact, judge
from experiments.rank1.steps_claims import MEASURE, judge_steps

FISHER = "Semenov 2025, slides, Fisher Information Matrix"
AT_MOST_ONE = Criterion(at_most=1 + 1e-9)

SQUARED = Claim(
    id="lemma-squared",
    statement="‖∇²f - F‖² <= L Σ_s ‖∇_φ log p(b_s)‖_1, with the norm squared as printed.",
    source=FISHER + ", lemma on ‖∇²f - F‖",
    paper_value="at most 1",
    measure="largest ratio of the sides in the slides' scale, all models, states and seeds; L where they stand",
    criterion=AT_MOST_ONE,
)
ONE_NORM = Claim(
    id="lemma-unsquared",
    statement="‖∇²f - F‖ <= L Σ_s ‖∇_φ log p(b_s)‖_1, without the square.",
    source=FISHER + ", lemma on ‖∇²f - F‖, corrected",
    paper_value="at most 1 (printed with a square)",
    measure="the same ratio without the square",
    criterion=AT_MOST_ONE,
)
LEAST_SQUARES = Claim(
    id="least-squares-sigma",
    statement="Least squares: ‖∇²f - F‖ <= L sqrt(2S f) for f = ½ Σ r².",
    source=FISHER + ", Least Squares",
    paper_value="at most 1",
    measure="largest ratio, least-squares models, states and seeds; L where they stand",
    criterion=AT_MOST_ONE,
)
SOFTMAX_PRINTED = Claim(
    id="softmax-sigma-printed",
    statement="Softmax: ‖∇²f - F‖ <= 2 f, as printed.",
    source=FISHER + ", softmax",
    paper_value="at most 1",
    measure="largest ratio, softmax models, states and seeds",
    criterion=AT_MOST_ONE,
)
SOFTMAX = Claim(
    id="softmax-sigma",
    statement="Softmax: ‖∇²f - F‖ <= 2 L f.",
    source=FISHER + ", softmax, with the L of the lemma before it",
    paper_value="at most 1 (printed without L)",
    measure="largest ratio, softmax models, states and seeds; L where they stand",
    criterion=AT_MOST_ONE,
)
LINEAR = Claim(
    id="linear-exact",
    statement="For outputs linear in the parameters (L = 0) F is the Hessian.",
    source=FISHER + ", lemma on ‖∇²f - F‖ with L = 0",
    paper_value=0.0,
    measure="largest ‖∇²f - F‖ over the linear models",
    criterion=Criterion(at_most=1e-12),
)
STEPS = MEASURE + "; R measured on the path"
LEAST_SQUARES_RATE = Claim(
    id="least-squares-steps",
    statement="Least squares: at most K(ε) steps are needed.",
    source=FISHER + ", lemma on Least Squares",
    paper_value="at most 1",
    measure=STEPS,
    criterion=Criterion(at_most=1.0),
)
SOFTMAX_RATE_PRINTED = Claim(
    id="softmax-steps-printed",
    statement="Softmax: at most K(ε) steps are needed, without L in α_k and K, as printed.",
    source=FISHER + ", lemma on Softmax",
    paper_value="at most 1",
    measure=STEPS,
    criterion=Criterion(at_most=1.0),
)
SOFTMAX_RATE = Claim(
    id="softmax-steps",
    statement="Softmax: at most K(ε) steps are needed, with L in α_k and in K.",
    source=FISHER + ", lemma on Softmax, with the L of the lemma on ‖∇²f - F‖",
    paper_value="at most 1 (printed without L)",
    measure=STEPS,
    criterion=Criterion(at_most=1.0),
)


def judge_claims(bounds: pd.DataFrame, rates: pd.DataFrame) -> list[ClaimResult]:
    """Judge all claims; each value is an extreme over settings, so it has no interval."""
    curved = bounds[bounds.smoothness > 0]
    squares, softmax = (curved[curved.kind == kind] for kind in ("least squares", "softmax"))
    linear = bounds[bounds.smoothness == 0]
    return [
        _largest(
            SQUARED,
            curved,
            curved.squared / curved.lemma,
            "Under f -> c f the left side grows as c², the right side as c: no constant saves it. One parameter, "
            "φ = L x²/2, one example with residual r, x = 0: the left side is (L r)², the right side L |r|.",
        ),
        _largest(ONE_NORM, curved, curved.gap / curved.one_norm_bound, "It follows from the triangle inequality."),
        _largest(LEAST_SQUARES, squares, squares.gap / squares.loss_bound, "It follows from Cauchy-Schwarz."),
        _largest(
            SOFTMAX_PRINTED,
            softmax,
            softmax.gap / softmax.loss_bound_without_L,
            "Outputs (L x²/2, 0) and the first label give f = log 2 and a gap of L/2 at x = 0: the bound fails "
            f"for L > 4 log 2 = 2.8. On networks the ratio is {_worst_network(softmax):.2g} at "
            "most.",
        ),
        _largest(SOFTMAX, softmax, softmax.gap / softmax.loss_bound, "It follows from 1 - p <= -log p."),
        _judge(LINEAR, float(linear.gap.max()), f"{len(linear)} models", "A bug: both are the same matrix."),
        judge_steps(
            LEAST_SQUARES_RATE,
            rates[rates.kind == "least squares"],
            name="task",
            why="It contradicts the proof: a bug.",
        ),
        judge_steps(
            SOFTMAX_RATE_PRINTED,
            rates[rates.method == "lemma as printed"],
            name="task",
            why="f = log(1 + exp(κ x²/2)), κ = 20, is convex and has L = κ. At its minimum F = 0 and α = 2 f = "
            "1.4, less than half the curvature κ/2: steps overshoot, and the method ends in a cycle around it.",
        ),
        judge_steps(
            SOFTMAX_RATE,
            rates[(rates.kind == "softmax") & (rates.method == "lemma")],
            name="task",
            why="It contradicts the proof: a bug.",
        ),
    ]


def _largest(claim: Claim, table: pd.DataFrame, ratios: pd.Series, why: str) -> ClaimResult:
    row = table.iloc[int(ratios.to_numpy().argmax())]
    where = f"{why} Largest: {row.model}, {row.state}, L = {row.smoothness:.3g}."
    return _judge(claim, float(ratios.max()), f"{len(table)} settings", where)


def _worst_network(softmax: pd.DataFrame) -> float:
    networks = softmax[softmax.state != "constructed"]
    return float((networks.gap / networks.loss_bound_without_L).max())


def _judge(claim: Claim, value: float, over: str, why: str) -> ClaimResult:
    return judge(claim, value, exact(value, kind=f"largest of {over}"), if_not_reproduced=why)
