"""Fig. 1, claims: what Sec. 4 of the paper says about it, and what its argument rests on."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, exact, out_of_reach, reporting
from experiments.lissa.fig1.runs_interval import Statistic, over_runs
from experiments.lissa.fig1.tables import CHOICES, coinciding, counted_pearson, median, point_means

FINE = ("agree", "both near zero")
ASSUMED, MEASURED, IMPORTANCE = CHOICES.values()
CELLS = {ASSUMED: "assumed", MEASURED: "measured"}  # in the ids of claims
REGIMES = ("early", "fitted")
NOT_SOLVED = "No exact solutions of this task, or of one point only: see the task that has them."
COINCIDE = (
    "C as measured is below 1, and is taken as 1: |B| is that of C = 2, and the runs are the same ones. Condition "
    "C.1 asks for no larger batch here, so that there is nothing else to measure ({networks})."
)


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every claim for every task and the 2 x 2; intervals are over runs and points of one network."""
    results, panels, summary = [], computed["table"], computed["summary"].set_index("task")
    seed, same = computed.config["seed"], coinciding(computed["summary"])
    epsilon = computed.config.get("pbrf", {}).get("epsilon", math.nan)
    larger = computed.get("larger_epsilon", pd.DataFrame(columns=["task"]))
    for task, of_task in panels.groupby("task", sort=False):
        generator, of = np.random.default_rng(seed), str(task)
        own, measured, importance = (of_task[of_task.constant == constant] for constant in CHOICES.values())
        apart = _why_apart(own, measured)
        results += [
            _median(claims.claim("agreement", of=of), own, "lissa_pbrf_pearson", generator, why=apart),
            _median(claims.claim("slope", of=of), own, "lissa_pbrf_slope", generator, why=apart),
            _convergence(claims.claim("recipe-converges", of=of), own, generator, why=apart),
            _median(
                claims.claim("measured-constant", of=of),
                measured,
                "lissa_cg_pearson",
                generator,
                why="C is measured in a few directions only, so it is a lower bound of the constant needed; what "
                "the last iterate keeps of sampling noise is off too.",
            )
            if of not in same
            else out_of_reach(claims.claim("measured-constant", of=of), COINCIDE.format(networks=of)),
            _cause(claims.claim("cause", of=of), own, generator, epsilon=epsilon),
            _cause_larger(claims.claim("cause-larger", of=of), larger[larger.task == task], seed),
            _importance(claims.claim("importance", of=of), importance, np.random.default_rng(seed)),
        ]
    for name in REGIMES:
        for constant in CELLS:
            cell = panels[(panels.task.map(summary.regime) == name) & (panels.constant == constant)]
            results.append(_cell(claims, cell, (name, constant), same, seed))
    assumed = panels[panels.constant == ASSUMED]
    both = panels[panels.constant.isin(CELLS)]
    return [
        *results,
        _self_check(claims.claim("self-check"), both),
        _three_cases(claims.claim("three-cases"), assumed),
        _overflow(claims.claim("overflow"), assumed),
        _pbrf_overflow(claims.claim("pbrf-overflow"), both),
    ]


def _median(
    claim: Claim, own: pd.DataFrame, column: str, generator: np.random.Generator, *, why: str
) -> ClaimResult:
    if len(point_means(own, column)) < 2:
        return out_of_reach(claim, NOT_SOLVED if own.empty or "overflow" not in why else f"Nothing finite. {why}")
    within = (-math.inf, math.inf) if column.endswith("slope") else (-1.0, 1.0)
    paired = column.startswith("lissa_pbrf")
    value, interval = over_runs(own, column, _middle, paired=paired, generator=generator, within=within)
    return reporting.judge(claim, value, interval, if_not_reproduced=f"{_by_seed(own, column, _middle)} {why}")


def _middle(values: np.ndarray) -> float:
    return float(np.median(values))


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values))


def _by_seed(own: pd.DataFrame, column: str, statistic: Statistic) -> str:
    found = own.groupby("seed")[column].apply(lambda values: statistic(values.dropna().to_numpy(dtype=float)))
    return f"By seed: {', '.join(f'{value:.3g}' for value in found)}."


