"""Theorem 1 and Corollary 1 against measured errors of LiSSA (Klochkov & Liu 2024, Sec. 3, App. B.1, B.2).

make lissa-thm1 PRESET=smoke|embedded|laptop|paper ARGS="damping_ratio=0.1"

For problems whose Gauss-Newton matrix can be held (a trained network; the task of App. B.4 with finitely many
examples, where C of condition C.1 is 1), u_0 = 0 and η = 1 / (λmax + λ): E‖u_t - u*‖² over trials of `Lissa`, for
batches of 1 to 1,000, beside the theorem's bound with the best δ of condition (9) and beside (10) as printed; the
limit of the error, and the |B| at which it stops existing, from the exact second moments.

What is printed and does not hold: (10) lacks the factor δ⁻¹, about 1 / (2ηλ), of the theorem's second term: what
stands there is the variance of one update, but updates add up. B.1 concludes η² (E H_t² - H²) ⪯ η(H + λ) - δ from
(9), which gives 2η(H + λ) - η²(H + λ)² - δ only; with u_0 on the far side of u* the theorem's second bound then
fails (`one of 10` here; `Bounds.corrected` holds for every start). B.2 has C tr / |B| >= 1/η - λ for <=, and
λ(η + H) for η(λ + H); B.1 ends with (1 - δ)² for (1 - δ)^t.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig
from torch import Tensor

from curvlab import runs
from curvlab.data import stack
from curvlab.influence import per_example_gradients
from curvlab.reporting import save_claims
from curvlab.runs import Run
from experiments.lissa.thm1_bounds import (
    SecondMoments,
    bounds,
    condition_constant,
    condition_eigenvalue,
    sufficient_threshold,
)
from experiments.lissa.thm1_claims import judge_claims
from experiments.lissa.thm1_plot import draw
from experiments.lissa.thm1_problem import (
    Problem,
    errors_from,
    lissa_errors,
    network_problem,
    rare_problem,
    signs_problem,
)
from experiments.task import build_task

Row = dict[str, Any]
FILES = ("table.csv", "settings.csv", "stationary.csv", "start.csv")


@runs.main("lissa/thm1_error_bound")
def main(cfg: DictConfig) -> None:
    """Compute, tabulate, judge, draw."""
    with runs.start(cfg, paper="lissa", item="thm1", title="Theorem 1 and (10) against measured errors") as run:
        errors, settings, stationary = [], [], []
        for problem, key, part in _problems(run, cfg):
            for ratio in cfg.damping_ratios:
                limits = _limits(run, cfg, problem, key | {"damping_ratio": ratio}, part)
                names = {"problem": problem.name, "damping_ratio": float(ratio)}
                settings.append(names | limits["settings"])
                stationary += [names | row for row in limits["stationary"]]
            names = {"problem": problem.name, "damping_ratio": float(cfg.damping_ratio)}
            errors += [names | row for row in _errors(run, cfg, problem, key, part)]
        tables = [pd.DataFrame(rows) for rows in (errors, settings, stationary, _from_afar(run, cfg))]
        for table, name in zip(tables, FILES, strict=True):
            run.save_table(table, name)
        save_claims(run.folder, judge_claims(*tables))
        for name, figure in draw(*tables).items():
            run.save_figure(figure, name)
        run.note(
            scale={
                "problems": {"ours": list(dict.fromkeys(tables[1].problem)), "paper": "any"},
                "batch sizes": {"ours": list(cfg.batch_sizes), "paper": "any"},
                "damping / λmax": {"ours": [float(ratio) for ratio in cfg.damping_ratios], "paper": "any"},
                "trials": {"ours": sorted(set(tables[0].num_trials)), "paper": "expectation"},
            },
            seeds=[cfg.seed],
        )


def _problems(run: Run, cfg: DictConfig) -> list[tuple[Problem, Row, DictConfig]]:
    """Return each problem with its key in the store and its part of the config (trials, exact)."""
    found: list[tuple[Problem, Row, DictConfig]] = []
    for part in cfg.signs:
        generator = run.generator("signs", part.spectrum, part.size, part.num_examples)
        problem = signs_problem(part.spectrum, part.size, part.num_examples, generator)
        found.append((problem, {"signs": [part.spectrum, part.size, part.num_examples]}, part))
    for part in (cfg.networks or {}).values():
        task = build_task(run, part)
        model = task.model.double()
        inputs, targets = stack(task.train, torch.arange(task.num_train))
        # g: the training example of median gradient norm, neither fitted nor an outlier
        gradients = per_example_gradients(model, task.loss, (inputs.double(), targets))
        chosen = int(gradients.norm(dim=1).argsort()[task.num_train // 2])
        problem = network_problem(task.name, model, inputs.double(), gradients[chosen])
        found.append((problem, {"task": task.key}, part))
    return found


def _recipe(problem: Problem, damping_ratio: float) -> tuple[float, float]:
    """Return the damping, and Corollary 1's step size."""
    damping = damping_ratio * problem.largest
    return damping, 1 / (problem.largest + damping)


