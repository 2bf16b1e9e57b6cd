"""Fig. 2, compute: correlations with the exact solution and between steps, and the panel on recipes."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig
from torch import Tensor

from curvlab.lab import Run, task_settings
from experiments.lissa.fig2.convergence import Convergence, TaskResult, compute_task
from experiments.shared.task import Task


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, `between_steps`, `recipes` and `summary`; see the functions that make them.

    Args:
        run: seeds, store, device.
        cfg: `tasks`, and for all of them or for one what `compute_task` takes.
    """
    results = [
        compute_task(run, Task.load(run, name, settings).trained(), settings)
        for name, settings in task_settings(cfg).items()
    ]
    return {
        "table": convergence_table(results),
        "between_steps": between_table(results),
        "recipes": recipe_table(results),
        "summary": summary_table(results),
    }


def convergence_table(results: list[TaskResult]) -> pd.DataFrame:
    """Return one row for each task, batch size, seed, step and point.

    Columns pearson, correlation with the exact scores of the averaged runs; pearson_one_run, of the seed's first;
    pearson_last, of the averaged runs with their own last step. nan where a score is not finite, which `overflow`
    says of the averaged runs. Tasks of the panel on recipes have no rows.
    """
    rows: list[dict[str, Any]] = []
    for result in results:
        for size in result.sizes:
            for seed, (scores, single) in enumerate(zip(size.scores, size.single, strict=True)):
                for index, step in enumerate(size.steps):
                    columns = {
                        "pearson": finite_correlation(scores[index], result.exact),
                        "pearson_one_run": finite_correlation(single[index], result.exact),
                        "pearson_last": finite_correlation(scores[index], scores[-1]),
                        "overflow": ~scores[index].isfinite().all(0),
                    }
                    rows += [
                        _names(result, size)
                        | {"seed": seed, "point": point, "step": step}
                        | {name: values[point].item() for name, values in columns.items()}
                        for point in range(result.exact.shape[1])
                    ]
    names = ["task", "batch_size", "num_runs", "seed", "point", "step"]
    return pd.DataFrame(rows, columns=[*names, "pearson", "pearson_one_run", "pearson_last", "overflow"])


def between_table(results: list[TaskResult]) -> pd.DataFrame:
    """Return one row for each task, batch size and pair of steps: correlation of the scores.

    Mean over the points and seeds whose scores are finite at both steps; `overflow`, the share of the others.
    """
    rows: list[dict[str, Any]] = []
    for result in results:
        for size in result.sizes:
            for i, step in enumerate(size.steps):
                for j in range(i + 1):
                    found = torch.cat([finite_correlation(own[i], own[j]) for own in size.scores])
                    pair = {"step": step, "other_step": size.steps[j], "pearson": float(found.nanmean())}
                    rows.append(_names(result, size) | pair | {"overflow": float(found.isnan().double().mean())})
    columns = ["task", "batch_size", "num_runs", "step", "other_step", "pearson", "overflow"]
    return pd.DataFrame(rows, columns=columns)


def finite_correlation(left: Tensor, right: Tensor) -> Tensor:
    """Return the Pearson correlation of each pair of columns, (M, K), (M, K) -> (K,); nan where not finite."""
    left, right = (side.double() - side.double().mean(0) for side in (left, right))
    found = (left * right).sum(0) / (left.norm(dim=0) * right.norm(dim=0))
    return torch.where(found.isfinite(), found, torch.full_like(found, torch.nan))


def _names(result: TaskResult, size: Convergence) -> dict[str, Any]:
    return {"task": result.task.label, "batch_size": size.batch_size, "num_runs": size.num_runs}


def recipe_table(results: list[TaskResult]) -> pd.DataFrame:
    """Return one row for each task, recipe, step and point of the panel on recipes; step -1 is the answer."""
    rows: list[dict[str, Any]] = []
    for result in results:
        if result.recipes is None:
            continue
        for name in ("paper", "auto", "importance"):
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
                "seeds": len(result.sizes[0].scores) if result.sizes else 1,
                "test points": result.exact.shape[0],
                "C measured": recipes.get("constant"),
                "batch size, C = 2": recipes.get("paper", {}).get("batch_size"),
                "batch size, auto": recipes.get("auto", {}).get("batch_size"),
                "C, by importance": recipes.get("importance_constant"),
                "batch size, by importance": recipes.get("importance", {}).get("batch_size"),
                "message, C = 2": recipes.get("paper", {}).get("message"),
            }
        )
    return pd.DataFrame(rows)


def _label(size: Convergence) -> str:
    return f"{size.batch_size}" + (f"x{size.num_runs}" if size.num_runs > 1 else "")
