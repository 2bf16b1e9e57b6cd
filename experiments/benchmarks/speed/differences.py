"""Errors of G v by finite differences against the step, in both precisions."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig
from torch import Tensor

from curvlab.curvature import GaussNewtonOperator
from curvlab.curvature.linearise import FD_STEP
from curvlab.lab import ClaimResult, ClaimSheet, Computed, Run, unit
from curvlab.lab import judge as verdict
from curvlab.linalg import flatten
from experiments.shared.stats import geometric_mean
from experiments.shared.task import Task, TrainedTask

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return one row for each task, precision, step and direction, and their geometric means over directions."""
    own = cfg.differences
    first, last = np.log10(own.smallest_step), np.log10(own.largest_step)
    grid = np.logspace(first, last, round((last - first) * own.steps_per_decade) + 1)
    steps = sorted({*(float(f"{step:.3g}") for step in grid), *FD_STEP.values()})
    tasks = [_task_table(task.trained(), steps, int(own.num_vectors)) for task in Task.each(run, cfg)]
    table = pd.concat(tasks)
    return {"differences": table, "difference_summary": _summary(table)}


def _task_table(task: TrainedTask, steps: list[float], num_vectors: int) -> pd.DataFrame:
    """Return one row for each precision, step and direction; step 0 is forward mode (fp64's is the truth)."""
    found = _errors(task, steps=steps, num_vectors=num_vectors)
    rows = []
    for precision, (place, step) in product(DTYPES, enumerate([0.0, *steps])):
        row = {"task": task.label, "precision": precision, "step": step}
        errors = enumerate(found[precision][place] if step > 0.0 or precision == "fp32" else ())
        rows += [row | {"direction": index, "relative_error": float(error)} for index, error in errors]
    return pd.DataFrame(rows).assign(parameter_norm=found["parameter_norm"])


@unit("benchmarks/finite_differences", version=1, about="errors of {seed_name}")
def _errors(task: TrainedTask, /, *, steps: list[float], num_vectors: int, **_: Any) -> dict[str, Any]:
    """Return ‖G v by finite differences - G v‖ / ‖G v‖ for each precision, (1 + steps, vectors)."""

    def operator(dtype: torch.dtype, **settings: Any) -> GaussNewtonOperator:
        return GaussNewtonOperator(copy.deepcopy(task.model).to(dtype), task.loss, task.train, **settings)

    # Drawn in single precision, so that both precisions multiply the same vectors and the same parameters.
    vectors = operator(torch.float32).randn(num_vectors, task.generator("directions"))
    exact = operator(torch.float64) @ vectors.double()

    def errors(op: GaussNewtonOperator) -> Tensor:
        task.run.add_matvecs(num_vectors)
        return torch.linalg.vector_norm((op @ vectors.to(op.dtype)).double() - exact, dim=0) / exact.norm(dim=0)

    norm = float(flatten(operator(torch.float64).function.parameters).norm())
    results: dict[str, Any] = {"parameter_norm": norm}
    for precision, dtype in DTYPES.items():
        rows = [errors(operator(dtype))]
        for step in task.run.progress(steps, f"{task.label} {precision}"):
            rows.append(errors(operator(dtype, jvp="finite_difference", fd_step=step)))
        results[precision] = torch.stack(rows)
    return results


def _summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return geometric means over directions with 95 % t intervals of the logarithms."""
    rows = []
    for (task, precision, step), own in table.groupby(["task", "precision", "step"], sort=False):
        mean, interval = geometric_mean(own.relative_error, unit="directions")
        row = {"task": task, "precision": precision, "step": step, "relative_error": mean}
        row |= {"low": interval.low, "high": interval.high, "worst": own.relative_error.max()}
        row |= {"default": step == FD_STEP[DTYPES[str(precision)]]}
        rows.append(row | {"parameter_norm": own.parameter_norm.iloc[0]})
    return pd.DataFrame(rows)


CLAIMS = ("default-step-fp32", "default-step-fp64")


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge the error at the default step; intervals are over directions."""
    table, results = computed["differences"], []
    for (task, precision), own in table.groupby(["task", "precision"], sort=False):
        errors = own[own.step == FD_STEP[DTYPES[str(precision)]]].relative_error
        claim = claims.claim(f"default-step-{precision}", of=str(task))
        why = "The figure shows which step does better."
        results.append(verdict(claim, *geometric_mean(errors, unit="directions"), if_not_reproduced=why))
    return results
