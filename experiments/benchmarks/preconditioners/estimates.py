"""Monte-Carlo estimates of tr(G) and ‖G‖_F from batches: their spread, drawn uniformly and by importance."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvlab.curvature import GaussNewtonOperator, ImportanceOperator
from experiments.benchmarks.preconditioners.sampling import WAYS, batch_scores, probabilities
from experiments.benchmarks.preconditioners.systems import Systems

BATCH_TRACE, TRACE, SQUARE = "tr(G), batch alone", "tr(G), batch and probe", "‖G‖²_F, two batches, one probe"


def estimate_rows(systems: Systems) -> list[dict[str, Any]]:
    """Return one row for each way to sample and each draw: tr of a batch, its Hutchinson form, its sketch form.

    A draw is one batch G_1, an independent one G_2 and a Gaussian probe v. All three are unbiased:

        1/B Σ_b tr(G_b) / (N q_b),  vᵀG_1 v for tr(G),  vᵀG_1 G_2 v for ‖G‖²_F,

    the last being what `frobenius_norm(batch_size=...)` averages for the sketches of lissa-tab3. `exact_sd` is the
    standard deviation of the first by its formula, [Σ_i tr(G_i)² / (N² q_i) - tr(G)²]^½ / √B: 0 where q_i is
    proportional to tr(G_i).
    """
    scores = batch_scores(systems)
    rows = []
    for way, label in WAYS.items():
        settings = {
            "num_draws": systems.settings.num_estimates,
            "batch_size": systems.settings.estimate_batch_size,
        }
        about = f"Monte-Carlo estimates {label}, {systems.task.label}"
        compute = partial(_draws, systems, way, scores)
        unit = systems.task.key | settings | {"way": way}
        found = systems.run.unit("preconditioners/estimates", unit, compute, version=1, about=about)
        spread = batch_trace_deviation(scores["traces"], probabilities(way, scores)) / math.sqrt(
            settings["batch_size"]
        )
        for quantity, values in found["values"].items():
            shared = {"task": systems.task.label, "sampling": label, "quantity": quantity}
            shared |= {"batch_size": settings["batch_size"], "trace": float(scores["traces"].mean())}
            shared |= {"exact_sd": spread if quantity == BATCH_TRACE else math.nan}
            rows += [shared | {"draw": draw, "value": value} for draw, value in enumerate(values)]
    return rows


def batch_trace_deviation(traces: Tensor, q: Tensor) -> float:
    """Return [Σ_i tr(G_i)² / (N² q_i) - tr(G)²]^½, the deviation of tr(G_i) / (N q_i) for i drawn by q."""
    ratios = traces / (len(traces) * q)
    return math.sqrt(float((q * (ratios - traces.mean()).square()).sum()))


def _draws(systems: Systems, way: str, scores: dict[str, Tensor]) -> dict[str, Any]:
    size, q = systems.settings.estimate_batch_size, probabilities(way, scores)
    operator: GaussNewtonOperator | ImportanceOperator = systems.operator
    if way != "uniform":
        operator = ImportanceOperator(systems.operator, q)
    generator = systems.run.generator("preconditioners/estimates", systems.task.seed_name, way)
    ratios = scores["traces"] / (len(q) * q)
    values: dict[str, list[float]] = {BATCH_TRACE: [], TRACE: [], SQUARE: []}
    for _ in range(systems.settings.num_estimates):
        drawn = torch.multinomial(q, size, replacement=True, generator=generator)
        probe = operator.randn(1, generator)
        first, second = (operator.sample(size, generator) @ probe for _ in range(2))
        values[BATCH_TRACE].append(float(ratios[drawn].mean()))
        values[TRACE].append(float((probe * first).sum()))
        values[SQUARE].append(float((first * second).sum()))
    return {"values": values}
