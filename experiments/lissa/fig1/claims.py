"""Fig. 1, claims: what Sec. 4 of the paper says about it, and what its argument rests on."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab import reporting
from curvlab.reporting import Claim, ClaimResult, ClaimSheet, bootstrap_interval, exact, out_of_reach
from experiments.lissa.fig1.tables import CHOICES, counted_point_means, median, point_means
from experiments.target import Computed

FINE = ("agree", "both near zero")
ASSUMED, MEASURED, IMPORTANCE = CHOICES.values()
CELLS = {ASSUMED: "assumed", MEASURED: "measured"}  # in the ids of claims
REGIMES = ("early", "fitted")
NOT_SOLVED = "No exact solutions of this task, or of one point only: see the task that has them."


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every claim for every task and the 2 x 2; intervals are bootstraps over the training points."""
    results, panels, summary = [], computed["table"], computed["summary"].set_index("task")
    seed = computed.config["seed"]
    for task, of_task in panels.groupby("task", sort=False):
        generator, of = np.random.default_rng(seed), str(task)
        own, measured, importance = (of_task[of_task.constant == constant] for constant in CHOICES.values())
        apart = _why_apart(own, measured)
        results += [
            _median(claims.claim("agreement", of=of), own, "lissa_pbrf_pearson", generator, why=apart),
            _median(claims.claim("slope", of=of), own, "lissa_pbrf_slope", generator, why=apart),
            _convergence(claims.claim("recipe-converges", of=of), own, generator, why=apart),
            _median(
                claims.claim("first-order", of=of),
                own,
                "cg_exact_pearson",
                generator,
                why="The residuals in summary.csv say whether both are solved; if they are, epsilon is too large.",
            ),
            _median(
                claims.claim("measured-constant", of=of),
                measured,
                "lissa_cg_pearson",
                generator,
                why="C is measured in a few directions only, so it is a lower bound of the constant needed; what "
                "the last iterate keeps of sampling noise is off too.",
            ),
            _cause(claims.claim("cause", of=of), own, generator),
            _importance(claims.claim("importance", of=of), importance, np.random.default_rng(seed)),
        ]
    for name in REGIMES:
        for constant in CELLS:
            cell = panels[(panels.task.map(summary.regime) == name) & (panels.constant == constant)]
            results += [
                _cell(claims, "cell", "lissa_pbrf", cell, (name, constant), seed),
                _cell(claims, "cell-same-batches", "same_batches", cell, (name, constant), seed),
            ]
    assumed = panels[panels.constant == ASSUMED]
    return [
        *results,
        _three_cases(claims.claim("three-cases"), assumed),
        _overflow(claims.claim("overflow"), assumed),
        _pbrf_overflow(claims.claim("pbrf-overflow"), panels[panels.constant != IMPORTANCE]),
    ]


def _median(
    claim: Claim, own: pd.DataFrame, column: str, generator: np.random.Generator, *, why: str
) -> ClaimResult:
    values = point_means(own, column)
    if len(values) < 2:
        return out_of_reach(claim, NOT_SOLVED if own.empty or "overflow" not in why else f"Nothing finite. {why}")
    interval = bootstrap_interval(values, lambda v: float(np.median(v)), generator=generator)
    return reporting.judge(claim, float(np.median(values)), interval, if_not_reproduced=why)


def _importance(claim: Claim, own: pd.DataFrame, generator: np.random.Generator) -> ClaimResult:
    """Judge our own statement; an overflow counts as -1."""
    if own.empty:
        return out_of_reach(claim, "This run draws no examples by importance.")
    values = counted_point_means(own, "lissa_pbrf")
    longer = float((~(own.lissa_length <= 1)).mean())
    medians = {
        "LiSSA with CG": point_means(own, "lissa_cg_pearson"),
        "PBRF by SGD with the exact PBRF": point_means(own, "pbrf_exact_pearson"),
    }
    found = ", ".join(f"{name} {median(found):.3f}" for name, found in medians.items() if len(found))
    why = f"Median Pearson: {found or 'no exact solutions'}. LiSSA is longer than any solution in {longer:.0%}."
    interval = bootstrap_interval(values, lambda v: float(np.median(v)), generator=generator)
    return reporting.judge(claim, median(values), interval, if_not_reproduced=why)


def _convergence(claim: Claim, own: pd.DataFrame, generator: np.random.Generator, *, why: str) -> ClaimResult:
    shares = (own.lissa_length <= 1).groupby(own.position).mean().to_numpy()
    return reporting.judge(
        claim,
        float(shares.mean()),
        bootstrap_interval(shares, lambda values: float(np.mean(values)), generator=generator),
        if_not_reproduced=f"The median length is {own.lissa_length.median():.3g} times that bound. {why}",
    )


