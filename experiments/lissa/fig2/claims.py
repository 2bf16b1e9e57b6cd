"""Fig. 2, claims: what Sec. 4 of the paper says about batch sizes, and what its recipe rests on."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab import reporting
from curvlab.reporting import Claim, ClaimResult, ClaimSheet, bootstrap_interval, out_of_reach
from experiments.target import Computed

NOT_HERE = "No task of this run has this panel."
UNTIL = 300  # steps over which speed is measured: the paper's recommended number is 150
ERROR = 0.2  # relative error that counts as an answer
OVERFLOW = -1.0  # what an overflow counts in place of a correlation: the least that one can be
# Each of them over the correlation with the exact solution, and between steps: with the own last one.
COLUMNS = {"": "pearson", "steps-": "pearson_last"}


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every claim for every task; intervals are bootstraps over training points."""
    results, seed = [], computed.config["seed"]
    table, recipes = computed["table"], computed["recipes"]
    counted = table.assign(**{column: _counted(table[column]) for column in COLUMNS.values()})
    for task, own in counted.groupby("task", sort=False):
        generator, of = np.random.default_rng(seed), str(task)
        double, recommended, _ = sorted(own.batch_size.unique(), reverse=True)
        for prefix, column in COLUMNS.items():
            claim = claims.claim(f"{prefix}converges", of=of)
            results.append(_converges(claim, own, recommended, column, generator))
            for name, size in (("recommended", recommended), ("double", double)):
                claim = claims.claim(f"{prefix}faster-{name}", of=of, size=name, until=UNTIL)
                results.append(_faster(claim, own, size, column, generator))
    for task, own in recipes.groupby("task", sort=False):
        claim = claims.claim("recipe-converges", of=str(task))
        results.append(_recipe(claim, own, np.random.default_rng(seed)))
        claim = claims.claim("importance-converges", of=str(task))
        results.append(_importance(claim, own, np.random.default_rng(seed)))
    if table.empty:
        for prefix in COLUMNS:
            for name in ("converges", "faster-recommended", "faster-double"):
                size = name.removeprefix("faster-")
                claim = claims.claim(f"{prefix}{name}", of="batch-sizes", size=size, until=UNTIL)
                results.append(out_of_reach(claim, NOT_HERE))
    if recipes.empty:
        for name in ("recipe-converges", "importance-converges"):
            results.append(out_of_reach(claims.claim(name, of="recipes"), NOT_HERE))
    return results


def _counted(pearson: pd.Series) -> pd.Series:
    return pearson.fillna(OVERFLOW)


def _converges(
    claim: Claim, own: pd.DataFrame, size: int, column: str, generator: np.random.Generator
) -> ClaimResult:
    last = own.step.max()
    # With its own last step every run correlates by 1: the later half without it says how far it has settled.
    late = own[own.step == last] if column == "pearson" else own[(own.step >= last / 2) & (own.step < last)]
    small = late[late.batch_size == own.batch_size.min()][column].mean()
    return _mean(
        claim,
        late[late.batch_size == size].groupby("point")[column].mean().to_numpy(),
        generator,
        f"Sampling noise of the last iterates remains, or C = 2 is too small here (a tenth of the batch reaches "
        f"{small:.2f}): the panel on recipes has C measured. {_overflows(own)}",
    )


def _faster(
    claim: Claim, own: pd.DataFrame, size: int, column: str, generator: np.random.Generator
) -> ClaimResult:
    small = own.batch_size.min()
    early = own[own.step <= max(UNTIL, own.step.min())]
    means = early.groupby(["batch_size", "point"])[column].mean()
    one_run = ""
    if column == "pearson":
        one = _counted(early[early.batch_size == small].pearson_one_run).mean()
        one_run = f" ({one:.3f} in one such run: the averaging makes up for most of the difference)"
    return _mean(
        claim,
        (means[size] - means[small]).to_numpy(),
        generator,
        f"Over these steps the mean correlation is {means[size].mean():.3f} with |B| = {size} and "
        f"{means[small].mean():.3f} with |B| = {small} averaged over ten runs{one_run}. {_overflows(own)}",
    )


def _overflows(own: pd.DataFrame) -> str:
    last = own[own.step == own.step.max()]
    counts = ", ".join(
        f"{int(group.overflow.sum())} with |B| = {size}" for size, group in last.groupby("batch_size")
    )
    return f"Not finite at the end, of {last.seed.nunique() * last.point.nunique()} runs each: {counts}."


def _recipe(claim: Claim, own: pd.DataFrame, generator: np.random.Generator) -> ClaimResult:
    answers = own[own.step == -1]
    paper, auto = answers[answers.recipe == "paper"], answers[answers.recipe == "auto"]
    return _mean(
        claim,
        ((paper.error < 1) & (paper.diverged_at == 0)).to_numpy(dtype=float),
        generator,
        f"With C measured, |B| = {int(auto.batch_size.iloc[0])} instead of {int(paper.batch_size.iloc[0])}, the "
        f"relative error is {auto.error.median():.2g} (median) and the correlation of influences "
        f"{auto.pearson.median():.3f}.",
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
    interval = bootstrap_interval(values, lambda v: float(np.mean(v)), generator=generator)
    return reporting.judge(claim, float(values.mean()), interval, if_not_reproduced=why)
