"""Steps to ε, claims: the lemma's bound, its misprint, and f that is not convex, where it fails."""

from __future__ import annotations

import pandas as pd

from curvlab.reporting import Claim, ClaimResult, Criterion, exact, judge
from experiments.rank1.steps_claims import MEASURE, judge_steps

LEMMA = "Semenov 2025, slides, lemma on uniform directions, Eq. 3"

BOUND = Claim(
    id="steps-below-bound",
    statement="For convex f at most K(ε) steps are needed to ‖∇f‖ <= ε (Eq. 3 with log(‖∇f(x_0)‖/ε)).",
    source=LEMMA,
    paper_value="at most 1",
    measure=MEASURE,
    criterion=Criterion(at_most=1.0),
)
NONCONVEX = Claim(
    id="nonconvex-steps",
    statement="The same for f that is not convex.",
    source=LEMMA + ", with 'Note, that f(x) can be non-convex'",
    paper_value="at most 1",
    measure=MEASURE,
    criterion=Criterion(at_most=1.0),
)
PRINTED = Claim(
    id="printed-bound",
    statement="At most K(ε) steps are needed with Eq. 3 as printed, log(‖∇f(x_0)‖/2).",
    source=LEMMA,
    paper_value="at most 0",
    measure="largest difference of steps and K(ε) over convex problems, seeds and ε, the scaled problem included",
    criterion=Criterion(at_most=0.0),
)
INDEFINITE = Claim(
    id="estimate-indefinite",
    statement="D is not positive semi-definite along the path (a con that the slides state).",
    source="Semenov 2025, slides, Uniform Direction preconditioner, cons",
    paper_value="stated without a number",
    measure="share of steps with a negative eigenvalue of D, least over seeds of the convex problems with n > 1 "
    "whose Hessian is no multiple of the identity",
    criterion=Criterion(at_least=0.5),
)
CONVEX_KEYS = ("curve", "curve, scaled", "isotropic", "power", "logistic")


def judge_claims(table: pd.DataFrame, definiteness: pd.DataFrame) -> list[ClaimResult]:
    """Judge all claims; every value is an extreme over runs, so it has no interval."""
    convex = table[table.key.isin(CONVEX_KEYS)]
    skew = convex[convex.key.isin(["power", "logistic"])]
    share = float(skew.share_indefinite.min())
    return [
        judge_steps(
            BOUND,
            convex,
            name="problem",
            why="For convex f the proof goes through with 8/(1 - κ), κ <= 0.18, in place of 8, although S is not "
            "positive semi-definite (curvlab.optim.steps_bound).",
        ),
        judge_steps(
            NONCONVEX, table[~table.key.isin(CONVEX_KEYS)], name="problem", why=_why_nonconvex(definiteness)
        ),
        _printed(convex),
        judge(
            INDEFINITE,
            share,
            exact(share, kind=f"least of {skew.groupby(['key', 'seed']).ngroups} runs"),
            if_not_reproduced="It would contradict the algebra: S has the eigenvalue n/2 (uᵀHu - ‖Hu‖) < 0 for "
            "every u that is no eigenvector of H.",
        ),
    ]


def _printed(convex: pd.DataFrame) -> ClaimResult:
    reached = convex[convex.steps.notna()]
    excess = reached.steps - reached.printed_bound
    where = reached.iloc[int(excess.to_numpy().argmax())]
    return judge(
        PRINTED,
        float(excess.max()),
        exact(float(excess.max()), kind=f"largest of {len(reached)} runs"),
        if_not_reproduced=f"Counter-example: {where.problem} at ε = {where.epsilon:.3g} takes {where.steps:.0f} "
        f"steps and has K = {where.printed_bound:.0f}. Under f -> c f (ε, M, σ times c) no step changes, but the "
        "logarithm of a gradient norm falls without bound; it must be divided by ε.",
    )


def _why_nonconvex(definiteness: pd.DataFrame) -> str:
    worst = definiteness.loc[definiteness.share_not_definite == definiteness.share_not_definite.max()].iloc[0]
    return (
        "Counter-example with n = 1, so that D = f'' and σ = 0: f' = 2 and f'' = -2/3 at 3, M = 1, α = 1, and the "
        "method goes from 3 to -3 and back for ever, also from nearby. The proof needs D positive semi-definite. "
        f"For n > 1 even D + αI can be indefinite: in {worst.share_not_definite:.0%} of the draws at one point of "
        f"Σ (1 - cos x_i), n = {worst.n:.0f}, all x_i = 3, and {worst.share_uphill:.0%} of the steps go uphill "
        "(definiteness.csv)."
    )
