"""Fig. 1, claims: what Sec. 4 of the paper says about it, and what its argument rests on."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.reporting import (
    Claim,
    ClaimResult,
    Criterion,
    bootstrap_interval,
    judge,
    out_of_reach,
)
from curvlab.reporting import exact as exact_interval
from experiments.lissa.fig1_tables import point_means

SOURCE = "Klochkov & Liu 2024, Sec. 4, Fig. 1, 5, 6"


def judge_claims(panels: pd.DataFrame, lengths: dict[str, np.ndarray], *, seed: int) -> list[ClaimResult]:
    """Judge every claim for every task; intervals are bootstraps over the training points.

    Args:
        panels: as `panel_table` gives it.
        lengths: for each task (seeds, K), ‖x‖ damping / ‖g‖ of LiSSA's results.
        seed: of the bootstrap.
    """
    results = []
    for task, own in panels.groupby("task", sort=False):
        generator = np.random.default_rng(seed)
        results += [
            _median(
                _agreement_claim(str(task)),
                point_means(own, "lissa_pbrf_pearson"),
                generator,
                why=_why_apart(own),
            ),
            _median(_slope_claim(str(task)), point_means(own, "lissa_pbrf_slope"), generator, why=_why_apart(own)),
            _convergence(str(task), lengths[str(task)], own, generator),
            _median(
                _linearisation_claim(str(task)),
                point_means(own, "cg_exact_pearson"),
                generator,
                why="The residuals in summary.csv say whether both are solved; if they are, epsilon is too large.",
            ),
            _median(
                _measured_claim(str(task)),
                point_means(own, "auto_cg_pearson"),
                generator,
                why="C is measured in a few directions only, so it is a lower bound of the constant needed.",
            ),
            _cause(str(task), own, generator),
        ]
    results += [_three_cases(panels), _overflow(panels)]
    return results


def _agreement_claim(task: str) -> Claim:
    return Claim(
        id=f"agreement-{task}",
        statement=f"LiSSA with the recommended hyperparameters approximates the PBRF ({task}).",
        source=SOURCE,
        paper_value="the first of three cases: points concentrate along x = y",
        measure="Pearson correlation of LiSSA with the PBRF by SGD over the test points (mean over seeds), "
        "median over training points",
        criterion=Criterion(at_least=0.9, direction_at_least=0.5),
    )


def _slope_claim(task: str) -> Claim:
    return Claim(
        id=f"slope-{task}",
        statement=f"The scatter plots follow the line x = y, not only a line ({task}).",
        source=SOURCE,
        paper_value=1.0,
        measure="least-squares slope of the PBRF by SGD on LiSSA (mean over seeds), median over training points",
        criterion=Criterion(at_least=0.8, at_most=1.25, direction_at_least=0.5, direction_at_most=2.0),
    )


def _convergence(task: str, lengths: np.ndarray, own: pd.DataFrame, generator: np.random.Generator) -> ClaimResult:
    claim = Claim(
        id=f"recipe-converges-{task}",
        statement=f"With the recommended hyperparameters (C = 2) LiSSA converges ({task}).",
        source="Klochkov & Liu 2024, Corollary 1, Sec. 4",
        paper_value="converges as expected",
        measure="share of seeds with ‖x‖ not above ‖g‖ / damping, which bounds every solution; mean over points",
        criterion=Criterion(at_least=0.95, direction_at_least=0.5),
    )
    shares = (lengths <= 1).mean(axis=0)
    return judge(
        claim,
        float(shares.mean()),
        bootstrap_interval(shares, lambda values: float(np.mean(values)), generator=generator),
        if_not_reproduced=f"The median length is {np.median(lengths):.3g} times that bound. " + _why_apart(own),
    )


def _linearisation_claim(task: str) -> Claim:
    return Claim(
        id=f"first-order-{task}",
        statement=f"To first order in epsilon the PBRF is the Gauss-Newton influence function ({task}).",
        source="Klochkov & Liu 2024, Sec. 2, Eq. 5, after Bae et al. 2022",
        paper_value=None,
        measure="Pearson correlation of influence by CG (residual 1e-6) with the PBRF minimised from the trained "
        "parameters (gradient norm 1e-6, displacement at most 1e-6) over the test points, median over training "
        "points",
        criterion=Criterion(at_least=0.99, direction_at_least=0.9),
    )


def _measured_claim(task: str) -> Claim:
    return Claim(
        id=f"measured-constant-{task}",
        statement=f"LiSSA converges once the batch is large enough for condition C.1 to hold ({task}).",
        source="Klochkov & Liu 2024, Theorem 1, Corollary 1",
        paper_value=None,
        measure="Pearson correlation of LiSSA with C measured and not 2 (Lissa.auto: |B| = 2 C tr / lambda_max, "
        "last third averaged) with CG over the test points, median over training points",
        criterion=Criterion(at_least=0.9, direction_at_least=0.5),
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


def _median(claim: Claim, values: np.ndarray, generator: np.random.Generator, *, why: str) -> ClaimResult:
    if len(values) < 2:
        return out_of_reach(claim, "This preset solves no or one point of this task so.")
    interval = bootstrap_interval(values, lambda v: float(np.median(v)), generator=generator)
    return judge(claim, float(np.median(values)), interval, if_not_reproduced=why)


def _cause(task: str, own: pd.DataFrame, generator: np.random.Generator) -> ClaimResult:
    """Judge the paper's explanation of its third case by the exact solutions of the same panels."""
    claim = Claim(
        id=f"cause-{task}",
        statement="Where LiSSA and PBRF are both large and disagree, retraining has left the range of the "
        f"quadratic approximation ({task}).",
        source=SOURCE,
        paper_value="given as a possible reason",
        measure="in those panels, Pearson correlation of CG with the exact PBRF, median over "
        "training points; the reason holds where it is low",
        criterion=Criterion(at_most=0.9),
    )
    apart = own[own.lissa_pbrf_case == "apart"]
    if apart.empty:
        return out_of_reach(claim, "No panel of this task has both large and apart.")
    if "cg_exact_pearson" not in apart:
        return out_of_reach(claim, "No exact solutions of this task: see the task that has them.")
    chosen = own[own.position.isin(apart.position)]
    values = point_means(chosen, "cg_exact_pearson")
    return _median(
        claim,
        values,
        generator,
        why=f"In these {len(values)} panels influence and PBRF agree once both are solved exactly, so the step is "
        "not too large: the stochastic solvers are apart.",
    )


