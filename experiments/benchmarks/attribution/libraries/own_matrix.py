"""Exact scores of the matrix that a library inverts, and what retraining says of the network that it scores."""

from __future__ import annotations

import math
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator
from curvlab.influence import (
    directional_derivatives,
    ensemble_measurements,
    per_example_gradients,
    random_halves,
    subset_weights,
)
from curvlab.lab import unit
from curvlab.linalg import LinearOperator, identity
from curvlab.solvers import BlockConjugateGradient, MinimumResidual
from curvlab.training import RunLength, train_ensemble
from experiments.benchmarks.attribution.libraries.worker import TrainedNetwork
from experiments.shared.task import TrainedTask

GAUSS_NEWTON, HESSIAN, FISHER = "Gauss-Newton", "Hessian", "empirical Fisher"
NO_MATRIX = "no matrix"  # of plain gradients, which are compared with the scores of the Gauss-Newton matrix


def exact_scores(network: dict[str, Any], loss: nn.Module, matrix: str, settings: DictConfig) -> dict[str, Any]:
    """Return -∇l(test)ᵀ (A + damping I)⁻¹ ∇l(point) in double precision, and the largest residual.

    Args:
        network: as the workers read it, its damping included.
        loss: mean over examples.
        matrix: A. The Gauss-Newton and the empirical Fisher matrix are solved to 1e-6; the Hessian, indefinite
            wherever training has not ended in a minimum, by LU where the network has at most `hessian_dense`
            parameters, else by minimum residuals to `hessian_rtol`, in `hessian_steps` at most.
        settings: of the part `libraries`.
    """
    own = TrainedNetwork(network)
    model = own.model.double()
    train, test = ((inputs.double(), targets) for inputs, targets in (own.train, own.test))
    sides = per_example_gradients(model, loss, test).T
    if matrix == HESSIAN and len(sides) <= settings.hessian_dense:
        dense = HessianOperator(model, loss, train).to_dense()
        dense.diagonal().add_(own.damping)
        solved = torch.linalg.solve(dense, sides)
        residual = float(((dense @ solved - sides).norm(dim=0) / sides.norm(dim=0)).max())
    else:
        operator, solver = _operator(matrix, model, loss, train), BlockConjugateGradient(rtol=1e-6)
        if matrix == HESSIAN:
            solver = MinimumResidual(rtol=settings.hessian_rtol, max_steps=settings.hessian_steps)  # type: ignore[assignment]
        found = solver.solve(operator + own.damping * identity, sides)
        solved, residual = found.x, float(found.residual.max())
    scores = -directional_derivatives(model, loss, train, directions=solved)
    return {"scores": scores.T, "residual": residual}


def _operator(matrix: str, model: nn.Module, loss: nn.Module, train: tuple[Tensor, Tensor]) -> LinearOperator:
    if matrix == FISHER:
        return FisherOperator(model, loss, train, kind="empirical")
    return (HessianOperator if matrix == HESSIAN else GaussNewtonOperator)(model, loss, train)


def run_length(task: TrainedTask) -> RunLength:
    """Return how far the training went, with momentum and weight decay as `influence(run=...)` has them."""
    of = task.settings.training
    return RunLength.constant(of.lr, math.ceil(task.num_train / of.batch_size) * of.num_epochs, **_steps(of))


def _steps(of: DictConfig) -> dict[str, Any]:
    return {"momentum": of.get("momentum", 0.9), "weight_decay": of.get("weight_decay", 0.0)}


def retrained(task: TrainedTask, network: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return random halves, (S, N), and the queries' losses after training on each, (S, M).

    From the network's own start, with its rate and as many steps, in another order of the batches.
    """
    generator, asked = task.generator("halves of libraries"), ("num_queries", "num_subsets")
    halves = random_halves(task.num_train, task.settings.num_subsets, generator=generator)
    found = _retrained(task, network, halves, **{name: task.settings[name] for name in asked})
    return halves, found["losses"]


@unit("influence_peers/retrained", version=1, about="networks of halves")
def _retrained(task: TrainedTask, network: dict[str, Any], halves: Tensor, /, **_: Any) -> dict[str, Any]:
    # The workers' network: the same layers, whose parameters come in the same order.
    own, start, of = TrainedNetwork(network), task.build(task.generator("model")), task.settings.training
    with torch.no_grad():
        for parameter, value in zip(own.model.parameters(), start.parameters(), strict=True):
            parameter.copy_(value)
    generator, weights = task.generator("retraining of libraries"), {"example_weights": subset_weights(halves)}
    asked: dict[str, Any] = {name: of[name] for name in ("num_epochs", "batch_size", "lr")} | _steps(of) | weights
    copies = train_ensemble(own.model, task.loss, own.train, **asked, generator=generator)
    return {"losses": ensemble_measurements(own.model, task.loss, own.test, copies.parameters)}
