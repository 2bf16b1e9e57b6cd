"""Minimise a function by any optimizer, to a gradient norm: for problems that have no batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from curvlab.checkpoint import Checkpoint, fingerprint
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
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    depends_on: Mapping[str, Any] | None = None,
) -> Minimum:
    """Let `optimizer` move `parameters` until ‖∇f‖ <= gradient_norm.

    Args:
        closure: zeroes the gradients, computes f, calls backward() and returns f.
        parameters: of f.
        optimizer: of those parameters; its `step` takes a closure, e.g. torch.optim.LBFGS (with tolerance_grad and
            tolerance_change of 0: its own would end the search before a small gradient norm is reached).
        gradient_norm: where to stop.
        max_steps: optimizer steps at most.
        checkpoint: file in which parameters and the optimizer's state are kept, saved after a step when a minute
            has passed, and at the end: the same call goes on there and ends at the same numbers. A step of L-BFGS
            is `max_iter` iterations, and starts again when it is killed.
        checkpoint_every: save after so many steps, too.
        depends_on: what f is made of, as settings of the checkpoint.

    Cost: the optimizer's evaluations of f and its gradient, and one more when max_steps end the search.
    """
    lowest, first = math.inf, 0
    file = None
    if checkpoint is not None:
        groups = optimizer.state_dict()["param_groups"]
        settings = {
            **(depends_on or {}),
            "start": fingerprint(list(parameters)),
            "optimizer": f"{type(optimizer).__name__} {groups}",
        }
        file = Checkpoint(checkpoint, settings, every=checkpoint_every)
        if (kept := file.load()) is not None:
            lowest, first = kept["lowest"], kept["num_steps"]
            optimizer.load_state_dict(kept["optimizer"])
            with torch.no_grad():
                for parameter, value in zip(parameters, kept["parameters"], strict=True):
                    parameter.copy_(value)

    def save(num_steps: int, *, always: bool = False) -> None:
        if file is not None and (always or file.due(num_steps)):
            own = {"num_steps": num_steps, "lowest": lowest, "optimizer": optimizer.state_dict()}
            file.save(own | {"parameters": [parameter.detach() for parameter in parameters]})

    def watched() -> Tensor:
        nonlocal lowest
        value = closure()
        lowest = min(lowest, float(value.detach()))
        return value

    norm = math.inf
    for step in range(first, max_steps):
        norm = step_by_closure(optimizer, watched, list(parameters), gradient_norm_at_end=gradient_norm)
        if norm <= gradient_norm:
            save(step, always=True)
            return Minimum(lowest, norm, step, converged=True)
        if not math.isfinite(norm):
            break
        save(step + 1)
    watched()
    norm = norm_of(list(parameters))
    return Minimum(lowest, norm, max_steps, converged=norm <= gradient_norm)