def _three_cases(panels: pd.DataFrame) -> ClaimResult:
    claim = Claim(
        id="three-cases",
        statement="Three cases occur: LiSSA and PBRF agree, both are near zero, both are large and apart.",
        source=SOURCE,
        paper_value=3,
        measure="number of the three cases among all panels and seeds (thresholds: curvlab.influence.agreement)",
        criterion=Criterion(at_least=3),
    )
    counts = panels.lissa_pbrf_case.value_counts()
    found = [case for case in ("agree", "both near zero", "apart") if counts.get(case, 0)]
    shares = ", ".join(f"{case} {counts[case] / len(panels):.0%}" for case in found)
    return judge(
        claim, float(len(found)), exact_interval(len(found), kind="count"), if_not_reproduced=f"Found: {shares}."
    )


def _overflow(panels: pd.DataFrame) -> ClaimResult:
    claim = Claim(
        id="overflow",
        statement="LiSSA overflows for one of 25 training images of ResNet-50, one with a large gradient.",
        source="Klochkov & Liu 2024, App. E, Fig. 6",
        paper_value=1,
        measure="training points whose LiSSA scores are not finite on ResNet-50",
        criterion=Criterion(at_least=1, at_most=1),
    )
    own = panels[panels.task.str.contains("resnet50")]
    if own.empty:
        return out_of_reach(
            claim,
            "This preset has no ResNet-50 on ImageNet. LiSSA is linear in the gradient, so its norm alone cannot "
            "make one point overflow; a batch too small for convergence can, see recipe-converges.",
        )
    count = int(own.groupby("position").lissa_pbrf_pearson.first().isna().sum())
    return judge(
        claim,
        float(count),
        exact_interval(count, kind="count"),
        if_not_reproduced="The paper's |B| = 5 is below 2 tr / lambda_max = 87 for this model.",
    )