def _importance(claim: Claim, own: pd.DataFrame, generator: np.random.Generator) -> ClaimResult:
    """Judge our own statement; an overflow counts as -1."""
    if own.empty:
        return out_of_reach(claim, "This run draws no examples by importance.")
    counted = counted_pearson(own, "lissa_pbrf")
    longer = float((~(own.lissa_length <= 1)).mean())
    medians = {
        "LiSSA with CG": point_means(own, "lissa_cg_pearson"),
        "PBRF by SGD with the exact PBRF": point_means(own, "pbrf_exact_pearson"),
    }
    found = ", ".join(f"{name} {median(found):.3f}" for name, found in medians.items() if len(found))
    why = f"Median Pearson: {found or 'no exact solutions'}. LiSSA is longer than any solution in {longer:.0%}."
    value, interval = over_runs(counted, "counted", _middle, paired=True, generator=generator)
    return reporting.judge(
        claim, value, interval, if_not_reproduced=f"{_by_seed(counted, 'counted', _middle)} {why}"
    )


def _convergence(claim: Claim, own: pd.DataFrame, generator: np.random.Generator, *, why: str) -> ClaimResult:
    """Judge by the error against CG; without one, a LiSSA longer than any solution has not converged."""
    error = own["lissa_cg_error"] if "lissa_cg_error" in own else pd.Series(math.nan, own.index)
    solved = error.notna() | (own.get("lissa_cg_case", pd.Series(index=own.index, dtype=object)) == "overflow")
    told = own.assign(converged=(error < 1).astype(float))
    if told[solved].position.nunique() > 1:
        told = told[solved]
    elif (own.lissa_length <= 1).any():
        return out_of_reach(claim, NOT_SOLVED)
    value, interval = over_runs(told, "converged", _mean, paired=False, generator=generator, within=(0.0, 1.0))
    return reporting.judge(
        claim,
        value,
        interval,
        if_not_reproduced=f"{_by_seed(told, 'converged', _mean)} The median error is {error.median():.3g} times "
        f"the scores, the median length {own.lissa_length.median():.3g} times ‖g‖ / damping, which no solution "
        f"exceeds. {why}",
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


def _cause(claim: Claim, own: pd.DataFrame, generator: np.random.Generator, *, epsilon: float) -> ClaimResult:
    """Judge the paper's explanation of its third case: do those runs of SGD leave the quadratic range, and when?

    LiSSA on the batches of an SGD run is that run's linearisation at θ*. Where SGD never parts from it, the two of
    the panel are apart because their batches differ; where it parts after LiSSA is longer than any solution, the
    linear iteration had diverged before, and took SGD out of the range. While SGD is no longer than a solution its
    weights are within ε‖g‖ / damping of θ*: at a tiny ε nothing but divergence leads out.
    """
    apart = own[~own.lissa_pbrf_case.isin(FINE)]
    if apart.empty:
        return out_of_reach(claim, "No panel of this task has both large and apart.")
    left = apart.parted_step > 0
    if not left.any():
        return out_of_reach(
            claim,
            f"At epsilon = {epsilon:g} retraining moves the weights by epsilon ‖g‖ / damping times "
            f"the length of LiSSA, here {apart.lissa_length.max():.3g} at most, too little to leave the quadratic "
            f"range: in none of {len(apart)} such panels does it part from LiSSA on its own batches, and the "
            "two sides differ by their batches.",
        )
    first = left & (apart.length_at_parting <= 1)
    steps = apart[left].parted_step
    why = (
        f"Of {len(apart)} such panels SGD leaves LiSSA on its batches in {int(left.sum())} (median step "
        f"{steps.median():.0f}), in {int((left & ~first).sum())} of them only when LiSSA is longer than any "
        "solution: there the linear iteration has diverged first, and SGD is taken out of the range. In "
        f"{int((~left).sum())} the two stay together to the end: it is the batches by which the panel's two sides "
        "differ."
    )
    value, interval = over_runs(
        apart.assign(first=first.astype(float)),
        "first",
        _mean,
        paired=True,
        generator=generator,
        within=(0.0, 1.0),
    )
    return reporting.judge(claim, value, interval, if_not_reproduced=why)


def _cause_larger(claim: Claim, own: pd.DataFrame, seed: int) -> ClaimResult:
    """Judge the same with the epsilon of the authors' code."""
    if own.empty:
        return out_of_reach(claim, "This run has no larger epsilon for this task.")
    return _cause(claim, own, np.random.default_rng(seed), epsilon=float(own.epsilon.iloc[0]))


def _cell(
    claims: ClaimSheet, cell: pd.DataFrame, place: tuple[str, str], same: list[str], seed: int
) -> ClaimResult:
    """Judge one cell of the 2 x 2 where it fares worst, by its network of the least median."""
    regime, constant = place
    claim = claims.claim("cell", of=f"{regime}-{CELLS[constant]}", regime=regime, constant=constant)
    if cell.empty:
        return out_of_reach(claim, f"This run has no network of this cell ({regime}, {constant}).")
    found = {str(task): counted_pearson(own, "lissa_pbrf") for task, own in cell.groupby("task", sort=False)}
    alike = [task for task in found if constant == MEASURED and task in same]
    if len(alike) == len(found):
        return out_of_reach(claim, COINCIDE.format(networks=", ".join(alike)))
    medians = {task: _middle(point_means(own, "counted")) for task, own in found.items() if task not in alike}
    worst = min(medians, key=medians.__getitem__)
    value, interval = over_runs(
        found[worst], "counted", _middle, paired=True, generator=np.random.default_rng(seed)
    )
    listed = ", ".join(f"{task} {number:.3f}" for task, number in medians.items())
    longer = float((~(cell.lissa_length <= 1)).mean())
    why = (
        f"By network: {listed}; judged on {worst}. {_by_seed(found[worst], 'counted', _middle)} LiSSA is longer "
        f"than any solution in {longer:.0%} of the runs of this cell."
    )
    return reporting.judge(claim, value, interval, if_not_reproduced=why)


def _self_check(claim: Claim, panels: pd.DataFrame) -> ClaimResult:
    """Judge what must agree to first order in epsilon: by the network and comparison of the least median."""
    compared = (
        ("same_batches", "same batches", panels[panels.lissa_length <= 1]),
        ("cg_exact", "exact solutions", panels),
    )
    found = {
        f"{task}, {label}": median(point_means(own, f"{name}_pearson"))
        for name, label, kept in compared
        for task, own in kept.groupby("task", sort=False)
        if len(point_means(own, f"{name}_pearson"))
    }
    if not found:
        return out_of_reach(
            claim, "In every run LiSSA is longer than any solution, and nothing is solved exactly."
        )
    worst = min(found, key=found.__getitem__)
    return reporting.judge(
        claim,
        found[worst],
        exact(found[worst], kind=f"least of {len(found)} medians: {worst}"),
        if_not_reproduced="Either epsilon is too large, or one of the solvers is wrong: see summary.csv.",
    )


def _three_cases(claim: Claim, panels: pd.DataFrame) -> ClaimResult:
    if "lissa_cg_case" not in panels or panels.lissa_cg_case.isna().all():
        return out_of_reach(claim, "What is near zero is told by exact solutions, of which this preset has none.")
    cases = ["agree", "both near zero", "apart"]
    counts = {
        str(task): {case: int((own.lissa_pbrf_case == case).sum()) for case in cases}
        for task, own in panels.groupby("task", sort=False)
    }
    found = {task: sum(number > 0 for number in own.values()) for task, own in counts.items()}
    most = max(found.values())
    listed = "; ".join(
        f"{task} " + ", ".join(f"{case} {number}" for case, number in own.items()) for task, own in counts.items()
    )
    kind = f"count, largest of {len(found)} networks"
    return reporting.judge(claim, float(most), exact(most, kind=kind), if_not_reproduced=f"Panels: {listed}.")


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
    if not (panels.pbrf_overflow | panels.lissa_overflow).any():
        return out_of_reach(claim, f"Nothing overflows in {len(panels)} runs of LiSSA and of SGD.")
    alone = panels.pbrf_overflow & ~panels.lissa_overflow
    count = int(alone.sum())
    by_task = ", ".join(f"{task} {number}" for task, number in alone.groupby(panels.task).sum().items() if number)
    why = (
        f"SGD overflows where LiSSA on the same batches is finite: {by_task}. Beyond the quadratic range the "
        "objective is steeper than its linearisation, so that SGD, in double precision, still overflows first."
    )
    return reporting.judge(claim, float(count), exact(count, kind="count"), if_not_reproduced=why)