def _limits(run: Run, cfg: DictConfig, problem: Problem, key: Row, part: DictConfig) -> dict[str, Any]:
    """Return the requirements on |B|, and the error that stays, for one damping."""
    sizes = list(cfg.stationary_batch_sizes)

    def compute() -> dict[str, Any]:
        damping, step_size = _recipe(problem, key["damping_ratio"])
        moments = SecondMoments(problem, damping, step_size=step_size)
        constant = condition_constant(problem)
        exact = moments.exact_threshold() if part.exact_limits else math.nan
        rows = []
        for batch_size in sizes:
            own = bounds(problem, damping, step_size=step_size, batch_size=batch_size)
            admitted = part.exact_limits and batch_size > exact
            limit = moments.stationary_error(batch_size) if admitted else math.nan
            rows.append(
                {
                    "batch_size": batch_size,
                    "admitted": batch_size >= constant * problem.trace / problem.largest,
                    "delta": own.delta,
                    "error": limit / own.solution_norm,
                    "theorem": own.step_size**2 * own.sampling_error / own.delta / own.solution_norm
                    if own.delta > 0
                    else math.nan,
                    "single_update": own.step_size**2 * own.sampling_error / own.solution_norm,
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
            "corollary": constant * problem.trace / problem.largest,
            "recipe": math.ceil(2 * problem.trace / problem.largest),
            "single_example": alone / (1 - step_size * damping) ** 2,
        }
        return {"settings": settings, "stationary": rows}

    config = key | {"batch_sizes": sizes, "exact_limits": part.exact_limits, "version": 1}
    return run.unit("lissa/thm1_limits", config, compute)


def _errors(run: Run, cfg: DictConfig, problem: Problem, key: Row, part: DictConfig) -> list[Row]:
    """Return measured errors and bounds, relative to ‖u*‖², over steps, for every batch size."""
    damping, step_size = _recipe(problem, cfg.damping_ratio)
    last = math.ceil(cfg.num_time_constants / (step_size * damping))
    shown = sorted({int(step) for step in np.geomspace(1, last, cfg.num_shown_steps).round()})
    constants = _constants(problem)
    rows: list[Row] = []
    for batch_size in run.progress(list(cfg.batch_sizes), f"LiSSA on {problem.name}"):

        def compute(batch_size: int = batch_size) -> dict[str, Any]:
            squares, projections = lissa_errors(
                problem,
                damping,
                step_size=step_size,
                batch_size=batch_size,
                shown_steps=shown,
                num_trials=part.trials,
                generator=run.generator("thm1", problem.name, batch_size),
            )
            moments = SecondMoments(problem, damping, step_size=step_size)
            exact = moments.errors(batch_size, last) if part.exact_curves else None
            return {"squares": squares, "projections": projections, "exact": exact}

        config = key | {"damping_ratio": cfg.damping_ratio, "batch_size": batch_size, "shown": shown, "version": 1}
        parts = {"trials": part.trials, "exact_curves": part.exact_curves}
        stored = run.unit("lissa/thm1_errors", config | parts, compute)
        own = bounds(problem, damping, step_size=step_size, batch_size=batch_size)
        scale, root = own.solution_norm, math.sqrt(part.trials)
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
                    "mean_bound": own.contraction**step,
                    "delta": own.delta,
                    "num_trials": part.trials,
                }
            )
    return rows


def _constants(problem: Problem) -> dict[str, float]:
    """Return the constants that "≲" hides in (10) according to its proof: 3 from Theorem 1 at u_0 = 0, and C."""
    return {"first_constant": 3.0, "second_constant": max(1.0, condition_constant(problem))}


def _from_afar(run: Run, cfg: DictConfig) -> list[Row]:
    """Return measured and exact errors, and bounds, in the one-dimensional case that starts beyond u*."""
    part = cfg.far_start
    problem = rare_problem(part.num_examples)
    start = torch.tensor([part.start], dtype=torch.float64)
    common = {"step_size": part.step_size, "batch_size": 1}

    def compute() -> dict[str, Tensor]:
        sizes = {"start": start, "num_steps": part.num_steps, "num_trials": part.trials}
        measured = errors_from(problem, part.damping, **common, **sizes, generator=run.generator("far start"))
        exact = SecondMoments(problem, part.damping, step_size=part.step_size).errors(
            1, part.num_steps, start=start
        )
        stderr = measured.std(1) / math.sqrt(part.trials)
        return {"measured": measured.mean(1), "stderr": stderr, "exact": exact}

    stored = run.unit("lissa/thm1_far_start", dict(part) | {"version": 1}, compute)
    own = bounds(problem, part.damping, **common)
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


if __name__ == "__main__":
    main()
