"""Minimise a function by any optimizer, to a gradient norm: for problems that have no batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvlab.training.steps import gradient_norm as norm_of
from curvlab.training.steps import step_by_closure


@dataclass(frozen=True)
class Minimum:
    """Where a minimisation ended.

    Attributes:
        value: the lowest value met.
        gradient_norm: ‖∇f‖ at the parameters as they are now.
        num_steps: optimizer steps taken.
        converged: whether the gradient norm is at most the one asked for.
    """

    value: float
    gradient_norm: float
    num_steps: int
    converged: bool


def minimize(
    closure: Callable[[], Tensor],
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    gradient_norm: float,
    max_steps: int,
) -> Minimum:
    """Let `optimizer` move `parameters` until ‖∇f‖ <= gradient_norm.

    Args:
        closure: zeroes the gradients, computes f, calls backward() and returns f.
        parameters: of f.
        optimizer: of those parameters; its `step` takes a closure, e.g. torch.optim.LBFGS (with tolerance_grad and
            tolerance_change of 0: its own would end the search before a small gradient norm is reached).
        gradient_norm: where to stop.
        max_steps: optimizer steps at most.

    Cost: the optimizer's evaluations of f and its gradient, and one more when max_steps end the search.
    """
    lowest = math.inf

    def watched() -> Tensor:
        nonlocal lowest
        value = closure()
        lowest = min(lowest, float(value.detach()))
        return value

    norm = math.inf
    for step in range(max_steps):
        norm = step_by_closure(optimizer, watched, list(parameters), gradient_norm_at_end=gradient_norm)
        if norm <= gradient_norm:
            return Minimum(lowest, norm, step, converged=True)
        if not math.isfinite(norm):
            break
    watched()
    norm = norm_of(list(parameters))
    return Minimum(lowest, norm, max_steps, converged=norm <= gradient_norm)
