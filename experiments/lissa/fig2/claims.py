"""Fig. 2, claims: what Sec. 4 of the paper says about batch sizes, and what its recipe rests on."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab import reporting
from curvlab.reporting import Claim, ClaimResult, ClaimSheet, bootstrap_interval, out_of_reach
from experiments.target import Computed

NOT_HERE = "No task of this run has this panel."
UNTIL = 300  # steps over which speed is measured: the paper's recommended number is 150
PANELS = ("converges", "faster-recommended", "faster-double")


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every claim for every task; intervals are bootstraps over training points."""
    results, seed = [], computed.config["seed"]
    table, recipes = computed["table"], computed["recipes"]
    for task, own in table.groupby("task", sort=False):
        generator, of = np.random.default_rng(seed), str(task)
        double, recommended, _ = sorted(own.batch_size.unique(), reverse=True)
        results.append(_converges(claims.claim("converges", of=of), own, recommended, generator))
        for name, size in (("recommended", recommended), ("double", double)):
            claim = claims.claim(f"faster-{name}", of=of, size=name, until=UNTIL)
            results.append(_faster(claim, own, size, generator))
    for task, own in recipes.groupby("task", sort=False):
        claim = claims.claim("recipe-converges", of=str(task))
        results.append(_recipe(claim, own, np.random.default_rng(seed)))
    if table.empty:
        for name in PANELS:
            claim = claims.claim(name, of="batch-sizes", size=name.removeprefix("faster-"), until=UNTIL)
            results.append(out_of_reach(claim, NOT_HERE))
    if recipes.empty:
        results.append(out_of_reach(claims.claim("recipe-converges", of="recipes"), NOT_HERE))
    return results


def _converges(claim: Claim, own: pd.DataFrame, size: int, generator: np.random.Generator) -> ClaimResult:
    last = own[own.step == own.step.max()]
    small = last[last.batch_size == own.batch_size.min()].pearson.mean()
    return _mean(
        claim,
        last[last.batch_size == size].pearson.to_numpy(),
        generator,
        f"Sampling noise of the last iterate remains, or C = 2 is too small here (a tenth of the batch reaches "
        f"{small:.2f}): the panel on recipes has C measured.",
    )


def _faster(claim: Claim, own: pd.DataFrame, size: int, generator: np.random.Generator) -> ClaimResult:
    small = own.batch_size.min()
    early = own[own.step <= max(UNTIL, own.step.min())]
    means = early.groupby(["batch_size", "point"]).pearson.mean()
    return _mean(
        claim,
        (means[size] - means[small]).to_numpy(),
        generator,
        f"Over these steps the mean correlation is {means[size].mean():.3f} with |B| = {size}, "
        f"{means[small].mean():.3f} with |B| = {small} averaged over ten runs, and "
        f"{early[early.batch_size == small].pearson_one_run.mean():.3f} in one such run: the averaging makes up "
        "for most of the difference.",
    )


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


def _mean(claim: Claim, values: np.ndarray, generator: np.random.Generator, why: str) -> ClaimResult:
    interval = bootstrap_interval(values, lambda v: float(np.mean(v)), generator=generator)
    return reporting.judge(claim, float(values.mean()), interval, if_not_reproduced=why)
