"""LiSSA and Monte-Carlo estimates with batches drawn uniformly and by importance."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig
from torch import Tensor

from curvlab.curvature import (
    GaussNewtonOperator,
    ImportanceOperator,
    certified_constant,
    exact_traces,
    importance_probabilities,
    output_curvatures,
)
from curvlab.lab import ClaimResult, ClaimSheet, Computed, Run, bootstrap_interval, exact, out_of_reach, unit
from curvlab.lab import judge as verdict
from curvlab.linalg import identity
from curvlab.solvers import BlockConjugateGradient, DivergenceError, Lissa, lissa_hyperparameters, measure_constant
from curvlab.solvers.lissa import LissaState
from experiments.benchmarks.parts import tasks_of
from experiments.benchmarks.solvers.preconditioners import FittedSystems, fitted_systems
from experiments.shared.task import TrainedTask
from experiments.shared.trajectory import Stride

Curvature = dict[str, Tensor]  # `traces` and `outputs` of each example, (N,)
GROWTH = 1.3  # between recorded steps
PAST_DIVERGENCE = 6  # a run that diverges is shown for so many times the steps until that is noticed
WAYS = {"uniform": "uniform", "traces": "by traces", "outputs": "by 1 - Σp²"}
FLOOR, UNIFORM = 0.01, 0.1
BATCH_TRACE, TRACE, SQUARE = "tr(G), batch alone", "tr(G), batch and probe", "‖G‖²_F, two batches, one probe"
COLUMNS = ("batch_size", "step_size", "num_steps", "constant", "certified", "outcome", "error", "exact_rate")


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return LiSSA's ends and trajectories, and estimates from batches."""
    tables: dict[str, list[dict[str, Any]]] = {"lissa": [], "lissa_steps": [], "estimates": []}
    for each in tasks_of(run, cfg, "preconditioners"):
        task, settings = each.trained(), each.settings
        solved = fitted_systems(task)
        systems = replace(solved, damping=settings.lissa_damping_factor * solved.damping)
        curvature, num = _curvature(task, systems), {"num": settings.num_lissa}
        solutions = _exact(systems, **num, rtol=settings.reference_rtol)["solutions"]
        about = {"fitted": settings.fitted, "train_loss": task.train_loss, "damping": solved.damping}
        for way, label in WAYS.items():
            asked = num | {"time_constants": settings.num_time_constants, "way": way}
            found, shared = _lissa(systems, curvature, solutions, **asked), {"task": task.label, "sampling": label}
            row = shared | {"lissa_damping": systems.damping} | shares(curvature["traces"])
            tables["lissa"].append(row | {name: found[name] for name in COLUMNS} | about)
            for step, error in zip(found["steps"], found["errors"], strict=True):
                passes = step * found["batch_size"] / task.num_train
                tables["lissa_steps"].append(shared | {"step": step, "passes": passes, "error": error})
            estimates = _estimate_rows(systems, curvature, way)
            tables["estimates"] += [shared | row | {"fitted": settings.fitted} for row in estimates]
    return {name: pd.DataFrame(rows) for name, rows in tables.items() if rows}


