"""Fig. 2, claims: what Sec. 4 of the paper says about batch sizes, and what its recipe rests on."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.lab import (
    Claim,
    ClaimResult,
    ClaimSheet,
    Computed,
    Interval,
    bootstrap_interval,
    out_of_reach,
    reporting,
    t_interval,
)

NOT_HERE = "No task of this run has this panel."
REACHED = 0.95  # of its own plateau, the mean over the later half of the steps: there a curve has converged
PANELS = ("converges", *(f"{name}-{size}" for name in ("faster", "closer") for size in ("recommended", "double")))
ERROR = 0.2  # relative error that counts as an answer
OVERFLOW = -1.0  # what an overflow counts in place of a correlation: the least that one can be
# Each of them over the correlation with the exact solution, and between steps: with the own last one.
COLUMNS = {"": "pearson", "steps-": "pearson_last"}


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every claim for every task: intervals of batch sizes are over seeds, whose points share batches."""
    results, seed = [], computed.config["seed"]
    table, recipes = computed["table"], computed["recipes"]
    counted = table.assign(**{column: _counted(table[column]) for column in COLUMNS.values()})
    for task, own in counted.groupby("task", sort=False):
        of = str(task)
        double, recommended, _ = sorted(own.batch_size.unique(), reverse=True)
        for prefix, column in COLUMNS.items():
            results.append(_converges(claims.claim(f"{prefix}converges", of=of), own, recommended, column))
            for name, size in (("recommended", recommended), ("double", double)):
                results += [
                    _faster(claims.claim(f"{prefix}faster-{name}", of=of, size=name), own, size, column),
                    _closer(claims.claim(f"{prefix}closer-{name}", of=of, size=name), own, size, column),
                ]
    for task, own in recipes.groupby("task", sort=False):
        claim = claims.claim("recipe-converges", of=str(task))
        results.append(_recipe(claim, own, np.random.default_rng(seed)))
        claim = claims.claim("importance-converges", of=str(task))
        results.append(_importance(claim, own, np.random.default_rng(seed)))
    if table.empty:
        for prefix in COLUMNS:
            for name in PANELS:
                size = name.rpartition("-")[2]
                claim = claims.claim(f"{prefix}{name}", of="batch-sizes", size=size)
                results.append(out_of_reach(claim, NOT_HERE))
    if recipes.empty:
        for name in ("recipe-converges", "importance-converges"):
            results.append(out_of_reach(claims.claim(name, of="recipes"), NOT_HERE))
    return results


def _counted(pearson: pd.Series) -> pd.Series:
    return pearson.fillna(OVERFLOW)


def _converges(claim: Claim, own: pd.DataFrame, size: int, column: str) -> ClaimResult:
    last = own.step.max()
    # With its own last step every run correlates by 1: the later half without it says how far it has settled.
    late = own[own.step == last] if column == "pearson" else _late(own)
    by_seed = late.groupby(["batch_size", "seed"])[column].mean()
    small = by_seed[own.batch_size.min()].mean()
    return _over_seeds(
        claim,
        by_seed[size].to_numpy(),
        f"Sampling noise of the last iterates remains, or C = 2 is too small here (a tenth of the batch reaches "
        f"{small:.2f}): the panel on recipes has C measured. {_overflows(own)}",
    )


def _late(own: pd.DataFrame) -> pd.DataFrame:
    last = own.step.max()
    return own[(own.step >= last / 2) & (own.step < last)]


def _plateaus(own: pd.DataFrame, column: str) -> pd.Series:
    """Return the mean over points and the later half of the steps, by batch size and seed."""
    return _late(own).groupby(["batch_size", "seed"])[column].mean()


def _steps(own: pd.DataFrame, column: str) -> pd.Series:
    """Return the first recorded step with REACHED of the own plateau, by batch size and seed; else the last."""
    curves = own.groupby(["batch_size", "seed", "step"])[column].mean()
    found = {}
    for place, plateau in _plateaus(own, column).items():
        curve = curves.loc[place]  # type: ignore[call-overload]  # a pair
        reached = curve.index[(curve >= REACHED * plateau) & (plateau > 0)]
        found[place] = float(reached[0] if len(reached) else curve.index[-1])
    return pd.Series(found)


