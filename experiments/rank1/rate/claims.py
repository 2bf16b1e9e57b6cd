"""Steps to ε: the lemma's bound, its misprint, and f that is not convex, where it fails."""

from __future__ import annotations

import pandas as pd

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed
from experiments.rank1.verdicts import judge_extreme, judge_steps

CONVEX_KEYS = ("curve", "curve, scaled", "isotropic", "power", "logistic")


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge all claims; every value is an extreme over runs, so it has no interval."""
    table = computed["table"]
    is_convex = table.key.isin(CONVEX_KEYS)
    convex = table[is_convex]
    skew = convex[convex.key.isin(["power", "logistic"])]
    return [
        judge_steps(
            claims.claim("steps-below-bound"),
            convex,
            why="For convex f the proof goes through with 8/(1 - κ), κ <= 0.18, in place of 8, although S is not "
            "positive semi-definite (curvlab.optim.steps_bound).",
        ),
        judge_steps(
            claims.claim("nonconvex-steps"), table[~is_convex], why=_why_nonconvex(computed["definiteness"])
        ),
        _printed(claims.claim("printed-bound"), convex),
        judge_extreme(
            claims.claim("estimate-indefinite"),
            float(skew.share_indefinite.min()),
            f"least of {skew.groupby(['key', 'seed']).ngroups} runs",
            why="It would contradict the algebra: S has the eigenvalue n/2 (uᵀHu - ‖Hu‖) < 0 for every u that is "
            "no eigenvector of H.",
        ),
    ]


def _printed(claim: Claim, convex: pd.DataFrame) -> ClaimResult:
    reached = convex[convex.steps.notna()]
    excess = reached.steps - reached.printed_bound
    worst = reached.iloc[int(excess.to_numpy().argmax())]
    return judge_extreme(
        claim,
        float(excess.max()),
        f"largest of {len(reached)} runs",
        why=f"Counter-example: {worst.objective} at ε = {worst.epsilon:.3g} takes {worst.steps:.0f} steps and has "
        f"K = {worst.printed_bound:.0f}. Under f -> c f (ε, M, σ times c) no step changes, but the logarithm of a "
        "gradient norm falls without bound; it must be divided by ε.",
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
