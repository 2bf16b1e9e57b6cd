"""Fig. 2, claims: what Sec. 4 of the paper says about batch sizes, and what its recipe rests on."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.reporting import Claim, ClaimResult, Criterion, Interval, bootstrap_interval, judge

SOURCE = "Klochkov & Liu 2024, Sec. 4, Fig. 2"
UNTIL = 300  # steps over which speed is measured: the paper's recommended number is 150


def judge_claims(table: pd.DataFrame, recipes: pd.DataFrame, *, seed: int) -> list[ClaimResult]:
    """Judge every claim for every task; intervals are bootstraps over training points.

    Args:
        table: as `convergence_table` gives it.
        recipes: as `recipe_table` gives it.
        seed: of the bootstrap.
    """
    results = []
    for task, own in table.groupby("task", sort=False):
        generator = np.random.default_rng(seed)
        sizes = sorted(own.batch_size.unique(), reverse=True)
        results += [
            _converges(str(task), own, sizes[1], generator),
            _faster(str(task), own, ("recommended", sizes[1]), generator),
            _faster(str(task), own, ("double", sizes[0]), generator),
        ]
    for task, own in recipes.groupby("task", sort=False):
        results.append(_recipe(str(task), own, np.random.default_rng(seed)))
    return results


def _converges(task: str, own: pd.DataFrame, size: int, generator: np.random.Generator) -> ClaimResult:
    claim = Claim(
        id=f"converges-{task}",
        statement=f"With the recommended batch size the correlation of influences converges to 1 ({task}).",
        source=SOURCE,
        paper_value="converges to 1 within 1,000 steps",
        measure="Pearson correlation over test points with the exact solution, at the last step; mean over points",
        criterion=Criterion(at_least=0.95, direction_at_least=0.8),
    )
    last = own[(own.batch_size == size) & (own.step == own.step.max())].set_index("point").pearson
    one = _small(own)
    return judge(
        claim,
        float(last.mean()),
        _interval(last.to_numpy(), generator),
        if_not_reproduced=f"Sampling noise of the last iterate remains, or C = 2 is too small here (a tenth "
        f"of the batch reaches {one:.2f}): the panel on recipes has C measured.",
    )


def _faster(task: str, own: pd.DataFrame, larger: tuple[str, int], generator: np.random.Generator) -> ClaimResult:
    (name, size), small = larger, own.batch_size.min()
    claim = Claim(
        id=f"faster-{name}-{task}",
        statement=f"The correlation converges to 1 faster with the {name} batch size than with a tenth of the "
        f"recommended one, although the latter is averaged over ten runs ({task}).",
        source=SOURCE,
        paper_value="faster",
        measure=f"difference of the mean correlation with the exact solution over steps up to {UNTIL}",
        criterion=Criterion(at_least=0.01, direction_at_least=0.0),
    )
    early = own[own.step <= max(UNTIL, own.step.min())]
    means = early.groupby(["batch_size", "point"]).pearson.mean()
    differences = (means[size] - means[small]).to_numpy()
    return judge(
        claim,
        float(differences.mean()),
        _interval(differences, generator),
        if_not_reproduced=f"Over these steps the mean correlation is {means[size].mean():.3f} with |B| = {size}, "
        f"{means[small].mean():.3f} with |B| = {small} averaged over ten runs, and "
        f"{early[early.batch_size == small].pearson_one_run.mean():.3f} in one such run: the averaging makes up "
        "for most of the difference.",
    )


def _recipe(task: str, own: pd.DataFrame, generator: np.random.Generator) -> ClaimResult:
    claim = Claim(
        id=f"recipe-converges-{task}",
        statement=f"With |B| = C tr / lambda_max and C = 2 LiSSA converges ({task}).",
        source="Klochkov & Liu 2024, Corollary 1, condition C.1",
        paper_value="C is moderately larger than 1, e.g. 2",
        measure="share of training points for which it does not diverge and the relative error of the "
        "answer is below 1, the error of zero",
        criterion=Criterion(at_least=0.95, direction_at_least=0.5),
    )
    answers = own[own.step == -1]
    paper, auto = answers[answers.recipe == "paper"], answers[answers.recipe == "auto"]
    converged = ((paper.error < 1) & (paper.diverged_at == 0)).to_numpy(dtype=float)
    return judge(
        claim,
        float(converged.mean()),
        _interval(converged, generator),
        if_not_reproduced=f"With C measured, |B| = {int(auto.batch_size.iloc[0])} instead of "
        f"{int(paper.batch_size.iloc[0])}, the relative error is {auto.error.median():.2g} (median) and the "
        f"correlation of influences {auto.pearson.median():.3f}.",
    )


def _small(own: pd.DataFrame) -> float:
    chosen = own[(own.batch_size == own.batch_size.min()) & (own.step == own.step.max())]
    return float(chosen.pearson.mean())


def _interval(values: np.ndarray, generator: np.random.Generator) -> Interval:
    return bootstrap_interval(values, lambda v: float(np.mean(v)), generator=generator)
