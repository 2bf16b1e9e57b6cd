"""Fig. 1, claims: what Sec. 4 of the paper says about it, and what its argument rests on."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab import reporting
from curvlab.reporting import Claim, ClaimResult, ClaimSheet, bootstrap_interval, exact, out_of_reach
from experiments.lissa.fig1.tables import point_means
from experiments.target import Computed

FINE = ("agree", "both near zero")


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every claim for every task; intervals are bootstraps over the training points."""
    results, panels = [], computed["table"]
    for task, own in panels.groupby("task", sort=False):
        generator, of = np.random.default_rng(computed.config["seed"]), str(task)
        results += [
            _median(
                claims.claim("agreement", of=of),
                point_means(own, "lissa_pbrf_pearson"),
                generator,
                why=_why_apart(own),
            ),
            _median(
                claims.claim("slope", of=of), point_means(own, "lissa_pbrf_slope"), generator, why=_why_apart(own)
            ),
            _convergence(claims.claim("recipe-converges", of=of), own, generator),
            _median(
                claims.claim("first-order", of=of),
                point_means(own, "cg_exact_pearson"),
                generator,
                why="The residuals in summary.csv say whether both are solved; if they are, epsilon is too large.",
            ),
            _median(
                claims.claim("measured-constant", of=of),
                point_means(own, "auto_cg_pearson"),
                generator,
                why="C is measured in a few directions only, so it is a lower bound of the constant needed.",
            ),
            _cause(claims.claim("cause", of=of), own, generator),
        ]
    return [
        *results,
        _three_cases(claims.claim("three-cases"), panels),
        _overflow(claims.claim("overflow"), panels),
    ]


def _median(claim: Claim, values: np.ndarray, generator: np.random.Generator, *, why: str) -> ClaimResult:
    if len(values) < 2:
        return out_of_reach(claim, "This preset solves no or one point of this task so.")
    interval = bootstrap_interval(values, lambda v: float(np.median(v)), generator=generator)
    return reporting.judge(claim, float(np.median(values)), interval, if_not_reproduced=why)


def _convergence(claim: Claim, own: pd.DataFrame, generator: np.random.Generator) -> ClaimResult:
    shares = (own.lissa_length <= 1).groupby(own.position).mean().to_numpy()
    return reporting.judge(
        claim,
        float(shares.mean()),
        bootstrap_interval(shares, lambda values: float(np.mean(values)), generator=generator),
        if_not_reproduced=f"The median length is {own.lissa_length.median():.3g} times that bound. "
        + _why_apart(own),
    )


def _why_apart(own: pd.DataFrame) -> str:
    lissa, pbrf, both = (point_means(own, f"{name}_pearson") for name in ("lissa_cg", "pbrf_exact", "cg_exact"))
    if len(lissa) and not len(both):
        return f"LiSSA correlates {np.median(lissa):.3f} with CG (median Pearson): the solver has not converged."
    if not len(both):
        return "Which of the two is off needs exact solutions: see the task that has them."
    measured = point_means(own, "auto_cg_pearson")
    cure = (
        f" With C measured instead of 2 LiSSA reaches {np.median(measured):.3f} with CG." if len(measured) else ""
    )
    return (
        f"Against exact solutions: LiSSA with CG {np.median(lissa):.3f}, PBRF by SGD with the exact PBRF "
        f"{np.median(pbrf):.3f}, CG with the exact PBRF {np.median(both):.3f} (median Pearson). The "
        f"exact answers agree; the two stochastic iterations are what is off: their batches are too small.{cure}"
    )


def _cause(claim: Claim, own: pd.DataFrame, generator: np.random.Generator) -> ClaimResult:
    """Judge the paper's explanation of its third case: is it retraining that is off in those panels?"""
    apart = own[own.lissa_pbrf_case == "apart"]
    if apart.empty:
        return out_of_reach(claim, "No panel of this task has both large and apart.")
    if "lissa_cg_case" not in apart or apart.lissa_cg_case.isna().all():
        return out_of_reach(claim, "No exact solutions of this task: see the task that has them.")
    solved = apart[apart.lissa_cg_case.notna() & apart.pbrf_exact_case.notna()]
    lissa_is_off, pbrf_is_off = (~solved[f"{name}_case"].isin(FINE) for name in ("lissa_cg", "pbrf_exact"))
    shares = (pbrf_is_off & ~lissa_is_off).groupby(solved.position).mean().to_numpy()
    why = (
        f"Of {len(solved)} such panels LiSSA is off in {int(lissa_is_off.sum())}, the PBRF by SGD in "
        f"{int(pbrf_is_off.sum())}, both in {int((lissa_is_off & pbrf_is_off).sum())}."
    )
    if lissa_is_off.any():
        why += " A linear iteration that is off has not left any quadratic range: its batches are too small."
    return reporting.judge(
        claim,
        float(shares.mean()),
        bootstrap_interval(shares, lambda values: float(np.mean(values)), generator=generator),
        if_not_reproduced=why,
    )


def _three_cases(claim: Claim, panels: pd.DataFrame) -> ClaimResult:
    if "lissa_cg_case" not in panels or panels.lissa_cg_case.isna().all():
        return out_of_reach(claim, "What is near zero is told by exact solutions, of which this preset has none.")
    counts = panels.lissa_pbrf_case.value_counts()
    found = [case for case in ("agree", "both near zero", "apart") if counts.get(case, 0)]
    shares = ", ".join(f"{case} {counts[case] / len(panels):.0%}" for case in found)
    return reporting.judge(
        claim, float(len(found)), exact(len(found), kind="count"), if_not_reproduced=f"Found: {shares}."
    )


def _overflow(claim: Claim, panels: pd.DataFrame) -> ClaimResult:
    own = panels[panels.task.str.contains("resnet50")]
    if own.empty:
        return out_of_reach(
            claim,
            "This preset has no ResNet-50 on ImageNet. LiSSA is linear in the gradient, so its norm alone cannot "
            "make one point overflow; a batch too small for convergence can, see recipe-converges.",
        )
    lengths = own.groupby("position").lissa_length.first()
    count = int((~np.isfinite(lengths)).sum())
    return reporting.judge(
        claim,
        float(count),
        exact(count, kind="count"),
        if_not_reproduced="The paper's |B| = 5 is below 2 tr / lambda_max = 87 for this model.",
    )
