"""Steps to ε, claims: the lemma's bound, its misprint, and the condition that it does not state."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.reporting import Claim, ClaimResult, Criterion, exact, judge

LEMMA = "Semenov 2025, slides, lemma on uniform directions, Eq. 3"

BOUND = Claim(
    id="steps-below-bound",
    statement="At most K(ε) steps are needed to ‖∇f‖ <= ε (Eq. 3 with log(‖∇f(x_0)‖/ε)).",
    source=LEMMA,
    paper_value="at most 1",
    measure="largest ratio of steps to K(ε) over problems, seeds and ε; an ε that was not reached counts as the "
    "steps taken over K(ε) if that is below the steps taken, and is left out otherwise",
    criterion=Criterion(at_most=1.0),
)
PRINTED = Claim(
    id="printed-bound",
    statement="At most K(ε) steps are needed with Eq. 3 as printed, log(‖∇f(x_0)‖/2).",
    source=LEMMA,
    paper_value="at most 0",
    measure="largest difference of steps and K(ε) over problems, seeds and ε, the scaled problem included",
    criterion=Criterion(at_most=0.0),
)
SLOPE = Claim(
    id="growth-below-bound",
    statement="Steps grow no faster than ε^-3/2 where σ = 0 (n = 1), and no faster than ε^-2 otherwise.",
    source=LEMMA,
    paper_value="at most 0",
    measure="largest excess over that power of the slope of log steps on log 1/ε, over problems and seeds",
    criterion=Criterion(at_most=0.0),
)
SEMIDEFINITE = Claim(
    id="estimate-semidefinite",
    statement="D is positive semi-definite along the path, as the proof of the lemma needs.",
    source=LEMMA + " (a condition that the slides do not state)",
    paper_value=None,
    measure="share of steps with a negative eigenvalue of D, largest over the convex problems with n > 1 whose "
    "Hessian is no multiple of the identity",
    criterion=Criterion(at_most=0.0),
)
CONVEX = Claim(
    id="convex-definite",
    statement="For convex f, D + α_k I is positive definite in every step.",
    source="derived here: the smallest eigenvalue of S is at least -λn/8, and σ = λ sqrt(n(n-1)) is larger",
    paper_value=None,
    measure="share of steps in which it is not, largest over convex problems and seeds",
    criterion=Criterion(at_most=0.0),
)
NONCONVEX = Claim(
    id="nonconvex-definite",
    statement="The same for non-convex f, to which the lemma is said to apply.",
    source="Semenov 2025, slides, 'Note, that f(x) can be non-convex'",
    paper_value=None,
    measure="share of draws with D + αI not positive definite at one point of Σ (1 - cos x_i), largest over n",
    criterion=Criterion(at_most=0.0),
)
CONVEX_KEYS = ("curve", "curve, scaled", "isotropic", "power", "logistic")


def judge_claims(table: pd.DataFrame, definiteness: pd.DataFrame) -> list[ClaimResult]:
    """Judge all claims; every value is an extreme over runs, so it has no interval."""
    convex = table[table.key.isin(CONVEX_KEYS)]
    return [
        _bound(table),
        _printed(table),
        _judge(SLOPE, max(_excess(own) for _, own in table.groupby(["key", "seed"])), "See the figure.", "fits"),
        _judge(
            SEMIDEFINITE,
            float(convex[convex.key.isin(["power", "logistic"])].share_indefinite.max()),
            "S has the eigenvalue n/2 (uᵀHu - ‖Hu‖) < 0 for every u that is no eigenvector. For convex f it is at "
            "least -λn/8 and ‖S - H‖ <= σ for every draw, so that the proof goes through with 8/(1 - κ) in place "
            "of 8, κ <= 0.18 (curvlab.optim.steps_bound).",
            "steps",
        ),
        _judge(CONVEX, float(convex.share_singular.max()), "It contradicts the derivation: a bug.", "steps"),
        _nonconvex(definiteness),
    ]


def _bound(table: pd.DataFrame) -> ClaimResult:
    needed = table.steps.fillna(table.steps_taken)
    decided = table.steps.notna() | (table.bound <= table.steps_taken)
    ratios = (needed / table.bound)[decided]
    text = f"largest of {len(ratios)} runs, {int((~decided).sum())} undecided"
    where = table.loc[ratios.index].iloc[int(ratios.to_numpy().argmax())]
    return judge(
        BOUND,
        float(ratios.max()),
        exact(float(ratios.max()), kind=text),
        if_not_reproduced=f"Largest: {where.problem}, ε = {where.epsilon:.3g}. The proof needs D positive "
        "semi-definite, see estimate-semidefinite.",
    )


def _printed(table: pd.DataFrame) -> ClaimResult:
    reached = table[table.steps.notna()]
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


def _nonconvex(definiteness: pd.DataFrame) -> ClaimResult:
    worst = definiteness.loc[definiteness.share_not_definite == definiteness.share_not_definite.max()].iloc[0]
    return _judge(
        NONCONVEX,
        float(worst.share_not_definite),
        f"Counter-example: n = {worst.n:.0f}, all x_i = 3, H = -0.99 I: S = -0.99 n u uᵀ for every u, whose "
        f"eigenvalue outweighs σ = sqrt(n (n - 1)), so S + αI is indefinite; {worst.share_uphill:.0%} of the "
        "steps go uphill. Where uᵀHu varies the eigenvalue passes through zero, and steps are arbitrarily long. "
        "The lemma needs D + α_k I positive definite, for example by the safeguard of UniformDirection.",
        f"{worst.draws:.0f} draws",
    )


def _judge(claim: Claim, value: float, why: str, what: str) -> ClaimResult:
    return judge(claim, value, exact(value, kind=f"largest over {what}"), if_not_reproduced=why)


def _excess(own: pd.DataFrame) -> float:
    """Return the slope of log steps on log 1/ε less the bound's; -inf with fewer than three ε reached."""
    reached = own[own.steps.notna()]
    if len(reached) < 3:
        return -np.inf
    slope = np.polyfit(-np.log(reached.epsilon), np.log(reached.steps.astype(float)), 1)[0]
    return float(slope - (1.5 if own.n.iloc[0] == 1 else 2.0))
