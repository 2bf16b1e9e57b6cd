"""Errors of a solver's iterates against their cost, in products with the whole data for each system."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from curvlab.lab import unit
from curvlab.solvers import (
    BlockConjugateGradient,
    ConjugateGradient,
    DivergenceError,
    Lissa,
    default_solver,
    measure_recipe,
)
from curvlab.solvers.lissa import LissaState
from experiments.pbrf.appg.systems import NetworkSystems
from experiments.pbrf.solvers import SCALES
from experiments.shared.trajectory import CountedOperator, Counter, Stride, Trajectory

GROWTH = 1.25  # between the steps whose iterates are looked at
METHODS = {
    "cg": "CG",
    "block_cg": "block CG",
    "default": "default solver",
    "lissa": "LiSSA",
    "lissa_auto": "Lissa.auto",
}


def trajectory(systems: NetworkSystems, method: str) -> dict[str, Any]:
    """Return what a method gives, a unit: `curves` by name, and for LiSSA `scale`, `batch_size` and `num_steps`.

    A curve has `work` (S,), and `errors` and `correlations` (S, K) of its recorded iterates.
    """
    settings = systems.task.settings
    own, reference = settings["lissa" if method.startswith("lissa") else "cg"], settings.reference[systems.matrix]
    key = {"method": method, "reference": dict(reference), "settings": dict(own)}
    return _trajectory(systems, systems.reference["solutions"], **key)


@unit("pbrf/appg_trajectory", version=1, about="{method}, {seed_name}, {curvature}, seed {network_seed}")
def _trajectory(systems: NetworkSystems, exact: Tensor, /, *, method: str, **_: Any) -> dict[str, Any]:
    gradients = systems.test_gradients.double()
    curve = Trajectory(exact.to(gradients), gradients)
    settings, run = systems.task.settings, systems.run
    generator = run.generator("pbrf appg", settings.seed_name, systems.task.seed, systems.matrix, method)
    if method == "lissa":
        return _lissa(systems, curve, settings.lissa, generator)
    if method == "lissa_auto":
        return _lissa_auto(systems, curve, generator)
    return _krylov(systems, method, curve, settings.cg, generator)


def _krylov(
    systems: NetworkSystems, method: str, curve: Trajectory, settings: DictConfig, generator: torch.Generator
) -> dict[str, Any]:
    counter, stride = Counter(), Stride(GROWTH)
    size, num = systems.right_hand_sides.shape

    def watch(state: Any) -> None:
        if stride.wants(state.num_steps):
            curve.add(counter.work / num, state.x)

    limits: dict[str, Any] = {"rtol": settings.rtol, "max_steps": settings.max_steps}
    solver: Any = {
        "cg": ConjugateGradient(**limits, callback=watch),
        "block_cg": BlockConjugateGradient(**limits, callback=watch),
        "default": dataclasses.replace(
            default_solver(size, num, rtol=settings.rtol), max_steps=settings.max_steps, callback=watch
        ),
    }[method]
    counted = CountedOperator(systems.damped, counter)
    solution = solver.solve(counted, systems.right_hand_sides, generator=generator)
    systems.run.add_matvecs(solution.num_matvecs)
    return {"curves": {METHODS[method]: curve.as_tensors()}, "residual": float(solution.residual.max())}


def _lissa(
    systems: NetworkSystems, curve: Trajectory, settings: DictConfig, generator: torch.Generator
) -> dict[str, Any]:
    """Run Eq. 49 with each scaling in turn until no repeat diverges."""
    tried = []
    for scale in SCALES:
        try:
            found = _repeats(systems, curve, settings, float(scale), generator)
        except DivergenceError as error:
            tried.append(f"{scale}: diverges at step {error.step}")
            continue
        sizes = {"batch_size": settings.batch_size, "num_steps": settings.num_steps}
        return {"curves": found, "scale": float(scale), "tried": tried} | sizes
    return {"curves": {}, "scale": float("nan"), "tried": tried}


def _repeats(
    systems: NetworkSystems, curve: Trajectory, settings: DictConfig, scale: float, generator: torch.Generator
) -> dict[str, Any]:
    """Return the curves of the first repeat and of the mean over all, for R times the work."""
    steps = recorded_steps(settings.num_steps)
    wanted, share = set(steps), settings.batch_size / systems.operator.num_examples
    sums: dict[int, Tensor] = {}
    single, mean = (Trajectory(curve.reference, curve.test_gradients) for _ in range(2))

    def watch(state: LissaState) -> None:
        if (step := state.num_steps) in wanted:
            sums[step] = sums[step] + state.x if step in sums else state.x.clone()

    solver = Lissa(1 / scale, settings.batch_size, settings.num_steps, check_residual=False, callback=watch)
    for repeat in range(settings.num_repeats):
        solution = solver.solve(systems.damped, systems.right_hand_sides, generator=generator)
        systems.run.add_matvecs(solution.num_matvecs)
        if repeat == 0:
            for step in steps:
                single.add(step * share, sums[step])
    for step in steps:
        mean.add(settings.num_repeats * step * share, sums[step] / settings.num_repeats)
    return {"LiSSA, 1 run": single.as_tensors(), f"LiSSA, {settings.num_repeats} runs": mean.as_tensors()}


def _lissa_auto(systems: NetworkSystems, curve: Trajectory, generator: torch.Generator) -> dict[str, Any]:
    """Run `Lissa.auto`; iterates, and last the mean that it answers with."""
    size, num = systems.operator.num_examples, systems.right_hand_sides.shape[1]
    recipe = measure_recipe(systems.operator, systems.damping, sampling="uniform", generator=generator)
    solver = Lissa.from_recipe(recipe)
    full = recipe.num_matvecs - recipe.num_sampled_matvecs
    set_up = (full + recipe.num_sampled_examples / size) / num  # shared by all systems
    stride = Stride(GROWTH)

    def watch(state: LissaState) -> None:
        if stride.wants(state.num_steps):
            curve.add(set_up + state.num_steps * solver.batch_size / size, state.x)

    chosen = dataclasses.replace(solver, callback=watch)
    solution = chosen.solve(systems.damped, systems.right_hand_sides, generator=generator)
    systems.run.add_matvecs(solution.num_matvecs)
    curve.add(set_up + solver.num_steps * solver.batch_size / size, solution.x)
    sizes = {"batch_size": solver.batch_size, "num_steps": solver.num_steps, "scale": 1 / solver.step_size}
    return {"curves": {METHODS["lissa_auto"]: curve.as_tensors()}, "tried": []} | sizes


def recorded_steps(num_steps: int) -> list[int]:
    """Return the steps that are looked at, the last among them."""
    stride = Stride(GROWTH)
    return [step for step in range(1, num_steps + 1) if stride.wants(step) or step == num_steps]
