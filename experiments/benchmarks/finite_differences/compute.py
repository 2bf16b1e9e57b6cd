"""Errors of G v by finite differences, in a table over steps and directions."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig
from torch import Tensor

from curvlab.curvature import GaussNewtonOperator
from curvlab.curvature.jacobian_products import FD_STEP
from curvlab.lab import Interval, runs, t_interval, task_settings
from curvlab.linalg import flatten
from experiments.shared.task import Task, TrainedTask

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def compute(run: runs.Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return one row for each task, precision, step and direction, and their geometric means over directions."""
    steps = _steps(cfg)
    table = pd.concat(
        [
            _task_table(run, Task.load(run, name, settings).trained(), steps, int(settings.num_vectors))
            for name, settings in task_settings(cfg).items()
        ]
    )
    return {"table": table, "summary": summary_table(table)}


def _steps(cfg: DictConfig) -> list[float]:
    first, last = np.log10(cfg.smallest_step), np.log10(cfg.largest_step)
    count = round((last - first) * cfg.steps_per_decade) + 1
    grid = [float(f"{step:.3g}") for step in np.logspace(first, last, count)]
    return sorted({*grid, *FD_STEP.values()})


def _task_table(run: runs.Run, task: TrainedTask, steps: list[float], num_vectors: int) -> pd.DataFrame:
    """Return one row for each precision, step and direction; step 0 is forward mode (fp64's is the truth)."""
    key = task.key | {"steps": steps, "num_vectors": num_vectors}
    errors_of = partial(_errors, run, task, steps, num_vectors)
    results = run.unit("benchmarks/finite_differences", key, errors_of, version=1, about=f"errors of {task.label}")
    rows: list[dict[str, Any]] = []
    for precision in DTYPES:
        for step, errors in zip([0.0, *steps], results[precision], strict=True):
            if step == 0.0 and precision == "fp64":
                continue
            rows += [
                {
                    "task": task.label,
                    "precision": precision,
                    "step": step,
                    "direction": index,
                    "relative_error": float(error),
                    "parameter_norm": results["parameter_norm"],
                }
                for index, error in enumerate(errors)
            ]
    return pd.DataFrame(rows)


def _errors(run: runs.Run, task: TrainedTask, steps: list[float], num_vectors: int) -> dict[str, Any]:
    """Return ‖G v by finite differences - G v‖ / ‖G v‖ for each precision, (1 + steps, vectors)."""

    def operator(dtype: torch.dtype, **settings: Any) -> GaussNewtonOperator:
        return GaussNewtonOperator(copy.deepcopy(task.model).to(dtype), task.loss, task.train, **settings)

    # Drawn in single precision, so that both precisions multiply the same vectors and the same parameters.
    vectors = operator(torch.float32).randn(num_vectors, run.generator("directions", task.seed_name))
    exact = operator(torch.float64) @ vectors.double()

    def errors(op: GaussNewtonOperator) -> Tensor:
        run.add_matvecs(num_vectors)
        return torch.linalg.vector_norm((op @ vectors.to(op.dtype)).double() - exact, dim=0) / exact.norm(dim=0)

    results: dict[str, Any] = {
        "parameter_norm": float(flatten(operator(torch.float64).function.parameters).norm())
    }
    for precision, dtype in DTYPES.items():
        rows = [errors(operator(dtype))]
        for step in run.progress(steps, f"{task.label} {precision}"):
            rows.append(errors(operator(dtype, jvp="finite_difference", fd_step=step)))
        results[precision] = torch.stack(rows)
    return results


def summary_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return geometric means over directions with 95 % t intervals of the logarithms."""
    rows = []
    for (task, precision, step), own in table.groupby(["task", "precision", "step"], sort=False):
        mean, interval = geometric_mean(own.relative_error)
        rows.append(
            {
                "task": task,
                "precision": precision,
                "step": step,
                "relative_error": mean,
                "low": interval.low,
                "high": interval.high,
                "worst": own.relative_error.max(),
                "default": step == FD_STEP[DTYPES[str(precision)]],
                "parameter_norm": own.parameter_norm.iloc[0],
            }
        )
    return pd.DataFrame(rows)


def geometric_mean(errors: pd.Series) -> tuple[float, Interval]:
    """Return the geometric mean with the 95 % t interval of the logarithms."""
    logarithms = np.log(errors.to_numpy())
    found = t_interval(logarithms, unit="directions")
    interval = Interval(
        float(np.exp(found.low)), float(np.exp(found.high)), f"{found.kind}, of logarithms", found.num_samples
    )
    return float(np.exp(logarithms.mean())), interval