def shares(traces: Tensor) -> dict[str, float]:
    """Return which part of the trace the twentieth and the sixth of the examples with most hold."""
    order = traces.sort(descending=True).values
    total = float(order.sum())
    return {f"top_1_{k}": float(order[: max(1, len(order) // k)].sum()) / total for k in (20, 6)}


@unit("preconditioners/scores", version=1, about="traces of {seed_name}")
def _curvature(task: TrainedTask, systems: FittedSystems, /, **_: Any) -> Curvature:
    """Return each example's tr(G_i), and that of its outputs."""
    operator: Any = systems.operator  # Gauss-Newton
    return {"traces": exact_traces(operator), "outputs": output_curvatures(operator)}


@unit("preconditioners/exact", version=1, about="exact solutions {seed_name}")
def _exact(systems: FittedSystems, /, *, num: int, rtol: float, **_: Any) -> dict[str, Any]:
    b = systems.right_hand_sides[:, :num].double().contiguous()
    solution = BlockConjugateGradient(rtol).solve(systems.in_double_precision().damped, b)
    systems.run.add_matvecs(solution.num_matvecs)
    return {"solutions": solution.x.float()}


def _probabilities(curvature: Curvature, way: str) -> Tensor:
    """Return q for a way to sample, (N,)."""
    if way == "traces":
        return importance_probabilities(curvature["traces"], floor=FLOOR)
    if way == "outputs":
        return importance_probabilities(curvature["outputs"], uniform=UNIFORM)
    return torch.full_like(curvature["traces"], 1 / len(curvature["traces"]))


def _operator(systems: FittedSystems, way: str, q: Tensor) -> GaussNewtonOperator | ImportanceOperator:
    operator: Any = systems.operator
    return operator if way == "uniform" else ImportanceOperator(operator, q)


# ------------------------------------------------------------------------------------ LiSSA
@unit("preconditioners/lissa", version=1, about="LiSSA by {way}, {seed_name}")
def _lissa(
    systems: FittedSystems, curvature: Curvature, solutions: Tensor, /, *, num: int, way: str, **asked: Any
) -> dict[str, Any]:
    """Return how LiSSA ended, its measured and certified C, and its errors by step."""
    task, damping, b = systems.task, systems.damping, systems.right_hand_sides[:, :num].contiguous()
    q, largest = _probabilities(curvature, way), systems.spectrum["value"]
    operator, trace = _operator(systems, way, q), float(curvature["traces"].mean())
    spectrum = {"trace": max(trace, largest), "largest_eigenvalue": largest}
    settings = lissa_hyperparameters(**spectrum, damping=damping, num_time_constants=asked["time_constants"])
    generator = task.generator("preconditioners/lissa", way)
    directions = torch.cat([systems.spectrum["vector"][:, None], operator.randn(3, generator), b[:, :1]], 1)
    measured = measure_constant(operator, directions, trace=trace, batch_size=64, generator=generator)
    recorder = _Recorder(solutions)
    num_steps = min(settings.num_steps, task.settings.max_lissa_steps)
    settings = replace(settings, num_steps=num_steps)
    solver = Lissa(**asdict(settings), callback=recorder, check_residual=False)
    damped = operator + damping * identity
    outcome, last, error = f"all {num_steps} steps", num_steps, math.inf
    try:
        error = recorder.error(solver.solve(damped, b, generator=generator).x)
    except DivergenceError as divergence:
        outcome, last = f"diverges at step {divergence.step}", divergence.step
        # Once more without the check, a few times as long, to show what it saves from.
        recorder = _Recorder(solutions)
        longer = min(num_steps, PAST_DIVERGENCE * divergence.step)
        unchecked = replace(solver, num_steps=longer, callback=recorder, raise_on_divergence=False)
        unchecked.solve(damped, b, generator=generator)
    rate, certified = (1 - settings.step_size * damping) ** last, certified_constant(curvature["traces"], q)
    found = {"constant": float(measured.max()), "certified": certified, "outcome": outcome, "error": error}
    return asdict(settings) | found | {"exact_rate": rate, "steps": recorder.steps, "errors": recorder.errors}


# ------------------------------------------------------------------------------------ estimates
def _estimate_rows(systems: FittedSystems, curvature: Curvature, way: str) -> list[dict[str, Any]]:
    """Return one row for each draw: tr of a batch, its Hutchinson form, its sketch form.

    A draw is one batch G_1, an independent one G_2 and a Gaussian probe v. All three are unbiased:

        1/B Σ_b tr(G_b) / (N q_b),  vᵀG_1 v for tr(G),  vᵀG_1 G_2 v for ‖G‖²_F,

    the last being what `frobenius_norm(batch_size=...)` averages for the sketches of lissa-tab3. `exact_sd` is
    the standard deviation of the first by its formula: 0 where q_i is proportional to tr(G_i).
    """
    settings, traces = systems.task.settings, curvature["traces"]
    size, asked = settings.estimate_batch_size, {"num_draws": settings.num_estimates, "way": way}
    found = _draws(systems.task, systems, curvature, batch_size=size, **asked)
    spread = batch_trace_deviation(traces, _probabilities(curvature, way)) / math.sqrt(size)
    rows = []
    for quantity, values in found["values"].items():
        row = {"quantity": quantity, "batch_size": size, "trace": float(traces.mean())}
        row["exact_sd"] = spread if quantity == BATCH_TRACE else math.nan
        rows += [row | {"draw": draw, "value": value} for draw, value in enumerate(values)]
    return rows


@unit("preconditioners/estimates", version=1, about="Monte-Carlo estimates by {way}, {seed_name}")
def _draws(
    task: TrainedTask, systems: FittedSystems, curvature: Curvature, /, *, way: str, batch_size: int, **key: Any
) -> dict[str, Any]:
    q = _probabilities(curvature, way)
    operator, generator = _operator(systems, way, q), task.generator("preconditioners/estimates", way)
    ratios = curvature["traces"] / (len(q) * q)
    values: dict[str, list[float]] = {BATCH_TRACE: [], TRACE: [], SQUARE: []}
    for _ in range(key["num_draws"]):
        drawn = torch.multinomial(q, batch_size, replacement=True, generator=generator)
        probe = operator.randn(1, generator)
        first, second = (operator.sample(batch_size, generator) @ probe for _ in range(2))
        values[BATCH_TRACE].append(float(ratios[drawn].mean()))
        values[TRACE].append(float((probe * first).sum()))
        values[SQUARE].append(float((first * second).sum()))
    return {"values": values}


def batch_trace_deviation(traces: Tensor, q: Tensor) -> float:
    """Return [Σ_i tr(G_i)² / (N² q_i) - tr(G)²]^½, the deviation of tr(G_i) / (N q_i) for i drawn by q."""
    ratios = traces / (len(traces) * q)
    return math.sqrt(float((q * (ratios - traces.mean()).square()).sum()))


class _Recorder:
    """The median relative error of the iterates at steps that grow by a third."""

    def __init__(self, solutions: Tensor) -> None:
        self.solutions = solutions
        self.steps: list[int] = []
        self.errors: list[float] = []
        self._stride = Stride(GROWTH)

    def __call__(self, state: LissaState) -> None:
        if self._stride.wants(state.num_steps):
            self.steps.append(state.num_steps)
            self.errors.append(self.error(state.x))

    def error(self, u: Tensor) -> float:
        """Return the median over systems of ‖u - x‖ / ‖x‖."""
        solutions = self.solutions.to(u)
        return float(((u - solutions).norm(dim=0) / solutions.norm(dim=0)).median())


# ------------------------------------------------------------------------------------ claims
CLAIMS = ("certificate", "importance", "trace-estimates", "sketch-estimates")


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge the certificate, LiSSA's rate and the estimates' spread on every fitted task."""
    table, results = computed["lissa"], []
    for task, own in table[table.fitted].groupby("task", sort=False):
        results += _judged_lissa(str(task), own.set_index("sampling"), claims)
        for name, quantity in {"trace-estimates": TRACE, "sketch-estimates": SQUARE}.items():
            claim = claims.claim(name, of=str(task))
            estimates = computed["estimates"][lambda found, task=task: found.task == task]
            asked = estimates[estimates.quantity == quantity]
            values = [asked[asked.sampling == WAYS[way]].value.to_numpy() for way in ("traces", "uniform")]
            generator = np.random.default_rng(0)
            interval = bootstrap_interval((*values,), _ratio, unit="draws", generator=generator)
            batches = estimates[estimates.quantity == BATCH_TRACE]
            shares_of = 100 * batches.groupby("sampling").exact_sd.first() / float(batches.trace.iloc[0])
            why = (
                f"By formula a batch's own trace varies by {shares_of[WAYS['uniform']]:.2g} % of tr(G) drawn "
                f"uniformly, by {shares_of[WAYS['traces']]:.2g} % drawn by traces; what is left is the probe's."
            )
            results.append(verdict(claim, _ratio(*values), interval, if_not_reproduced=why))
    return results


def _ratio(values: np.ndarray, uniform: np.ndarray) -> float:
    return float(np.std(values, ddof=1) / np.std(uniform, ddof=1))


def _judged_lissa(task: str, own: pd.DataFrame, claims: ClaimSheet) -> list[ClaimResult]:
    rows: dict[str, Any] = {str(way): row for way, row in own.iterrows()}
    traces, uniform = rows[WAYS["traces"]], rows[WAYS["uniform"]]
    why = f"Over the directions tried, of 4,096 drawn examples, C is {traces.constant:.3g}."
    certified = float(traces.certified)
    found = [verdict(claims.claim("certificate", of=task), certified, exact(certified), if_not_reproduced=why)]
    claim = claims.claim("importance", of=task)
    if not str(uniform.outcome).startswith("diverges"):
        reason = f"Uniform batches of {uniform.batch_size} do not diverge here: C is {uniform.constant:.3g}."
        return [*found, out_of_reach(claim, reason)]
    rate = float(traces.error) / float(traces.exact_rate)
    why = (
        f"The error is {traces.error:.3g} after {traces.num_steps} steps, the slowest component of the exact "
        f"recursion {traces.exact_rate:.3g}: noise of the batches, or a start that other components hold."
    )
    return [*found, verdict(claim, rate, exact(rate), if_not_reproduced=why)]
