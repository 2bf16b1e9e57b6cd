"""Retraining responses: how far the parameters and the test losses move."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import vmap

from curvlab.curvature.linearise import use_vmap
from curvlab.influence.proximal_bregman.objective import ProximalBregmanObjective
from curvlab.influence.proximal_bregman.point_weights import per_point
from curvlab.linalg import unflatten, unflatten_columns
from curvlab.problem import Batches, Data, ModelFunction, output_loss


@dataclass(frozen=True)
class Response:
    """Result of minimising the proximal Bregman objective for K points.

    Attributes:
        displacement: (P, K), (θ - θ*) / ε.
        gradient_norm: (K,), ‖∇Q‖ at the end over ‖∇Q‖ at θ*, on the full data; nan where it was not computed.
        converged: all columns reached the optimiser's tolerance; False for SGD, which has none.
        num_gradients: example gradients in full-data equivalents, counted per point.
        num_matvecs: curvature products, counted per vector.
    """

    displacement: Tensor
    gradient_norm: Tensor
    converged: bool
    num_gradients: float
    num_matvecs: int = 0


class ProximalOptimizer(Protocol):
    """Anything that minimises a ProximalBregmanObjective."""

    def minimize(
        self, objective: ProximalBregmanObjective, *, generator: torch.Generator | None = None
    ) -> Response:
        """Return the minimiser, started from θ*."""


def proximal_bregman_response(
    model: nn.Module,
    loss: nn.Module,
    train: Data,
    points: Data,
    *,
    damping: float,
    epsilon: float | Tensor,
    optimizer: ProximalOptimizer,
    batch_size: int = 512,
    dtype: torch.dtype = torch.float64,
    weights: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return (θ(ε) - θ*) / ε for each point, (P, num_points); to first order -(G + damping I)⁻¹ ∇l(z).

    See ProximalBregmanObjective for the objective and its sign, ProximalSGD and ProximalNewton for the optimisers
    (the latter is exact). `weights` are those of the training examples in the training loss, as `influence` has
    them: G is then the weighted mean, and ε is still what l(z) itself gets. `loss_response` turns the displacement
    into changes of test losses.
    """
    objective = ProximalBregmanObjective(
        model,
        loss,
        train,
        points,
        damping=damping,
        epsilon=epsilon,
        batch_size=batch_size,
        dtype=dtype,
        weights=weights,
    )
    response = optimizer.minimize(objective, generator=generator)
    if response.gradient_norm.isfinite().all() and not response.converged:
        warnings.warn(
            f"the proximal objective was not minimised: largest relative gradient norm "
            f"{float(response.gradient_norm.max()):.2g}. Allow more steps, or take a smaller epsilon.",
            stacklevel=2,
        )
    return response.displacement


def loss_response(
    model: nn.Module,
    loss: nn.Module,
    test: Data,
    displacement: Tensor,
    *,
    epsilon: float | Tensor,
    batch_size: int = 512,
) -> Tensor:
    """Return [l(test; θ* + εu) - l(test; θ*)] / ε for each test example and column of u, (num_test, K).

    The finite change of the test losses, not its linearisation: what retraining does to them, per unit of ε. In
    the displacement's dtype; with ε = 1e-8 in double precision its rounding error is about 1e-8 of the loss.
    `epsilon` is the objective's: a number, or (K,), one for each column.
    Cost: 1F a column.
    """
    function = ModelFunction(copy.deepcopy(model).to(displacement.dtype))
    parameters = function.parameters
    losses = output_loss(loss)
    weights = per_point(epsilon, displacement.shape[1]).to(displacement)
    rows = []
    with torch.no_grad():
        for inputs, targets in Batches.of(function, test, batch_size=batch_size):
            before = losses.own_loss(function(parameters, inputs), targets)

            def after(weight: Tensor, *step: Tensor, inputs=inputs, targets=targets) -> Tensor:  # type: ignore[no-untyped-def]
                moved = [value + weight * s for value, s in zip(parameters, step, strict=True)]
                return losses.own_loss(function(moved, inputs), targets)

            if use_vmap(function, "auto", inputs):
                moved = vmap(after)(weights, *unflatten_columns(displacement, parameters))
            else:
                columns = zip(weights, displacement.unbind(1), strict=True)
                moved = torch.stack([after(weight, *unflatten(column, parameters)) for weight, column in columns])
            rows.append(((moved - before) / weights[:, None]).T)
    return torch.cat(rows)
