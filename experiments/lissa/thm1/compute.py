"""Theorem 1: measured errors of LiSSA beside the bounds, and their limits from exact second moments."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig

from curvlab.influence import per_example_gradients
from curvlab.lab import Run, task_settings
from curvlab.problem import stack
from experiments.lissa.thm1.bounds import (
    SecondMoments,
    bounds,
    condition_constant,
    condition_eigenvalue,
    mean_error,
    sufficient_threshold,
)
from experiments.lissa.thm1.importance import COLUMNS, importance_rows
from experiments.lissa.thm1.problems import (
    FactoredProblem,
    errors_from,
    lissa_errors,
    network_problem,
    rare_problem,
    signs_problem,
)
from experiments.shared.task import Task

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A problem, and what is done with it.

    Attributes:
        problem: with its dense matrices.
        seed_name: what its trials' random streams are named after.
        key: identifies the problem in the store.
        trials: of LiSSA.
        exact_limits: whether thresholds and limits of the error are computed.
        exact_curves: whether second moments are computed step by step.
    """

    problem: FactoredProblem
    seed_name: str
    key: Row
    trials: int
    exact_limits: bool
    exact_curves: bool

    def recipe(self, damping_ratio: float) -> tuple[float, float]:
        """Return the damping, and Corollary 1's step size."""
        damping = damping_ratio * self.problem.largest
        return damping, 1 / (self.problem.largest + damping)


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return errors and bounds over steps (`table`) and in the limit (`stationary`), `settings`, and `start`.

    `settings`: the requirements on |B|, one row for each problem and damping; `importance`: those of batches drawn
    by importance. `start`: the far start. Errors are relative to ‖u*‖², but in `start`.

    Args:
        run: seeds and store.
        cfg: tasks and `signs`, each with `trials`, `exact_limits`, `exact_curves`; `damping_ratio` of `table` and
            `damping_ratios` of the limits, both over λmax; `batch_sizes`, `stationary_batch_sizes`,
            `num_time_constants`, `num_shown_steps`, `far_start`.
    """
    table, settings, stationary, by_importance = [], [], [], []
    sizes = list(cfg.stationary_batch_sizes)
    for case in _cases(run, cfg):
        for ratio in cfg.damping_ratios:
            names = {"problem": case.problem.name, "damping_ratio": float(ratio)}
            key = case.key | {"damping_ratio": ratio, "batch_sizes": sizes, "exact_limits": case.exact_limits}
            about = f"limits of {case.problem.name}, damping ratio {ratio:g}"
            measure = partial(_limits, case, ratio, sizes)
            found = run.unit("lissa/thm1_limits", key, measure, version=1, about=about)
            settings.append(names | found["settings"])
            stationary += [names | row for row in found["stationary"]]
        by_importance += importance_rows(
            run, case.problem, case.key, list(cfg.damping_ratios), exact_limits=case.exact_limits
        )
        names = {"problem": case.problem.name, "damping_ratio": float(cfg.damping_ratio)}
        table += [names | row for row in _errors(run, cfg, case)]
    run.note(seeds=[cfg.seed])
    tables = {
        "table": table,
        "settings": settings,
        "stationary": stationary,
        "start": _from_afar(run, cfg.far_start),
    }
    found = {name: pd.DataFrame(rows) for name, rows in tables.items()}
    return found | {"importance": pd.DataFrame(by_importance, columns=list(COLUMNS))}


def _cases(run: Run, cfg: DictConfig) -> Iterator[Case]:
    def chosen(settings: DictConfig) -> Row:
        return {name: settings[name] for name in ("trials", "exact_limits", "exact_curves")}

    for signs in cfg.signs:
        sizes = (signs.spectrum, signs.size, signs.num_examples)
        problem = signs_problem(*sizes, run.generator("signs", *sizes))
        yield Case(problem, problem.name, {"signs": list(sizes)}, **chosen(signs))
    for name, settings in task_settings(cfg).items():
        task = Task.load(run, name, settings).trained()
        model = task.model.double()
        inputs, targets = stack(task.train, torch.arange(task.num_train))
        # g: the training example of median gradient norm, neither fitted nor an outlier
        gradients = per_example_gradients(model, task.loss, (inputs.double(), targets))
        middle = int(gradients.norm(dim=1).argsort()[task.num_train // 2])
        problem = network_problem(task.label, model, inputs.double(), gradients[middle])
        yield Case(problem, task.seed_name, {"task": task.key}, **chosen(settings))


def _limits(case: Case, damping_ratio: float, batch_sizes: list[int]) -> dict[str, Any]:
    """Return the requirements on |B|, and the error that stays, for one damping."""
    problem = case.problem
    damping, step_size = case.recipe(damping_ratio)
    moments = SecondMoments(problem, damping, step_size=step_size)
    constant = condition_constant(problem)
    corollary = constant * problem.trace / problem.largest
    exact = moments.exact_threshold() if case.exact_limits else math.nan
    rows = []
    for batch_size in batch_sizes:
        own = bounds(problem, damping, step_size=step_size, batch_size=batch_size)
        converges = case.exact_limits and batch_size > exact
        limit = moments.stationary_error(batch_size) if converges else math.nan
        update = own.step_size**2 * own.sampling_error / own.solution_norm
        rows.append(
            {
                "batch_size": batch_size,
                "admitted": batch_size >= corollary,
                "delta": own.delta,
                "error": limit / own.solution_norm,
                "theorem": update / own.delta if own.delta > 0 else math.nan,
                "single_update": update,
                "printed": own.printed_sampling / own.solution_norm,
                "inverse_delta": 1 / (2 * step_size * damping),
                "constant": constant,
            }
        )
    alone = condition_eigenvalue(problem, damping, step_size=step_size, batch_size=1)
    settings = {
        "num_parameters": len(problem.gradient),
        "num_examples": len(problem.factors),
        "largest": problem.largest,
        "trace_ratio": problem.trace / problem.largest,
        "constant": constant,
        "exact": exact,
        "sufficient": sufficient_threshold(problem, damping, step_size=step_size),
        "corollary": corollary,
        "recipe": math.ceil(2 * problem.trace / problem.largest),
        "single_example": alone / (1 - step_size * damping) ** 2,
    }
    return {"settings": settings, "stationary": rows}


def _errors(run: Run, cfg: DictConfig, case: Case) -> list[Row]:
    """Return measured errors and bounds, relative to ‖u*‖², over steps, for every batch size."""
    damping, step_size = case.recipe(cfg.damping_ratio)
    last = math.ceil(cfg.num_time_constants / (step_size * damping))
    shown = sorted({int(step) for step in np.geomspace(1, last, cfg.num_shown_steps).round()})
    # What "≲" hides in (10) according to its proof: 3 from Theorem 1 at u_0 = 0, and C.
    constants = {"first_constant": 3.0, "second_constant": max(1.0, condition_constant(case.problem))}
    rows: list[Row] = []
    for batch_size in run.progress(list(cfg.batch_sizes), f"LiSSA on {case.problem.name}"):
        key = case.key | {"damping_ratio": cfg.damping_ratio, "batch_size": batch_size, "shown": shown}
        key |= {"trials": case.trials, "exact_curves": case.exact_curves}
        measure = partial(_trials, run, case, damping, step_size, batch_size, shown)
        about = f"errors of {case.problem.name}, |B| = {batch_size}"
        stored = run.unit("lissa/thm1_errors", key, measure, version=1, about=about)
        own = bounds(case.problem, damping, step_size=step_size, batch_size=batch_size)
        scale, root = own.solution_norm, math.sqrt(case.trials)
        for index, step in enumerate(shown):
            square, projection = stored["squares"][index] / scale, stored["projections"][index] / scale
            rows.append(
                {
                    "batch_size": batch_size,
                    "step": step,
                    "error": float(square.mean()),
                    "error_stderr": float(square.std()) / root,
                    "exact": float(stored["exact"][step]) / scale if stored["exact"] is not None else math.nan,
                    "theorem": own.theorem(step) / scale,
                    "corrected": own.corrected(step) / scale,
                    "printed": own.printed(step) / scale,
                    "printed_generous": own.printed(step, **constants) / scale,
                    "mean": float(projection.mean()),
                    "mean_stderr": float(projection.std()) / root,
                    "mean_norm": mean_error(case.problem, damping, step_size=step_size, step=step),
                    "mean_bound": own.contraction**step,
                    "delta": own.delta,
                    "num_trials": case.trials,
                }
            )
    return rows


def _trials(  # noqa: PLR0917
    run: Run, case: Case, damping: float, step_size: float, batch_size: int, shown: list[int]
) -> dict[str, Any]:
    squares, projections = lissa_errors(
        case.problem,
        damping,
        step_size=step_size,
        batch_size=batch_size,
        shown_steps=shown,
        num_trials=case.trials,
        generator=run.generator("thm1", case.seed_name, batch_size),
    )
    moments = SecondMoments(case.problem, damping, step_size=step_size)
    exact = moments.errors(batch_size, shown[-1]) if case.exact_curves else None
    return {"squares": squares, "projections": projections, "exact": exact}


def _from_afar(run: Run, part: DictConfig) -> list[Row]:
    """Return measured and exact errors, and bounds, in the one-dimensional case that starts beyond u*."""
    problem, sizes = rare_problem(part.num_examples), {"step_size": part.step_size, "batch_size": 1}
    measure = partial(_far_trials, run, part, problem)
    stored = run.unit("lissa/thm1_far_start", dict(part), measure, version=1, about="errors from a far start")
    own = bounds(problem, part.damping, **sizes)
    first = float(stored["exact"][0])
    return [
        {
            "problem": problem.name,
            "step": step,
            "error": float(stored["measured"][step]),
            "error_stderr": float(stored["stderr"][step]),
            "exact": float(stored["exact"][step]),
            "theorem": own.theorem(step, start_error=first),
            "corrected": own.corrected(step, start_error=first),
            "delta": own.delta,
            "num_trials": part.trials,
        }
        for step in range(part.num_steps + 1)
    ]


def _far_trials(run: Run, part: DictConfig, problem: FactoredProblem) -> dict[str, Any]:
    start = torch.tensor([part.start], dtype=torch.float64)
    measured = errors_from(
        problem,
        part.damping,
        step_size=part.step_size,
        batch_size=1,
        start=start,
        num_steps=part.num_steps,
        num_trials=part.trials,
        generator=run.generator("far start"),
    )
    moments = SecondMoments(problem, part.damping, step_size=part.step_size)
    return {
        "measured": measured.mean(1),
        "stderr": measured.std(1) / math.sqrt(part.trials),
        "exact": moments.errors(1, part.num_steps, start=start),
    }
