"""LiSSA and Monte-Carlo estimates with batches drawn uniformly and by importance."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from functools import partial
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
from curvlab.lab import ClaimResult, ClaimSheet, Computed, Run, bootstrap_interval, exact, out_of_reach
from curvlab.lab import judge as verdict
from curvlab.linalg import identity
from curvlab.solvers import BlockConjugateGradient, DivergenceError, Lissa, lissa_hyperparameters, measure_constant
from curvlab.solvers.lissa import LissaState
from experiments.benchmarks.solvers.preconditioners import fitted_systems, systems_key
from experiments.shared.systems import Systems
from experiments.shared.task import TrainedTask
from experiments.shared.trajectory import Stride

GROWTH = 1.3  # between recorded steps
PAST_DIVERGENCE = 6  # a run that diverges is shown for so many times the steps until that is noticed
WAYS = {"uniform": "uniform", "traces": "by traces", "outputs": "by 1 - Σp²"}
FLOOR, UNIFORM = 0.01, 0.1
BATCH_TRACE, TRACE, SQUARE = "tr(G), batch alone", "tr(G), batch and probe", "‖G‖²_F, two batches, one probe"
COLUMNS = ("batch_size", "step_size", "num_steps", "constant", "certified", "outcome", "error", "exact_rate")


def compute(run: Run, tasks: Iterable[tuple[TrainedTask, DictConfig]]) -> dict[str, pd.DataFrame]:
    """Return LiSSA's ends and trajectories, and estimates from batches."""
    tables: dict[str, list[dict[str, Any]]] = {"lissa": [], "lissa_steps": [], "estimates": []}
    for task, settings in tasks:
        solved, spectrum = fitted_systems(run, task, settings)
        own = _Sampled(run, solved, settings, spectrum)
        about = {"fitted": settings.fitted, "train_loss": task.train_loss, "damping": solved.damping}
        for way, label in WAYS.items():
            found, shared = own.lissa(way), {"task": task.label, "sampling": label}
            row = shared | {"lissa_damping": own.systems.damping} | shares(own.scores["traces"])
            tables["lissa"].append(row | {name: found[name] for name in COLUMNS} | about)
            for step, error in zip(found["steps"], found["errors"], strict=True):
                passes = step * found["batch_size"] / task.num_train
                tables["lissa_steps"].append(shared | {"step": step, "passes": passes, "error": error})
            tables["estimates"] += [shared | row | {"fitted": settings.fitted} for row in own.estimate_rows(way)]
    return {name: pd.DataFrame(rows) for name, rows in tables.items() if rows}


