"""Fig. 2, compute: correlations with the exact solution and between steps, and the panel on recipes."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig

from curvlab.runs import Run
from experiments.lissa.fig2.convergence import Convergence, TaskResult, compute_task
from experiments.shared.recipes import correlation
from experiments.shared.tasks import build_task
from experiments.target import task_settings


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, `between_steps`, `recipes` and `summary`; see the functions that make them.

    Args:
        run: seeds, store, device.
        cfg: `tasks`, and for all of them or for one what `compute_task` takes.
    """
    results = [
        compute_task(run, build_task(run, name, settings), settings)
        for name, settings in task_settings(cfg).items()
    ]
    return {
        "table": convergence_table(results),
        "between_steps": between_table(results),
        "recipes": recipe_table(results),
        "summary": summary_table(results),
    }


def convergence_table(results: list[TaskResult]) -> pd.DataFrame:
    """Return one row for each task, batch size, step and point: correlation with the exact scores.

    Column pearson is of the averaged runs, pearson_one_run of the first of them. Tasks of the panel on recipes
    have no rows.
    """
    rows: list[dict[str, Any]] = []
    for result in results:
        for size in result.sizes:
            for index, step in enumerate(size.steps):
                averaged = correlation(size.scores[index], result.exact)
                single = correlation(size.single[index], result.exact)
                rows += [
                    _names(result, size) | {"point": point, "step": step, "pearson": mean, "pearson_one_run": one}
                    for point, (mean, one) in enumerate(zip(averaged.tolist(), single.tolist(), strict=True))
                ]
    columns = ["task", "batch_size", "num_runs", "point", "step", "pearson", "pearson_one_run"]
    return pd.DataFrame(rows, columns=columns)


def between_table(results: list[TaskResult]) -> pd.DataFrame:
    """Return one row for each task, batch size and pair of steps: correlation of the scores, mean over points."""
    rows: list[dict[str, Any]] = []
    for result in results:
        for size in result.sizes:
            for i, step in enumerate(size.steps):
                for j in range(i + 1):
                    found = float(correlation(size.scores[i], size.scores[j]).mean())
                    rows.append(
                        _names(result, size) | {"step": step, "other_step": size.steps[j], "pearson": found}
                    )
    return pd.DataFrame(rows, columns=["task", "batch_size", "num_runs", "step", "other_step", "pearson"])


def _names(result: TaskResult, size: Convergence) -> dict[str, Any]:
    return {"task": result.task.label, "batch_size": size.batch_size, "num_runs": size.num_runs}


def recipe_table(results: list[TaskResult]) -> pd.DataFrame:
    """Return one row for each task, recipe, step and point of the panel on recipes; step -1 is the answer."""
    rows: list[dict[str, Any]] = []
    for result in results:
        if result.recipes is None:
            continue
        for name in ("paper", "auto"):
            found = result.recipes[name]
            steps = [*found["steps"], -1]
            errors = torch.cat([found["errors"], found["final_errors"][None]])
            correlations = torch.cat([found["correlations"], found["final_correlations"][None]])
            rows += [
                {
                    "task": result.task.label,
                    "recipe": name,
                    "batch_size": found["batch_size"],
                    "num_steps": found["num_steps"],
                    "point": point,
                    "step": step,
                    "error": float(error[point]),
                    "pearson": float(pearson[point]),
                    "promised": float(found["promised"][point]),
                    "diverged_at": found["diverged"],
                    "passes": found["passes"],
                }
                for step, error, pearson in zip(steps, errors, correlations, strict=True)
                for point in range(errors.shape[1])
            ]
    columns = ["task", "recipe", "batch_size", "num_steps", "point", "step", "error", "pearson", "promised"]
    return pd.DataFrame(rows, columns=[*columns, "diverged_at", "passes"])


def summary_table(results: list[TaskResult]) -> pd.DataFrame:
    """Return one row for each task: size, spectrum, settings, and what was measured of C."""
    rows = []
    for result in results:
        task, recipes = result.task, result.recipes or {}
        rows.append(
            {
                "task": task.label,
                "P": task.num_parameters,
                "N": task.num_train,
                "train loss": task.train_loss,
                "tr(G)": result.spectrum["trace"],
                "lambda_max": result.spectrum["largest_eigenvalue"],
                "damping": result.damping,
                "step size": result.step_size,
                "batch sizes": " ".join(_label(size) for size in result.sizes),
                "points": result.exact.shape[1],
                "test points": result.exact.shape[0],
                "C measured": recipes.get("constant"),
                "batch size, C = 2": recipes.get("paper", {}).get("batch_size"),
                "batch size, auto": recipes.get("auto", {}).get("batch_size"),
                "message, C = 2": recipes.get("paper", {}).get("message"),
            }
        )
    return pd.DataFrame(rows)


def _label(size: Convergence) -> str:
    return f"{size.batch_size}" + (f"x{size.num_runs}" if size.num_runs > 1 else "")
