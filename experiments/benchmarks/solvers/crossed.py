"""What makes LiSSA answer with |B| = 2 tr(G) / lambda_max: how it draws, how long it runs, what it returns."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig
from torch import Tensor

from curvlab.curvature import example_importance
from curvlab.lab import ClaimResult, ClaimSheet, Computed, Run, bootstrap_interval, unit
from curvlab.lab import judge as verdict
from curvlab.linalg import LinearOperator
from curvlab.solvers import Lissa, lissa_hyperparameters
from curvlab.solvers.lissa import LissaState
from experiments.benchmarks.parts import tasks_of
from experiments.shared.recipes import exact_solutions
from experiments.shared.spectrum import spectrum
from experiments.shared.systems import Systems

BATCHES = {"uniform": "uniform batches", "importance": "batches by importance"}
ANSWERS = {"last": "last iterate", "average": "average of the last third"}
TIME_CONSTANTS = (2, 4)  # T in units of 1 / (step size damping): the paper's, and Lissa.auto's
MOST = 1e3  # a larger error counts as this one: the run has diverged


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `crossed`: a row for each task, each of the 2 x 2 x 2 choices and each sequence of batches."""
    rows: list[dict[str, Any]] = []
    for task in (each.trained() for each in tasks_of(run, cfg, "crossed")):
        settings, generator = task.settings, run.generator("crossed", task.splits.name)
        measured = spectrum(task, settings)
        points = torch.randperm(task.num_train, generator=generator)[: settings.num_points].sort().values
        damping = settings.damping_ratio * measured["largest_eigenvalue"]
        systems = Systems.at(task, damping, points, torch.arange(1))
        solutions = exact_solutions(systems, rtol=settings.reference_rtol)["solutions"].to(run.device)
        of = {name: measured[name] for name in ("trace", "largest_eigenvalue")}
        chosen = lissa_hyperparameters(**of, damping=damping)
        shared = {"step_size": chosen.step_size, "batch_size": chosen.batch_size}
        probabilities = {"uniform": None, "importance": example_importance(systems.operator).probabilities}
        for sampling, repetition in itertools.product(BATCHES, range(settings.num_sequences)):
            drawn = shared | {"sampling": sampling, "repetition": repetition}
            found = _answers(systems, solutions, probabilities[sampling], **drawn)
            names = {"task": task.label, "train_loss": task.train_loss, "damping": damping} | drawn
            rows += [names | answer for answer in found["answers"]]
    return {"crossed": pd.DataFrame(rows)} if rows else {}


@unit("lissa/crossed", version=1, about="LiSSA, {sampling}, sequence {repetition}")
def _answers(
    systems: Systems, solutions: Tensor, probabilities: Tensor | None, /, *, step_size: float, **asked: Any
) -> dict[str, Any]:
    """Return the errors of the four answers of one sequence of batches, which the shorter run begins, too."""
    ends = {k: math.ceil(k / (step_size * systems.damping)) for k in TIME_CONSTANTS}
    drawn: dict[str, Any] = {"probabilities": probabilities, "check_residual": False}
    solver = Lissa(step_size, asked["batch_size"], max(ends.values()), **drawn)
    generator = systems.task.generator("crossed", asked["sampling"], asked["repetition"])
    found = answers_of_one_run(solver, systems.damped, systems.right_hand_sides, ends, generator)
    systems.run.add_matvecs(solver.num_steps * len(systems.sources[1]))
    rows = []
    for (k, answer), x in found.items():
        errors = (x - solutions).norm(dim=0) / solutions.norm(dim=0)
        worst = float(errors.nan_to_num(nan=math.inf).max())
        rows.append({"time_constants": k, "answer": answer, "num_steps": ends[k], "error_worst": worst})
    return {"answers": rows}


def answers_of_one_run(
    solver: Lissa, damped: LinearOperator, b: Tensor, ends: Mapping[int, int], generator: torch.Generator
) -> dict[tuple[int, str], Tensor]:
    """Return by (name, answer) two for each end of a run.

    "last": the last iterate, the paper's; "average": the mean of the last third of the steps, `Lissa.auto`'s.
    """
    sums = {name: torch.zeros_like(b) for name in ends}
    found: dict[tuple[int, str], Tensor] = {}

    def watch(state: LissaState) -> None:
        for name, end in ends.items():
            third = end // 3
            if end - third < state.num_steps <= end:
                sums[name] += state.x / third
            if state.num_steps == end:
                found[name, "last"], found[name, "average"] = state.x.clone(), sums[name]

    unchecked = dataclasses.replace(solver, callback=watch, raise_on_divergence=False)
    unchecked.solve(damped, b, generator=generator)
    return found


# ------------------------------------------------------------------------------------ claims
CLAIMS = ("answers",)


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge each of the eight choices on each network; intervals are over sequences of batches."""
    generator, results = np.random.default_rng(int(computed.config["seed"])), []
    table = computed["crossed"]
    for choice, own in table.groupby(["task", "sampling", "time_constants", "answer"], sort=False):
        errors = own.error_worst.clip(upper=MOST).to_numpy()
        interval = bootstrap_interval(errors, np.median, unit="sequences of batches", generator=generator)
        diverged = int((errors >= MOST).sum())
        why = f"The error of zero is 1; above {MOST:g} it counts as that, in {diverged} of {len(errors)} runs."
        network, sampling, num, answer = map(str, choice)
        words = f"{BATCHES[sampling]}, {num} time constants, {ANSWERS[answer]}"
        claim = claims.claim("answers", "-".join(map(str, choice)), network=network, choice=words)
        results.append(verdict(claim, float(np.median(errors)), interval, if_not_reproduced=why))
    return results
