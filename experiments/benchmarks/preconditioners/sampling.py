"""LiSSA with batches drawn uniformly and by importance: C, divergence, distance from the solution."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvlab.curvature import (
    GaussNewtonOperator,
    ImportanceOperator,
    certified_constant,
    exact_traces,
    importance_probabilities,
    output_curvatures,
)
from curvlab.linalg import identity
from curvlab.solvers import DivergenceError, Lissa, lissa_hyperparameters, measure_constant
from curvlab.solvers.lissa import LissaState
from experiments.benchmarks.preconditioners.systems import Systems

GROWTH = 1.3  # between recorded steps
PAST_DIVERGENCE = 6  # a run that diverges is shown for so many times the steps until that is noticed
WAYS = {"uniform": "uniform", "traces": "by traces", "outputs": "by 1 - Σp²"}
FLOOR, UNIFORM = 0.01, 0.1


def sampling_tables(systems: Systems) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return one row for each way to sample, and the trajectories."""
    scores = batch_scores(systems)
    solutions = systems.solutions()
    rows, steps = [], []
    for way, label in WAYS.items():
        settings = {"num": systems.settings.num_lissa, "time_constants": systems.settings.num_time_constants}
        about = f"LiSSA {label}, {systems.task.label}"
        compute = partial(_run, systems, way, scores, solutions)
        unit = systems.key | settings | {"way": way, "damping": systems.lissa_damping}
        found = systems.run.unit("preconditioners/lissa", unit, compute, version=1, about=about)
        shared = {"task": systems.task.label, "sampling": label}
        single = (
            "batch_size",
            "step_size",
            "num_steps",
            "constant",
            "certified",
            "outcome",
            "error",
            "exact_rate",
        )
        rows.append(
            shared
            | {"lissa_damping": systems.lissa_damping}
            | shares(scores["traces"])
            | {name: found[name] for name in single}
        )
        steps += [
            shared | {"step": step, "passes": step * found["batch_size"] / systems.task.num_train, "error": error}
            for step, error in zip(found["steps"], found["errors"], strict=True)
        ]
    return rows, steps


def batch_scores(systems: Systems) -> dict[str, Tensor]:
    """Return tr(G_i) and the output curvatures of all examples, (N,) each; a unit."""
    compute = partial(_scores, systems)
    about = f"traces of {systems.task.label}"
    return systems.run.unit("preconditioners/scores", systems.task.key, compute, version=1, about=about)


def shares(traces: Tensor) -> dict[str, float]:
    """Return which part of the trace the twentieth and the sixth of the examples with most hold."""
    order = traces.sort(descending=True).values
    total = float(order.sum())
    return {f"top_1_{k}": float(order[: max(1, len(order) // k)].sum()) / total for k in (20, 6)}


def _scores(systems: Systems) -> dict[str, Tensor]:
    return {"traces": exact_traces(systems.operator), "outputs": output_curvatures(systems.operator)}


def probabilities(way: str, scores: dict[str, Tensor]) -> Tensor:
    """Return q for a way to sample, (N,)."""
    if way == "traces":
        return importance_probabilities(scores["traces"], floor=FLOOR)
    if way == "outputs":
        return importance_probabilities(scores["outputs"], uniform=UNIFORM)
    return torch.full_like(scores["traces"], 1 / len(scores["traces"]))


def _run(systems: Systems, way: str, scores: dict[str, Tensor], solutions: Tensor) -> dict[str, Any]:
    q = probabilities(way, scores)
    operator: GaussNewtonOperator | ImportanceOperator = systems.operator
    if way != "uniform":
        operator = ImportanceOperator(systems.operator, q)
    trace, largest = float(scores["traces"].mean()), systems.spectrum["value"]
    settings = lissa_hyperparameters(
        trace=max(trace, largest),
        largest_eigenvalue=largest,
        damping=systems.lissa_damping,
        num_time_constants=systems.settings.num_time_constants,
    )
    b = systems.right_hand_sides[:, : solutions.shape[1]]
    generator = systems.run.generator("preconditioners/lissa", systems.task.seed_name, way)
    directions = torch.cat([systems.spectrum["vector"][:, None], operator.randn(3, generator), b[:, :1]], 1)
    measured = measure_constant(operator, directions, trace=trace, batch_size=64, generator=generator)
    recorder = _Recorder(solutions)
    num_steps = min(settings.num_steps, systems.settings.max_lissa_steps)
    settings = dataclasses.replace(settings, num_steps=num_steps)
    solver = Lissa(**dataclasses.asdict(settings), callback=recorder, check_residual=False)
    outcome, last = f"all {num_steps} steps", num_steps
    try:
        answer = solver.solve(operator + systems.lissa_damping * identity, b, generator=generator).x
    except DivergenceError as divergence:
        outcome, last, answer = f"diverges at step {divergence.step}", divergence.step, torch.zeros_like(b)
        # Once more without the check, a few times as long, to show what it saves from.
        recorder = _Recorder(solutions)
        longer = min(num_steps, PAST_DIVERGENCE * divergence.step)
        unchecked = dataclasses.replace(solver, num_steps=longer, callback=recorder, raise_on_divergence=False)
        unchecked.solve(operator + systems.lissa_damping * identity, b, generator=generator)
    return dataclasses.asdict(settings) | {
        "constant": float(measured.max()),
        "certified": certified_constant(scores["traces"], q),
        "outcome": outcome,
        "error": recorder.error(answer) if not outcome.startswith("diverges") else math.inf,
        "exact_rate": (1 - settings.step_size * systems.lissa_damping) ** last,
        "steps": recorder.steps,
        "errors": recorder.errors,
    }


class _Recorder:
    """The median relative error of the iterates at steps that grow by a third."""

    def __init__(self, solutions: Tensor) -> None:
        self.solutions = solutions
        self.steps: list[int] = []
        self.errors: list[float] = []
        self._next = 1.0

    def __call__(self, state: LissaState) -> None:
        step = state.num_steps
        if step >= self._next:
            self._next = max(step + 1, step * GROWTH)
            self.steps.append(step)
            self.errors.append(self.error(state.x))

    def error(self, u: Tensor) -> float:
        """Return the median over systems of ‖u - x‖ / ‖x‖."""
        solutions = self.solutions.to(u)
        return float(((u - solutions).norm(dim=0) / solutions.norm(dim=0)).median())