def shares(traces: Tensor) -> dict[str, float]:
    """Return which part of the trace the twentieth and the sixth of the examples with most hold."""
    order = traces.sort(descending=True).values
    total = float(order.sum())
    return {f"top_1_{k}": float(order[: max(1, len(order) // k)].sum()) / total for k in (20, 6)}


class _Sampled:
    """One task: LiSSA's systems, whose damping is a multiple of the others', and the examples' curvature."""

    def __init__(self, run: Run, systems: Systems, settings: DictConfig, spectrum: dict[str, Any]) -> None:
        self.run, self.task, self.settings, self.spectrum = run, systems.task, settings, spectrum
        self.systems = dataclasses.replace(systems, damping=settings.lissa_damping_factor * systems.damping)
        self.key = systems_key(self.systems)
        self.b = self.systems.right_hand_sides[:, : settings.num_lissa].contiguous()
        of = self.task.label
        self.scores: dict[str, Tensor] = run.unit(
            "preconditioners/scores", self.task.key, self._scores, version=1, about=f"traces of {of}"
        )
        key = self.key | {"num": settings.num_lissa, "rtol": settings.reference_rtol}
        about = f"exact solutions {of}"
        found = run.unit("preconditioners/exact", key, self._solutions, version=1, about=about)
        self.solutions: Tensor = found["solutions"]

    def _scores(self) -> dict[str, Tensor]:
        operator: Any = self.systems.operator  # Gauss-Newton
        return {"traces": exact_traces(operator), "outputs": output_curvatures(operator)}

    def _solutions(self) -> dict[str, Any]:
        solver = BlockConjugateGradient(self.settings.reference_rtol)
        solution = solver.solve(self.systems.in_double_precision().damped, self.b.double())
        self.run.add_matvecs(solution.num_matvecs)
        return {"solutions": solution.x.float()}

    def _probabilities(self, way: str) -> Tensor:
        """Return q for a way to sample, (N,)."""
        if way == "traces":
            return importance_probabilities(self.scores["traces"], floor=FLOOR)
        if way == "outputs":
            return importance_probabilities(self.scores["outputs"], uniform=UNIFORM)
        return torch.full_like(self.scores["traces"], 1 / len(self.scores["traces"]))

    def _operator(self, way: str, q: Tensor) -> GaussNewtonOperator | ImportanceOperator:
        operator: Any = self.systems.operator
        return operator if way == "uniform" else ImportanceOperator(operator, q)

    # -------------------------------------------------------------------------------- LiSSA
    def lissa(self, way: str) -> dict[str, Any]:
        """Return how LiSSA ended, its measured and certified C, and its errors by step; a unit."""
        settings = {"num": self.settings.num_lissa, "time_constants": self.settings.num_time_constants}
        about = f"LiSSA {WAYS[way]}, {self.task.label}"
        key = self.key | settings | {"way": way}
        return self.run.unit("preconditioners/lissa", key, partial(self._lissa, way), version=1, about=about)

    def _lissa(self, way: str) -> dict[str, Any]:
        q, damping, b = self._probabilities(way), self.systems.damping, self.b
        operator, traces = self._operator(way, q), self.scores["traces"]
        trace, largest = float(traces.mean()), self.spectrum["value"]
        settings = lissa_hyperparameters(
            trace=max(trace, largest),
            largest_eigenvalue=largest,
            damping=damping,
            num_time_constants=self.settings.num_time_constants,
        )
        generator = self.run.generator("preconditioners/lissa", self.task.seed_name, way)
        directions = torch.cat([self.spectrum["vector"][:, None], operator.randn(3, generator), b[:, :1]], 1)
        measured = measure_constant(operator, directions, trace=trace, batch_size=64, generator=generator)
        recorder = _Recorder(self.solutions)
        num_steps = min(settings.num_steps, self.settings.max_lissa_steps)
        settings = dataclasses.replace(settings, num_steps=num_steps)
        solver = Lissa(**dataclasses.asdict(settings), callback=recorder, check_residual=False)
        damped = operator + damping * identity
        outcome, last, error = f"all {num_steps} steps", num_steps, math.inf
        try:
            error = recorder.error(solver.solve(damped, b, generator=generator).x)
        except DivergenceError as divergence:
            outcome, last = f"diverges at step {divergence.step}", divergence.step
            # Once more without the check, a few times as long, to show what it saves from.
            recorder = _Recorder(self.solutions)
            longer = min(num_steps, PAST_DIVERGENCE * divergence.step)
            unchecked = {"num_steps": longer, "callback": recorder, "raise_on_divergence": False}
            dataclasses.replace(solver, **unchecked).solve(damped, b, generator=generator)
        return dataclasses.asdict(settings) | {
            "constant": float(measured.max()),
            "certified": certified_constant(traces, q),
            "outcome": outcome,
            "error": error,
            "exact_rate": (1 - settings.step_size * damping) ** last,
            "steps": recorder.steps,
            "errors": recorder.errors,
        }

    # -------------------------------------------------------------------------------- estimates
    def estimate_rows(self, way: str) -> list[dict[str, Any]]:
        """Return one row for each draw: tr of a batch, its Hutchinson form, its sketch form.

        A draw is one batch G_1, an independent one G_2 and a Gaussian probe v. All three are unbiased:

            1/B Σ_b tr(G_b) / (N q_b),  vᵀG_1 v for tr(G),  vᵀG_1 G_2 v for ‖G‖²_F,

        the last being what `frobenius_norm(batch_size=...)` averages for the sketches of lissa-tab3. `exact_sd` is
        the standard deviation of the first by its formula: 0 where q_i is proportional to tr(G_i).
        """
        size, traces = self.settings.estimate_batch_size, self.scores["traces"]
        key = self.task.key | {"num_draws": self.settings.num_estimates, "batch_size": size, "way": way}
        about = f"Monte-Carlo estimates {WAYS[way]}, {self.task.label}"
        found = self.run.unit("preconditioners/estimates", key, partial(self._draws, way), version=1, about=about)
        spread = batch_trace_deviation(traces, self._probabilities(way)) / math.sqrt(size)
        return [
            {"quantity": quantity, "batch_size": size, "trace": float(traces.mean())}
            | {"exact_sd": spread if quantity == BATCH_TRACE else math.nan, "draw": draw, "value": value}
            for quantity, values in found["values"].items()
            for draw, value in enumerate(values)
        ]

    def _draws(self, way: str) -> dict[str, Any]:
        size, q = self.settings.estimate_batch_size, self._probabilities(way)
        operator = self._operator(way, q)
        generator = self.run.generator("preconditioners/estimates", self.task.seed_name, way)
        ratios = self.scores["traces"] / (len(q) * q)
        values: dict[str, list[float]] = {BATCH_TRACE: [], TRACE: [], SQUARE: []}
        for _ in range(self.settings.num_estimates):
            drawn = torch.multinomial(q, size, replacement=True, generator=generator)
            probe = operator.randn(1, generator)
            first, second = (operator.sample(size, generator) @ probe for _ in range(2))
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
