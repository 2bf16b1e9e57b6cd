"""LiSSA's recipe with C = 2, with C measured, and by importance: each task with each of its dampings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig
from scipy import stats

from curvlab.lab import ClaimResult, ClaimSheet, Computed, Interval, Run, unit
from curvlab.lab import judge as verdict
from curvlab.spectrum import top_eigenvalues
from experiments.benchmarks.parts import tasks_of
from experiments.shared.recipes import compare_recipes
from experiments.shared.systems import Systems
from experiments.shared.task import TrainedTask

RECIPES = {"paper": "C = 2", "auto": "C measured", "importance": "C = 2, by importance"}
ERROR = 0.2  # relative error that counts as an answer


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return one row for each case and recipe."""
    rows: list[dict[str, Any]] = []
    for task in tasks_of(run, cfg, "recipes"):
        for systems in _cases(task.trained()):
            rows += _rows(systems, compare_recipes(systems, reference_rtol=task.settings.reference_rtol))
    return {"recipes": pd.DataFrame(rows)} if rows else {}


def _cases(task: TrainedTask) -> Iterator[Systems]:
    """Yield the systems of one task with each damping, the absolute ones first."""
    generator, settings = task.run.generator("lissa_recipe", task.splits.name), task.settings
    num_test = len(task.splits.test)  # type: ignore[arg-type]  # map-style
    test = torch.randperm(num_test, generator=generator)[: settings.num_test].sort().values
    points = torch.randperm(task.num_train, generator=generator)[: settings.num_points].sort().values
    for damping in settings.dampings:
        yield Systems.at(task, damping, points, test)
    for ratio in settings.damping_ratios:
        largest = _largest(Systems.at(task, 0.0, points, test))["largest_eigenvalue"]
        yield Systems.at(task, ratio * largest, points, test)


@unit("lissa/largest", version=1, about="largest eigenvalue of {seed_name}")
def _largest(systems: Systems, /, **_: Any) -> dict[str, float]:
    found = top_eigenvalues(systems.operator, 1, rtol=0.01, generator=systems.task.generator("largest"))
    return {"largest_eigenvalue": float(found.values[0])}


def _rows(systems: Systems, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row for each recipe."""
    task = systems.task
    constants = {"paper": 2.0, "auto": result["constant"], "importance": result["importance_constant"]}
    return [
        {
            "case": f"{task.label}, {systems.damping:.2g}",
            "recipe": label,
            "P": task.num_parameters,
            "N": task.num_train,
            "train_loss": task.train_loss,
            "lambda_max": result["largest_eigenvalue"],
            "trace": result["trace"],
            "damping": systems.damping,
            "constant": constants[name],
            **{column: result[name][column] for column in ("batch_size", "num_steps", "passes")},
            "outcome": _outcome(result[name]),
            "error_median": float(result[name]["final_errors"].median()),
            "error_worst": float(result[name]["final_errors"].max()),
            "correlation_median": float(result[name]["final_correlations"].median()),
            "promised": float(result[name]["promised"].max()),
            "estimated": float(result[name]["estimated"].max()),
            **{column: result[name][column] for column in ("converged", "message")},
        }
        for name, label in RECIPES.items()
    ]


def _outcome(own: dict[str, Any]) -> str:
    if own["diverged"]:
        return f"diverges at step {own['diverged']}"
    worst = float(own["final_errors"].max())
    return "answers" if worst <= ERROR else f"error {worst:.2g}"


# ------------------------------------------------------------------------------------ claims
CLAIMS = ("recommended-hyperparameters", "importance-sampling")


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge both samplings by the share of cases that they solve; intervals are over cases."""
    table = computed["recipes"]
    paper, auto, importance = (table[table.recipe == label] for label in RECIPES.values())
    converged = (paper.error_worst < 1) & ~paper.outcome.str.startswith("diverges")
    solved = int((auto.error_worst <= ERROR).sum())
    why = (
        f"Condition C.1 does not hold with C = 2 there: C measured is {auto.constant.min():.1f} to "
        f"{auto.constant.max():.1f}; with it {solved} of {len(auto)} cases have an error of at most {ERROR}."
    )
    failed = importance[importance.error_worst > ERROR]
    cases = ", ".join(f"{row.case} {row.error_worst:.2g}" for row in failed.itertuples()) or "none"
    sizes = f"|B| is {importance.batch_size.min()} to {importance.batch_size.max()}."
    reasons = (why, f"Errors above {ERROR}: {cases}. {sizes}")
    answers = (converged, importance.error_worst <= ERROR)
    return [
        verdict(claims.claim(name), *_share(own), if_not_reproduced=reason)
        for name, own, reason in zip(CLAIMS, answers, reasons, strict=True)
    ]


def _share(cases: pd.Series) -> tuple[float, Interval]:
    """Return the share with its exact binomial interval: eight of eight are not all that there are."""
    found = stats.binomtest(int(cases.sum()), len(cases)).proportion_ci(0.95, method="exact")
    kind = f"Clopper-Pearson 95 %, {len(cases)} cases"
    return float(cases.mean()), Interval(float(found.low), float(found.high), kind, len(cases))
