"""First derivatives example by example: gradients, and derivatives along given directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

from curvlab.arguments import tensor, whole
from curvlab.curvature.linearise import use_vmap
from curvlab.linalg import LinearOperator, flatten, unflatten, unflatten_columns
from curvlab.problem import Data, Loss, Problem
from curvlab.problem.batch import Inputs, take
from curvlab.problem.model_function import check_finite
from curvlab.progress import can_be_silent
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


@can_be_silent
def per_example_gradients(
    model: nn.Module | Problem,
    loss: Loss | None = None,
    data: Data | None = None,
    *,
    measurement: Measurement | None = None,
    batch_size: int = 64,
    progress: bool = True,
) -> Tensor:
    """Return the gradient of each example's own loss (or measurement) by the parameters, (N, P).

    A sequence's loss is the mean over its predicted tokens, as `loss` gives for it alone. Cost: 3F of the data,
    in one pass with vmap or example by example (convolutions on a CPU), half of a batch at a time whenever memory
    runs out, with a MemoryWarning. Memory: N·P; where only products with a few vectors are needed,
    `directional_derivatives` holds no gradient at all.
    """
    whole("batch_size", batch_size)
    problem = Problem.of(model, loss, data)
    function, measure = problem.function, checked_measurement(problem, measurement)
    parameters = problem.parameters

    def of_one(values: Sequence[Tensor], inputs: Inputs, target: Tensor) -> Tensor:
        one = inputs[None] if isinstance(inputs, Tensor) else {name: value[None] for name, value in inputs.items()}
        return measure(function(values, one), target[None])[0]

    def of_batch(inputs: Inputs, targets: Tensor, weights: Tensor | None) -> Tensor:
        _one_each(measure(_check(problem, inputs, targets, measurement), targets), targets)
        gradient = grad(of_one)
        if problem.loss.by_vmap and use_vmap(function, "auto", inputs):
            pieces = vmap(gradient, in_dims=(None, 0, 0))(parameters, inputs, targets)
            return torch.cat([piece.reshape(len(targets), -1) for piece in pieces], dim=1)
        rows = [flatten(gradient(parameters, take(inputs, i), targets[i])) for i in range(len(targets))]
        return torch.stack(rows)

    return torch.cat(list(problem.map(of_batch, at_most=batch_size, name="gradients")))


@can_be_silent
def directional_derivatives(
    model: nn.Module | Problem,
    loss: Loss | None = None,
    data: Data | None = None,
    directions: Tensor | None = None,
    *,
    measurement: Measurement | None = None,
    batch_size: int = 512,
    progress: bool = True,
) -> Tensor:
    """Return the derivative of each example's own loss along each direction, (P, K) -> (N, K).

    Equal to per_example_gradients(...) @ directions without a backward and without any (N, P) matrix. Cost: one
    forward that carries the tangent, 2F of the data a direction (1F + 1F each with vmap), fewer examples or
    directions at a time whenever memory runs out, with a MemoryWarning.
    """
    if directions is None:
        raise TypeError("pass the directions, (P, K)")
    problem = Problem.of(model, loss, data)
    measure = checked_measurement(problem, measurement)
    tensor("directions", directions, ndim=2, shape="(P, K)", rows=problem.num_parameters)
    batch_size = whole("batch_size", batch_size)

    def checked(outputs: Tensor, targets: Tensor) -> Tensor:
        return _one_each(measure(outputs, targets), targets)

    return torch.cat(derivatives_along(problem, directions, checked, batch_size, measurement))


def derivatives_along(
    problem: Problem,
    directions: Tensor,
    measure: Measurement,
    batch_size: int,
    measurement: Measurement | None = None,
) -> list[Tensor]:
    """Return derivatives of what `measure` gives, (B, ...), along each direction, (B, K, ...) of each batch.

    `measurement`: of the user's own, behind `measure`; tried.
    """
    function = problem.function
    parameters, num_columns = problem.parameters, directions.shape[1]

    def of_piece(inputs: Inputs, targets: Tensor, directions: Tensor) -> Tensor:
        def measured(values: Sequence[Tensor]) -> Tensor:
            return measure(function(values, inputs), targets)

        def along(*direction: Tensor) -> Tensor:
            return jvp(measured, (parameters,), (direction,))[1]

        if directions.shape[1] > 1 and problem.loss.by_vmap and use_vmap(function, "auto", inputs):
            return vmap(along)(*unflatten_columns(directions, parameters)).movedim(0, 1)
        return torch.stack([along(*unflatten(d, parameters)) for d in directions.unbind(1)], dim=1)

    def of_batch(inputs: Inputs, targets: Tensor, weights: Tensor | None) -> Tensor:
        _check(problem, inputs, targets, measurement)
        groups = directions.split(max(min(problem.memory.columns, num_columns), 1), dim=1)
        return torch.cat([of_piece(inputs, targets, group) for group in groups], dim=1)

    with torch.no_grad():
        return list(problem.map(of_batch, at_most=batch_size, num_columns=num_columns, name="derivatives"))


def checked_points(points: Tensor | Sequence[int] | None, num_examples: int) -> Tensor:
    """Return indices of training examples, (K,), on the CPU; None means all of them."""
    if points is None:
        return torch.arange(num_examples)
    try:
        found = torch.as_tensor(points)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"points must be indices of training examples, got {type(points).__name__}: give other data as "
            "candidates"
        ) from None
    indices = found.ndim == 1 and len(found) > 0 and not found.is_floating_point() and found.dtype != torch.bool
    if not indices or int(found.min()) < 0 or int(found.max()) >= num_examples:
        outside = found[(found < 0) | (found >= num_examples)] if indices else found
        wrong = f"{int(outside[0])}" if indices else f"{found.dtype} of shape {tuple(found.shape)}"
        wrong = wrong if found.numel() else "none"
        raise ValueError(
            f"points must be indices of training examples from 0 to {num_examples - 1}, got {wrong}: numbers, not "
            "the examples themselves"
        )
    return found.long().cpu()


def in_order(problem: Problem, indices: Tensor) -> Problem:
    """Return the examples `indices` of a problem, of weight 1 each, in this order: for what has a row for each."""
    batches = problem.data.select(indices)
    if len(batches) > 1:  # of different shapes, in groups of the same: one by one they keep their places
        batches = [batch for index in indices.split(1) for batch in problem.data.select(index)]
    selected = [(inputs, targets, None) for inputs, targets in batches]
    return replace(problem, weights=None, selected=selected, given_divisor=problem.divisor)


def sources_of(problem: Problem, points: Tensor | Sequence[int] | None) -> tuple[Problem, Tensor]:
    """Return the examples that are asked for, all by default, of weight 1 each, and their indices, (K,).

    Raises where a point is no training example.
    """
    chosen = checked_points(points, problem.num_examples)
    return replace(problem, weights=None) if points is None else in_order(problem, chosen), chosen


def checked_measurement(problem: Problem, measurement: Measurement | None) -> Measurement:
    """Return the measurement, by default each example's loss, or raise where it is no function."""
    if measurement is not None and (isinstance(measurement, type) or not callable(measurement)):
        raise TypeError(f"measurement is a function of (outputs, targets), got {measurement!r}")
    return measurement or problem.loss.own_loss


def _check(problem: Problem, inputs: Inputs, targets: Tensor, measurement: Measurement | None) -> Tensor:
    """Return a batch's outputs, or raise where they are not finite, targets do not fit, or nothing is derived."""
    with torch.no_grad():
        outputs = problem.function(problem.parameters, inputs)
    check_finite(outputs)
    problem.loss.check(outputs, targets)
    if measurement is not None:
        with torch.enable_grad():
            measured = _one_each(measurement(outputs.detach().requires_grad_(), targets), targets)
        if not measured.requires_grad:
            raise ValueError(
                "measurement has no derivative by the outputs (argmax, detach, item): all scores would be zero. "
                "Return a differentiable function of them."
            )
    return outputs


def _one_each(measured: Tensor, targets: Tensor) -> Tensor:
    """Return what was measured, or raise where it is not one number for each example."""
    if tensor("what measurement returns", measured).shape != targets.shape[:1]:
        raise ValueError(
            f"measurement must return one number for each example, shape {tuple(targets.shape[:1])}, got "
            f"{tuple(measured.shape)}"
        )
    return measured