def _faster(claim: Claim, own: pd.DataFrame, size: int, column: str) -> ClaimResult:
    """Judge how many times as many steps the small batches take, by seed; the interval is of the logarithm."""
    steps, small = _steps(own, column), own.batch_size.min()
    logs = np.log(steps[small].to_numpy() / steps[size].to_numpy())
    found = t_interval(logs)
    interval = Interval(float(np.exp(found.low)), float(np.exp(found.high)), found.kind, found.num_samples)
    listed = {n: ", ".join(f"{step:.0f}" for step in steps[n]) for n in (size, small)}
    why = (
        f"Steps by seed: {listed[size]} with |B| = {size}, {listed[small]} with |B| = {small}; recorded are "
        f"{', '.join(str(step) for step in sorted(own.step.unique())[:8])}, ... {_data(own)}{_overflows(own)}"
    )
    return reporting.judge(claim, float(np.exp(logs.mean())), interval, if_not_reproduced=why)


def _closer(claim: Claim, own: pd.DataFrame, size: int, column: str) -> ClaimResult:
    plateaus, small = _plateaus(own, column), own.batch_size.min()
    one_run = ""
    if column == "pearson":
        one = _counted(_late(own)[_late(own).batch_size == small].pearson_one_run).mean()
        one_run = f" ({one:.3f} in one such run: the averaging makes up for most of the difference)"
    return _over_seeds(
        claim,
        (plateaus[size] - plateaus[small]).to_numpy(),
        f"The plateau is {plateaus[size].mean():.3f} with |B| = {size} and {plateaus[small].mean():.3f} with "
        f"|B| = {small} averaged{one_run}. {_data(own)}{_overflows(own)}",
    )


def _data(own: pd.DataFrame) -> str:
    """Say how much data a step of each takes; batch sizes that ten does not divide do not come out alike."""
    sizes = own.groupby("batch_size").num_runs.first()
    listed = ", ".join(f"{size} x {runs}" if runs > 1 else f"{size}" for size, runs in sizes.items())
    return f"Examples in a step: {listed}. "


def _overflows(own: pd.DataFrame) -> str:
    last = own[own.step == own.step.max()]
    counts = ", ".join(
        f"{int(group.overflow.sum())} with |B| = {size}" for size, group in last.groupby("batch_size")
    )
    return f"Not finite at the end, of {last.seed.nunique() * last.point.nunique()} runs each: {counts}."


def _recipe(claim: Claim, own: pd.DataFrame, generator: np.random.Generator) -> ClaimResult:
    answers = own[own.step == -1]
    paper, auto = answers[answers.recipe == "paper"], answers[answers.recipe == "auto"]
    first, other = paper.iloc[0], auto.iloc[0]
    iterates = own[(own.recipe == "auto") & (own.step > 0) & (own.step <= first.num_steps)]
    alike = iterates[iterates.step == iterates.step.max()]
    return _mean(
        claim,
        ((paper.error < 1) & (paper.diverged_at == 0)).to_numpy(dtype=float),
        generator,
        f"With C measured, |B| = {int(other.batch_size)} instead of {int(first.batch_size)}, the iterate's error "
        f"is {alike.error.median():.2g} (median) after {iterates.step.max()} steps; C = 2 recommends "
        f"{first.num_steps:.0f}. The answer of Lissa.auto has {auto.error.median():.2g} and a correlation of "
        f"influences of {auto.pearson.median():.3f}; it takes {other.num_steps:.0f} steps and averages the last "
        f"third, {other.passes:.3g} passes over the data against {first.passes:.3g}.",
    )


def _importance(claim: Claim, own: pd.DataFrame, generator: np.random.Generator) -> ClaimResult:
    answers = own[(own.step == -1) & (own.recipe == "importance")]
    if answers.empty:
        return out_of_reach(claim, "These tables are from before importance sampling.")
    return _mean(
        claim,
        ((answers.error <= ERROR) & (answers.diverged_at == 0)).to_numpy(dtype=float),
        generator,
        f"With |B| = {int(answers.batch_size.iloc[0])} the error is {answers.error.median():.2g} (median) "
        f"and the correlation of influences {answers.pearson.median():.3f}.",
    )


def _mean(claim: Claim, values: np.ndarray, generator: np.random.Generator, why: str) -> ClaimResult:
    unit = "points of one sequence of batches"
    interval = bootstrap_interval(values, lambda v: float(np.mean(v)), unit=unit, generator=generator)
    return reporting.judge(claim, float(values.mean()), interval, if_not_reproduced=why)


def _over_seeds(claim: Claim, values: np.ndarray, why: str) -> ClaimResult:
    listed = ", ".join(f"{value:.3g}" for value in values)
    return reporting.judge(
        claim, float(values.mean()), t_interval(values), if_not_reproduced=f"By seed: {listed}. {why}"
    )
