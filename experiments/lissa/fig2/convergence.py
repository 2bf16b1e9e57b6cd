"""Fig. 2, convergence: test influences at steps 1 to 1000 of LiSSA with three batch sizes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from curvlab.lab import Run
from curvlab.solvers import Lissa, lissa_hyperparameters
from curvlab.solvers.lissa import LissaState
from curvlab.spectrum import hutchinson_trace, top_eigenvalues
from experiments.shared.recipes import compare_recipes, exact_solutions
from experiments.shared.systems import Systems
from experiments.shared.task import TrainedTask

FIRST_STEPS = (1, 2, 5, 10, 20)


@dataclass(frozen=True)
class Convergence:
    """Scores of one batch size for each seed, averaged over the seed's runs.

    Attributes:
        batch_size: examples of a step.
        num_runs: independent runs whose scores are averaged, of each seed.
        steps: (S,).
        scores: (seeds, S, M, K), of the averaged iterates.
        single: (seeds, S, M, K), of the seed's first run alone.
    """

    batch_size: int
    num_runs: int
    steps: list[int]
    scores: Tensor
    single: Tensor


@dataclass(frozen=True)
class TaskResult:
    """All that Fig. 2 shows of one task.

    Attributes:
        task: model and data.
        spectrum: trace and largest eigenvalue; nan where nothing asks for them.
        damping: added to G.
        step_size: of all runs.
        exact: (M, K), scores of the exact solutions.
        sizes: one for each batch size, the largest first; empty for the panel on recipes alone.
        recipes: LiSSA with C = 2, with C measured, and by importance; None for the panels of the paper.
    """

    task: TrainedTask
    spectrum: dict[str, float]
    damping: float
    step_size: float
    exact: Tensor
    sizes: list[Convergence]
    recipes: dict[str, Any] | None


def compute_task(run: Run, task: TrainedTask, cfg: DictConfig) -> TaskResult:
    """Measure the spectrum, solve exactly, and run LiSSA, unit by unit.

    Args:
        run: seeds, store, device.
        task: model and data.
        cfg: `num_points` and `num_test`, how many; `damping`, or null and `damping_ratio` (of lambda_max);
            `step_size`, or null and 1 / (lambda_max + damping); `reference_rtol`;
            `trace_probes`; `compare_recipes`: the panel on recipes and not the paper's, which
            has `batch_size` (null: recommended), `batch_factors`, `num_steps` and `num_seeds`.
    """
    generator = run.generator("fig2", task.splits.name)
    num_test = len(task.splits.test)  # type: ignore[arg-type]  # map-style
    test = torch.randperm(num_test, generator=generator)[: cfg.num_test].sort().values
    points = torch.randperm(task.num_train, generator=generator)[: cfg.num_points].sort().values
    start = Systems.at(task, 0.0, points, test)
    spectrum = _measured_spectrum(start, cfg)
    damping = cfg.damping if cfg.damping is not None else cfg.damping_ratio * spectrum["largest_eigenvalue"]
    systems = dataclasses.replace(start, damping=damping)
    exact = systems.test_gradients @ exact_solutions(systems, cfg.reference_rtol)["solutions"]
    step_size = cfg.step_size or 1 / (spectrum["largest_eigenvalue"] + damping)
    sizes: list[Convergence] = []
    recipes = compare_recipes(systems, reference_rtol=cfg.reference_rtol) if cfg.compare_recipes else None
    if not cfg.compare_recipes:
        recommended = cfg.batch_size or _recommended(spectrum, damping)
        for factor in cfg.batch_factors:
            batch_size = max(1, round(factor * recommended))
            num_runs = max(1, round(1 / factor))
            sizes.append(
                _convergence(systems, batch_size, num_runs, step_size, cfg.num_steps, num_seeds=cfg.num_seeds)
            )
    return TaskResult(task, spectrum, damping, step_size, exact, sizes, recipes)


def recorded_steps(num_steps: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, and from there 25 equal steps."""
    stride = max(1, num_steps // 25)
    return [step for step in FIRST_STEPS if step < stride] + list(range(stride, num_steps + 1, stride))


def _measured_spectrum(systems: Systems, cfg: DictConfig) -> dict[str, float]:
    """Return trace and λmax, a unit; nan where damping, step size and batch size are given: nothing asks then."""
    if None not in (cfg.damping, cfg.step_size, cfg.batch_size):
        return dict.fromkeys(("trace", "trace_stderr", "largest_eigenvalue"), math.nan)
    key = systems.task.key | {"trace_probes": cfg.trace_probes}
    compute = partial(_spectrum, systems, cfg.trace_probes)
    about = f"spectrum of {systems.task.label}"
    return systems.task.run.unit("lissa/fig2_spectrum", key, compute, version=1, about=about)


def _spectrum(systems: Systems, num_probes: int) -> dict[str, float]:
    generator = systems.task.run.generator("fig2 spectrum", systems.task.seed_name)
    trace = hutchinson_trace(systems.operator, num_matvecs=num_probes, generator=generator)
    largest = top_eigenvalues(systems.operator, 1, rtol=0.01, generator=generator)
    systems.task.run.add_matvecs(trace.num_matvecs + largest.num_matvecs)
    value = float(largest.values[0])
    return {"trace": max(trace.value, value), "trace_stderr": trace.stderr, "largest_eigenvalue": value}


def _recommended(spectrum: dict[str, float], damping: float) -> int:
    """Return the batch size of Corollary 1 with C = 2."""
    return lissa_hyperparameters(
        trace=spectrum["trace"], largest_eigenvalue=spectrum["largest_eigenvalue"], damping=damping
    ).batch_size


def _convergence(
    systems: Systems, batch_size: int, num_runs: int, step_size: float, num_steps: int, *, num_seeds: int
) -> Convergence:
    key = systems.key | {"batch_size": batch_size, "step_size": step_size, "num_steps": num_steps}
    runs = [
        systems.task.run.unit(
            "lissa/fig2_scores",
            key | {"repetition": repetition},
            partial(_scores, systems, batch_size, step_size, num_steps, repetition),
            version=1,
            about=f"LiSSA {systems.task.label}, |B| = {batch_size}, run {repetition}",
        )["scores"].double()
        for repetition in range(num_seeds * num_runs)
    ]
    by_seed = torch.stack(runs).unflatten(0, (num_seeds, num_runs))
    return Convergence(batch_size, num_runs, recorded_steps(num_steps), by_seed.mean(1), by_seed[:, 0])


def _scores(
    systems: Systems, batch_size: int, step_size: float, num_steps: int, repetition: int
) -> dict[str, Any]:
    """Return scores up to sign at the recorded steps, (S, M, K); they may overflow, as the paper's Eq. 6 may."""
    wanted = set(recorded_steps(num_steps))
    bar = systems.task.run.progress(num_steps, f"LiSSA {systems.task.label}, |B| = {batch_size}, run {repetition}")
    scores: list[Tensor] = []

    def watch(state: LissaState) -> None:
        bar.update()
        if state.num_steps in wanted:
            scores.append((systems.test_gradients @ state.x).float())

    solver = Lissa(
        step_size, batch_size, num_steps, check_residual=False, raise_on_divergence=False, callback=watch
    )
    generator = systems.task.run.generator("fig2 lissa", systems.task.seed_name, batch_size, repetition)
    solution = solver.solve(systems.damped, systems.right_hand_sides, generator=generator)
    systems.task.run.add_matvecs(solution.num_matvecs)
    return {"scores": torch.stack(scores)}
