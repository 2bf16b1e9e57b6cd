"""LiSSA with C = 2, with C measured, and by importance, against the exact solution of the same systems."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from curvlab.lab import unit
from curvlab.solvers import (
    BlockConjugateGradient,
    DivergenceError,
    Lissa,
    LissaRecipe,
    lissa_hyperparameters,
    measure_recipe,
)
from curvlab.solvers.lissa import LissaState
from experiments.shared.systems import Systems
from experiments.shared.trajectory import Stride, Trajectory

GROWTH = 1.2  # between recorded steps
PAST_DIVERGENCE = 6  # the trajectory of a run that diverges is shown for so many times the steps to the error


def compare_recipes(systems: Systems, *, reference_rtol: float, num_seeds: int = 1) -> dict[str, Any]:
    """Return what was measured, and the trajectories of LiSSA by three recipes; units of work.

    `paper` has C = 2, `auto` C measured, `importance` C = 2 for batches drawn by importance. `again`: `paper` and
    `importance` with other sequences of batches, so that there are `num_seeds` of both; C measured takes too long.

    Keys: `trace`, `largest_eigenvalue`, `constant`, `importance_constant` (certified, or measured where traces are
    estimates), `reference_residual`, and for each recipe a mapping with batch_size, num_steps, step_size,
    `diverged` (the step, 0: none), `message`, `steps`, `errors` (S, K) and `correlations` (S, K) of the iterates
    (past divergence, too), the same of the answer (`final_errors`, ...), `promised` (K,) (the stationary error
    promised, from the answer), `estimated` (K,) (from its two halves) and `passes` (over the data, a system, with
    its set-up).
    """
    reference = exact_solutions(systems, rtol=reference_rtol)
    recipe, by_importance = _recipe(systems), _importance_recipe(systems)
    result: dict[str, Any] = {name: recipe[name] for name in ("trace", "largest_eigenvalue", "constant")}
    result |= {"reference_residual": reference["residual"], "importance_constant": by_importance["constant"]}
    for name, own in {"paper": recipe, "auto": recipe, "importance": by_importance}.items():
        key = {"reference_rtol": reference_rtol, "recipe": name}
        key |= {"past_divergence": PAST_DIVERGENCE} if name == "paper" else {}
        again = [{"repetition": seed} for seed in range(1, 1 if name == "auto" else num_seeds)]
        solutions = reference["solutions"]
        found = [_trajectory(systems, own, solutions, **key, **repetition) for repetition in [{}, *again]]
        result[name], result["again"] = found[0], result.get("again", {}) | {name: found[1:]}
    return result


@unit("lissa/exact", version=1, about="exact solutions, damping {damping:.3g}")
def exact_solutions(systems: Systems, /, *, rtol: float, **_: Any) -> dict[str, Any]:
    """Return `solutions` (P, K) and their largest `residual`, by block CG in double precision; a unit of work."""
    run = systems.run
    bar = run.progress(0, f"exact solutions {systems.task.seed_name}")
    solver = BlockConjugateGradient(rtol, callback=lambda _: bar.update())
    solution = solver.solve(systems.in_double_precision().damped, systems.right_hand_sides.double())
    run.add_matvecs(solution.num_matvecs)
    return {"solutions": solution.x.float(), "residual": float(solution.residual.max())}


@unit("lissa/recipe", version=1, about="recipe, {seed_name}, damping {damping:.3g}")
def _recipe(systems: Systems, /, **_: Any) -> dict[str, Any]:
    generator = systems.run.generator("recipe", systems.task.seed_name)
    found = measure_recipe(systems.operator, systems.damping, sampling="uniform", generator=generator)
    return _described(systems, found)


@unit("lissa/importance_recipe", version=1, about="recipe by importance, {seed_name}, damping {damping:.3g}")
def _importance_recipe(systems: Systems, /, **_: Any) -> dict[str, Any]:
    generator = systems.run.generator("importance recipe", systems.task.seed_name)
    found = measure_recipe(systems.operator, systems.damping, sampling="importance", generator=generator)
    return _described(systems, found) | {"weights": found.probabilities, "certified": found.certified}


def _described(systems: Systems, found: LissaRecipe) -> dict[str, Any]:
    systems.run.add_matvecs(found.num_matvecs)
    return {
        "trace": found.trace.value,
        "largest_eigenvalue": found.largest_eigenvalue,
        "constant": found.constant,
        "full_matvecs": found.num_matvecs - found.num_sampled_matvecs,
        "sampled_passes": found.num_sampled_examples / systems.operator.num_examples,
        **dataclasses.asdict(found.settings),
    }


@unit("lissa/recipe_trajectory", version=1, about="LiSSA by recipe '{recipe}', {seed_name}, damping {damping:.3g}")
def _trajectory(
    systems: Systems, measured: dict[str, Any], reference: Tensor, /, *, recipe: str, repetition: int = 0, **_: Any
) -> dict[str, Any]:
    solver = _solver(systems, recipe, measured)
    bar = systems.run.progress(solver.num_steps, f"LiSSA ({recipe}) {systems.task.seed_name}")
    recorder = _Recorder(systems, reference, bar.update)
    solver = dataclasses.replace(solver, callback=recorder)
    stream = ("lissa", systems.task.seed_name, recipe, *([repetition] if repetition else []))
    generator = systems.run.generator(*stream)
    diverged, message, converged = 0, "", False
    estimated = torch.full((len(systems.sources[1]),), torch.nan)
    try:
        solution = solver.solve(systems.damped, systems.right_hand_sides, generator=generator)
        answer, converged = solution.x, solution.converged
        if solution.error is not None and not converged:
            message = f"not converged: the estimated error is {float(solution.error.max()):.2g}"
        estimated = solution.error if solution.error is not None else estimated
        promised = solver.stationary_error(systems.damped, answer, generator=generator)
    except DivergenceError as error:
        diverged, message, answer = error.step, str(error), recorder.last
        promised = torch.full((len(systems.sources[1]),), torch.inf)
        recorder = _past_divergence(systems, stream, solver, reference, error.step)
    num_steps = diverged or solver.num_steps
    # C = 2 is assumed, not measured: its set-up is the spectrum alone.
    set_up = measured["full_matvecs"] + (0.0 if recipe == "paper" else measured["sampled_passes"])
    passes = num_steps * solver.batch_size / systems.operator.num_examples
    final_errors, final_correlations = recorder.trajectory.compare(answer)
    found = recorder.trajectory.as_tensors()
    return {
        "batch_size": solver.batch_size,
        "num_steps": solver.num_steps,
        "step_size": solver.step_size,
        "converged": converged,
        "diverged": diverged,
        "message": message,
        "steps": found["work"],
        "errors": found["errors"],
        "correlations": found["correlations"],
        "final_errors": final_errors,
        "final_correlations": final_correlations,
        "promised": promised,
        "passes": passes + set_up / len(systems.sources[1]),
        "estimated": estimated,
    }


def _past_divergence(
    systems: Systems, stream: tuple[Any, ...], solver: Lissa, reference: Tensor, diverged: int
) -> _Recorder:
    """Run again on the same batches without the check that stopped it, to show what that saves from."""
    num_steps = min(solver.num_steps, PAST_DIVERGENCE * diverged)
    bar = systems.run.progress(num_steps, f"LiSSA {systems.task.seed_name}, past divergence")
    recorder = _Recorder(systems, reference, bar.update)
    unchecked = dataclasses.replace(
        solver,
        num_steps=num_steps,
        average_last=0,
        error_rtol=None,
        check_residual=False,
        raise_on_divergence=False,
        callback=recorder,
    )
    unchecked.solve(systems.damped, systems.right_hand_sides, generator=systems.run.generator(*stream))
    return recorder


def _solver(systems: Systems, name: str, recipe: dict[str, Any]) -> Lissa:
    """Return LiSSA with the recommendation of Corollary 1, or with what `Lissa.auto` makes of the measurements."""
    if name != "paper":
        # As Lissa.auto, whose measurements are those of the unit before.
        settings = {key: recipe[key] for key in ("step_size", "batch_size", "num_steps")}
        averaged = max(1, recipe["num_steps"] // 3)
        return Lissa(**settings, average_last=averaged, error_rtol=0.2, probabilities=recipe.get("weights"))
    settings = dataclasses.asdict(
        lissa_hyperparameters(
            trace=max(recipe["trace"], recipe["largest_eigenvalue"]),
            largest_eigenvalue=recipe["largest_eigenvalue"],
            damping=systems.damping,
        )
    )
    settings["batch_size"] = math.ceil(settings["batch_size"] / systems.task.predictions_per_example)
    return Lissa(**settings)


class _Recorder:
    """Follows LiSSA: its iterates at steps that grow by a fifth, and the last one."""

    def __init__(self, systems: Systems, reference: Tensor, advance: Callable[[], Any]) -> None:
        self.trajectory = Trajectory(reference.to(systems.test_gradients), systems.test_gradients)
        self.stride, self.advance = Stride(GROWTH), advance
        self.last = torch.zeros_like(self.trajectory.reference)

    def __call__(self, state: LissaState) -> None:
        self.advance()
        self.last = state.x
        if self.stride.wants(state.num_steps):
            self.trajectory.add(state.num_steps, state.x)
