"""First derivatives example by example: gradients, and derivatives along given directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

from curvlab.curvature.jacobian_products import use_vmap
from curvlab.linalg import LinearOperator, flatten, unflatten, unflatten_columns
from curvlab.problem import Batches, Data, Loss, ModelFunction, OutputLoss, output_loss
from curvlab.problem.batch import Batch, Inputs
from curvlab.problem.memory import Memory
from curvlab.problem.model_function import check_finite
from curvlab.ranks import Ranks

# (outputs, targets) -> (N,), one number for each example, from its own outputs alone.
Measurement = Callable[[Tensor, Tensor], Tensor]


class OverProcesses(Protocol):
    """A Gauss-Newton matrix whose examples, or parameters, are spread over processes: curvlab.parallel has them.

    It has its model, loss and training examples. All processes make the same calls.
    """

    ranks: Ranks

    def weighted(self, weights: Tensor) -> LinearOperator:
        """Return 1/n Σ_i w_i G_i over the examples of all processes; `weights` are this one's."""
        ...

    def example_gradients(self, data: Data, measurement: Measurement | None = None) -> Tensor:
        """Return the gradient of each example's loss or measurement, (P, N), or this process's part of it."""
        ...

    def example_derivatives(self, directions: Tensor) -> Tensor:
        """Return the derivative of each training example's loss along directions, (P, K) -> (N, K)."""
        ...


def per_example_gradients(
    model: nn.Module,
    loss: Loss,
    data: Data,
    *,
    measurement: Measurement | None = None,
    batch_size: int = 64,
) -> Tensor:
    """Return the gradient of each example's own loss (or measurement) by the parameters, (N, P).

    A sequence's loss is the mean over its predicted tokens, as `loss` gives for it alone. Cost: 3F of the data,
    in one pass with vmap or example by example (convolutions on a CPU), half of a batch at a time whenever memory
    runs out, with a MemoryWarning. Memory: N·P; where only products with a few vectors are needed,
    `directional_derivatives` holds no gradient at all.
    """
    function = ModelFunction(model)
    known = output_loss(loss)
    measure = measurement or known.own_loss
    parameters = function.parameters

    def of_one(values: Sequence[Tensor], inputs: Inputs, target: Tensor) -> Tensor:
        return measure(function(values, _one(inputs)), target[None])[0]

    gradient = grad(of_one)

    def of_batch(inputs: Inputs, targets: Tensor) -> list[Tensor]:
        _check(function, measure, inputs, targets, known)
        if known.by_vmap and use_vmap(function, "auto", inputs):
            pieces = vmap(gradient, in_dims=(None, 0, 0))(parameters, inputs, targets)
            return [torch.cat([piece.reshape(len(targets), -1) for piece in pieces], dim=1)]
        found = []
        for index in range(len(targets)):
            example = {k: v[index] for k, v in inputs.items()} if not isinstance(inputs, Tensor) else inputs[index]
            found.append(flatten(gradient(parameters, example, targets[index]))[None])
        return found

    passes = Memory()

    def in_passes(batch: Batch) -> list[Tensor]:
        return [row for piece in passes.pieces(batch) for row in of_batch(*piece)]

    rows: list[Tensor] = []
    for batch in Batches.of(function, data, batch_size=batch_size):
        rows += passes.run(partial(in_passes, batch), columns=1)
    return torch.cat(rows)


def directional_derivatives(
    model: nn.Module,
    loss: Loss,
    data: Data,
    directions: Tensor,
    *,
    measurement: Measurement | None = None,
    batch_size: int = 512,
) -> Tensor:
    """Return the derivative of each example's own loss along each direction, (P, K) -> (N, K).

    Equal to per_example_gradients(...) @ directions without a backward and without any (N, P) matrix. Cost: one
    forward that carries the tangent, 2F of the data a direction (1F + 1F each with vmap), fewer examples or
    directions at a time whenever memory runs out, with a MemoryWarning.
    """
    function = ModelFunction(model)
    known = output_loss(loss)
    measure = measurement or known.own_loss
    parameters = function.parameters

    def of_piece(inputs: Inputs, targets: Tensor, directions: Tensor) -> Tensor:
        def measured(values: Sequence[Tensor]) -> Tensor:
            return measure(function(values, inputs), targets)

        def along(*direction: Tensor) -> Tensor:
            return jvp(measured, (parameters,), (direction,))[1]

        if directions.shape[1] > 1 and known.by_vmap and use_vmap(function, "auto", inputs):
            return vmap(along)(*unflatten_columns(directions, parameters)).T
        return torch.stack([along(*unflatten(d, parameters)) for d in directions.unbind(1)], dim=1)

    passes = Memory(columns=directions.shape[1])

    def in_passes(batch: Batch) -> list[Tensor]:
        found = []
        for inputs, targets in passes.pieces(batch):
            _check(function, measure, inputs, targets, known)
            groups = directions.split(max(passes.columns, 1), dim=1)
            found.append(torch.cat([of_piece(inputs, targets, group) for group in groups], dim=1))
        return found

    rows: list[Tensor] = []
    with torch.no_grad():
        for batch in Batches.of(function, data, batch_size=batch_size):
            rows += passes.run(partial(in_passes, batch), columns=directions.shape[1])
    return torch.cat(rows)


def _check(
    function: ModelFunction, measure: Measurement, inputs: Inputs, targets: Tensor, loss: OutputLoss
) -> None:
    with torch.no_grad():
        outputs = function(function.parameters, inputs)
    check_finite(outputs)
    loss.check(outputs, targets)
    if measure(outputs, targets).shape != targets.shape[:1]:
        raise ValueError(
            f"measurement must return one number for each example, shape {tuple(targets.shape[:1])}, got "
            f"{tuple(measure(outputs, targets).shape)}"
        )


def _one(inputs: Inputs) -> Inputs:
    if isinstance(inputs, Tensor):
        return inputs[None]
    return {name: value[None] for name, value in inputs.items()}
