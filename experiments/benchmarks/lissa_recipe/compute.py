"""All recipes on every case: each task with each of its dampings."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig

from curvlab.lab import runs, task_settings
from curvlab.spectrum import top_eigenvalues
from experiments.shared.recipes import compare_recipes
from experiments.shared.systems import Systems
from experiments.shared.task import Task, TrainedTask

RECIPES = {"paper": "C = 2", "auto": "C measured", "importance": "C = 2, by importance"}
ERROR = 0.2  # relative error that counts as an answer


def compute(run: runs.Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return one row for each case and recipe."""
    rows: list[dict[str, Any]] = []
    for name, settings in task_settings(cfg).items():
        task = Task.load(run, name, settings).trained()
        for systems in _cases(run, task, settings):
            rows += _rows(systems, compare_recipes(systems, reference_rtol=settings.reference_rtol))
    return {"table": pd.DataFrame(rows)}


def _cases(run: runs.Run, task: TrainedTask, settings: DictConfig) -> Iterator[Systems]:
    """Yield the systems of one task with each damping, the absolute ones first."""
    generator = run.generator("lissa_recipe", task.splits.name)
    num_test = len(task.splits.test)  # type: ignore[arg-type]  # map-style
    test = torch.randperm(num_test, generator=generator)[: settings.num_test].sort().values
    points = torch.randperm(task.num_train, generator=generator)[: settings.num_points].sort().values
    for damping in settings.dampings:
        yield Systems.at(task, damping, points, test)
    for ratio in settings.damping_ratios:
        undamped = Systems.at(task, 0.0, points, test)
        about = f"largest eigenvalue of {task.label}"
        found = run.unit("lissa/largest", undamped.key, partial(_largest, undamped), version=1, about=about)
        yield Systems.at(task, ratio * found["largest_eigenvalue"], points, test)


def _largest(systems: Systems) -> dict[str, float]:
    generator = systems.task.run.generator("largest", systems.task.seed_name)
    found = top_eigenvalues(systems.operator, 1, rtol=0.01, generator=generator)
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
            "batch_size": own["batch_size"],
            "num_steps": own["num_steps"],
            "passes": own["passes"],
            "outcome": _outcome(own),
            "error_median": float(own["final_errors"].median()),
            "error_worst": float(own["final_errors"].max()),
            "correlation_median": float(own["final_correlations"].median()),
            "promised": float(own["promised"].max()),
            "estimated": float(own["estimated"].max()),
            "converged": own["converged"],
            "message": own["message"],
        }
        for name, label in RECIPES.items()
        for own in [result[name]]
    ]


def _outcome(own: dict[str, Any]) -> str:
    if own["diverged"]:
        return f"diverges at step {own['diverged']}"
    worst = float(own["final_errors"].max())
    return "answers" if worst <= ERROR else f"error {worst:.2g}"
