"""Finite differences against forward mode: the error of G v against the step, in both precisions.

make bench-finite-differences PRESET=smoke|embedded|laptop|paper

Klochkov & Liu (2024), Sec. 2, compute J v by [h(θ + δv) - h(θ - δv)] / 2δ with δ = 0.01 for vectors of any norm.
The step here is the norm of the perturbation, δ‖v‖. Too large a step meets the curvature of the outputs, or the
kinks of a network with ReLU; too small a one meets rounding, of size machine epsilon over step. The truth is
forward mode in double precision, for both precisions; forward mode in single precision is shown beside them.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from curvlab import runs
from curvlab.curvature import GaussNewtonOperator
from curvlab.curvature.jacobian_products import FD_STEP
from curvlab.linalg import flatten
from curvlab.reporting import Claim, ClaimResult, Criterion, Interval, judge, save_claims, t_interval
from experiments.benchmarks.finite_differences_plot import draw
from experiments.task import Task, build_task

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
TOLERANCE = {"fp32": 2e-2, "fp64": 1e-6}
SHARED = ("smallest_step", "largest_step", "steps_per_decade", "num_vectors")


@runs.main("benchmarks/finite_differences")
def main(cfg: DictConfig) -> None:
    """Compute, tabulate, judge, draw."""
    title = "Finite differences against forward mode"
    with runs.start(cfg, paper="benchmarks", item="finite_differences", title=title) as run:
        steps = _steps(cfg)
        table = pd.concat([_task_table(run, build_task(run, part), steps, part) for part in _parts(cfg)])
        summary = summary_table(table)
        run.save_table(table)
        run.save_table(summary, "summary.csv")
        save_claims(run.folder, judge_claims(table))
        run.save_figure(draw(summary))
        run.note(scale={"directions": cfg.num_vectors, "steps": len(steps), "training of the models": "1 seed"})


def _parts(cfg: DictConfig) -> list[DictConfig]:
    """Return the config of each task: the top level's, then those under `also`."""
    shared = OmegaConf.masked_copy(cfg, list(SHARED))
    further = [OmegaConf.merge(shared, part) for part in (cfg.also or {}).values()]
    return [cfg, *further]  # type: ignore[list-item]  # merged mappings are mappings


def _steps(cfg: DictConfig) -> list[float]:
    first, last = np.log10(cfg.smallest_step), np.log10(cfg.largest_step)
    count = round((last - first) * cfg.steps_per_decade) + 1
    grid = [float(f"{step:.3g}") for step in np.logspace(first, last, count)]
    return sorted({*grid, *FD_STEP.values()})


def _task_table(run: runs.Run, task: Task, steps: list[float], cfg: DictConfig) -> pd.DataFrame:
    """Return one row a precision, step and direction; step 0 stands for forward mode (fp64's is the truth)."""
    settings = {**task.key, "steps": steps, "num_vectors": cfg.num_vectors}
    results = run.unit("finite_differences", settings, partial(_errors, run, task, steps, cfg.num_vectors))
    rows: list[dict[str, Any]] = []
    for precision in DTYPES:
        for step, errors in zip([0.0, *steps], results[precision], strict=True):
            if step == 0.0 and precision == "fp64":
                continue
            rows += [
                {
                    "task": task.name,
                    "precision": precision,
                    "step": step,
                    "direction": index,
                    "relative_error": float(error),
                    "parameter_norm": results["parameter_norm"],
                }
                for index, error in enumerate(errors)
            ]
    return pd.DataFrame(rows)


def _errors(run: runs.Run, task: Task, steps: list[float], num_vectors: int) -> dict[str, Any]:
    """Return ‖G v by finite differences - G v‖ / ‖G v‖ for each precision, (1 + steps, vectors)."""

    def operator(dtype: torch.dtype, **settings: Any) -> GaussNewtonOperator:
        return GaussNewtonOperator(copy.deepcopy(task.model).to(dtype), task.loss, task.train, **settings)

    # Drawn in single precision, so that both precisions multiply the same vectors and the same parameters.
    vectors = operator(torch.float32).randn(num_vectors, run.generator("directions", task.name))
    exact = operator(torch.float64) @ vectors.double()

    def errors(op: GaussNewtonOperator) -> Tensor:
        run.add_matvecs(num_vectors)
        return torch.linalg.vector_norm((op @ vectors.to(op.dtype)).double() - exact, dim=0) / exact.norm(dim=0)

    results: dict[str, Any] = {
        "parameter_norm": float(flatten(operator(torch.float64).function.parameters).norm())
    }
    for precision, dtype in DTYPES.items():
        rows = [errors(operator(dtype))]
        for step in run.progress(steps, f"{task.name} {precision}"):
            rows.append(errors(operator(dtype, jvp="finite_difference", fd_step=step)))
        results[precision] = torch.stack(rows)
    return results


def summary_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return geometric means over directions with 95 % t intervals of the logarithms."""
    rows = []
    for (task, precision, step), own in table.groupby(["task", "precision", "step"], sort=False):
        mean, interval = _geometric_mean(own.relative_error)
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


def judge_claims(table: pd.DataFrame) -> list[ClaimResult]:
    """Judge the default step of each precision on each task."""
    results = []
    for (task, precision), own in table.groupby(["task", "precision"], sort=False):
        step, tolerance = FD_STEP[DTYPES[str(precision)]], TOLERANCE[str(precision)]
        claim = Claim(
            id=f"default-step-{precision}-{task}",
            statement=f"Finite differences stand in for forward mode in {precision} ({task}).",
            source="Klochkov & Liu 2024, Sec. 2",
            paper_value=None,
            measure=f"relative error of G v at the default step {step:g}, geometric mean over random directions",
            criterion=Criterion(at_most=tolerance),
        )
        value, interval = _geometric_mean(own[own.step == step].relative_error)
        results.append(judge(claim, value, interval, if_not_reproduced="The figure shows which step does better."))
    return results


def _geometric_mean(errors: pd.Series) -> tuple[float, Interval]:
    logarithms = np.log(errors.to_numpy())
    found = t_interval(logarithms, unit="directions")
    interval = Interval(
        float(np.exp(found.low)), float(np.exp(found.high)), f"{found.kind}, of logarithms", found.num_samples
    )
    return float(np.exp(logarithms.mean())), interval


if __name__ == "__main__":
    main()