def _why_apart(own: pd.DataFrame, measured: pd.DataFrame) -> str:
    """Say which of the methods is off with C = 2, by exact solutions where there are any, and what cures it."""
    found = {
        "LiSSA with SGD on the same batches": point_means(own, "same_batches_pearson"),
        "LiSSA with CG": point_means(own, "lissa_cg_pearson"),
        "PBRF by SGD with the exact PBRF": point_means(own, "pbrf_exact_pearson"),
        "CG with the exact PBRF": point_means(own, "cg_exact_pearson"),
        "with C measured, LiSSA with the PBRF by SGD": point_means(measured, "lissa_pbrf_pearson"),
        "with C measured, LiSSA with CG": point_means(measured, "lissa_cg_pearson"),
    }
    medians = ", ".join(f"{name} {median(values):.3f}" for name, values in found.items() if len(values))
    return f"Median Pearson: {medians or 'nothing finite'}. {_overflows(own)}"


def _overflows(own: pd.DataFrame) -> str:
    lissa, pbrf = int(own.lissa_overflow.sum()), int(own.pbrf_overflow.sum())
    return f"Of {len(own)} runs with C = 2 LiSSA overflows in {lissa}, SGD on the same batches in {pbrf}."


def _cause(claim: Claim, own: pd.DataFrame, generator: np.random.Generator) -> ClaimResult:
    """Judge the paper's explanation of its third case: do those runs of SGD leave the quadratic range, and when?

    LiSSA on the batches of an SGD run is that run's linearisation at θ*. Where SGD never parts from it, the two of
    the panel are apart because their batches differ; where it parts after LiSSA is longer than any solution, the
    linear iteration had diverged before, and took SGD out of the range.
    """
    apart = own[~own.lissa_pbrf_case.isin(FINE)]
    if apart.empty:
        return out_of_reach(claim, "No panel of this task has both large and apart.")
    left = apart.parted_step > 0
    first = left & (apart.length_at_parting <= 1)
    shares = first.groupby(apart.position).mean().to_numpy()
    steps = apart[left].parted_step
    where = f" (median step {steps.median():.0f} of the run)" if left.any() else ""
    why = (
        f"Of {len(apart)} such panels SGD leaves LiSSA on its own batches in {int(left.sum())}{where}, in "
        f"{int((left & ~first).sum())} of them only when that LiSSA is longer than any solution: there the linear "
        f"iteration has diverged first, and SGD is taken out of the range. In {int((~left).sum())} the two stay "
        "together to the end: it is the batches by which the panel's two sides differ."
    )
    return reporting.judge(
        claim,
        float(shares.mean()),
        bootstrap_interval(shares, lambda values: float(np.mean(values)), generator=generator),
        if_not_reproduced=why,
    )


def _cell(  # noqa: PLR0917
    claims: ClaimSheet, name: str, comparison: str, cell: pd.DataFrame, place: tuple[str, str], seed: int
) -> ClaimResult:
    """Judge one cell of the 2 x 2 where it fares worst, by its network of the least median."""
    regime, constant = place
    claim = claims.claim(name, of=f"{regime}-{CELLS[constant]}", regime=regime, constant=constant)
    found = {str(task): counted_point_means(own, comparison) for task, own in cell.groupby("task", sort=False)}
    if not found:
        return out_of_reach(claim, f"This run has no network of this cell ({regime}, {constant}).")
    worst = min(found, key=lambda task: median(found[task]))
    interval = bootstrap_interval(
        found[worst],
        lambda v: float(np.median(v)),
        generator=np.random.default_rng(seed),
        unit=f"points of {worst}",
    )
    medians = ", ".join(f"{task} {median(values):.3f}" for task, values in found.items())
    longer = float((~(cell.lissa_length <= 1)).mean())
    why = f"By network: {medians}. LiSSA is longer than any solution in {longer:.0%} of the runs of this cell."
    return reporting.judge(claim, median(found[worst]), interval, if_not_reproduced=why)


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
            f"make one point overflow; a batch too small for convergence can. All networks here: "
            f"{_overflows(panels)}",
        )
    count = int(own[own.seed == 0].lissa_overflow.sum())
    return reporting.judge(
        claim,
        float(count),
        exact(count, kind="count"),
        if_not_reproduced="The paper's |B| = 5 is below 2 tr / lambda_max = 87 for this model.",
    )


def _pbrf_overflow(claim: Claim, panels: pd.DataFrame) -> ClaimResult:
    alone = panels.pbrf_overflow & ~panels.lissa_overflow
    count = int(alone.sum())
    by_task = ", ".join(f"{task} {number}" for task, number in alone.groupby(panels.task).sum().items() if number)
    why = (
        f"SGD overflows where LiSSA on the same batches is finite: {by_task}. Beyond the quadratic range the "
        "objective is steeper than its linearisation, so that SGD, in double precision, still overflows first."
    )
    return reporting.judge(claim, float(count), exact(count, kind="count"), if_not_reproduced=why)
