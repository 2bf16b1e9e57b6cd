"""The optimizers whose steps are counted and timed, with the first moment that the paper gives all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from curvlab.optim import QNG, Ginger
from curvlab.training import Step, curvature_step, gradient_step, shared_curvature_step
from experiments.ginger.step_cost import Cost, call_cost

# How the gradient of sampled labels comes by its forward pass: that of the loss (train mode, BatchNorm by the
# batch's statistics), or one of its own (eval mode, running statistics).
STEPS: dict[str, Step] = {"shared": shared_curvature_step, "own": curvature_step}
LEAST_PERIOD = 8  # updates, of which Ginger measures its basis in one; the rank where that is more
SHIFT = 16  # numbers between two gradients: 64 bytes


def make_optimizer(kind: str, params: Iterable[nn.Parameter], rank: int | None = None) -> torch.optim.Optimizer:
    """Return "momentum", "Adam", "QNG" or "Ginger", with momentum 0.9 and second moments 0.99 (Sec. 4.1)."""
    if kind == "momentum":
        return torch.optim.SGD(params, lr=1e-3, momentum=0.9)
    if kind == "Adam":
        return torch.optim.Adam(params, lr=1e-3, betas=(0.9, 0.99))
    settings: dict[str, Any] = {"lr": 1e-3, "rank": rank, "decay": 0.99, "momentum": 0.9}
    if kind == "QNG":
        return QNG(params, **settings)
    if kind == "Ginger":
        return Ginger(params, damping=1e-2, **settings)
    raise ValueError(f"unknown optimizer {kind!r}: choose momentum, Adam, QNG or Ginger")


def step_of(kind: str, forward: str | None) -> Step:
    """Return the training step of an optimizer; `forward` is a key of STEPS for QNG and Ginger."""
    if kind in ("momentum", "Adam"):
        return gradient_step
    if forward not in STEPS:
        raise ValueError(f"{kind} needs forward: shared or own, got {forward!r}")
    return STEPS[forward]


def own_cost(
    kind: str, size: int, *, rank: int | None = None, device: torch.device | None = None, num_repeats: int
) -> tuple[Cost, int]:
    """Return what an optimizer costs beside the gradients, over several updates and steps, and how many.

    One vector of `size` parameters, random gradients, after the rows of the basis are filled; as many calls as
    Ginger has from one measurement of its basis to the next. Memory: parameters, gradient, state, temporaries.
    """
    generator = torch.Generator().manual_seed(0)
    calls = max(rank or 0, LEAST_PERIOD)
    warmup = (rank or 0) + 1
    parameter = nn.Parameter(torch.zeros(size, device=device))
    optimizer = make_optimizer(kind, [parameter], rank)
    # Every call needs a gradient of its own, or the basis would not change: pieces of one, a few numbers apart.
    num_calls = warmup + (2 + num_repeats) * calls
    numbers = torch.randn(size + SHIFT * num_calls, generator=generator).to(parameter.device)
    places = iter(range(num_calls))

    def call() -> None:
        start = SHIFT * next(places)
        parameter.grad = numbers[start : start + size]
        if isinstance(optimizer, QNG | Ginger):
            optimizer.update_curvature()
        optimizer.step()

    def work() -> None:
        for _ in range(calls):
            call()

    for _ in range(warmup):
        call()
    state = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    held = [parameter, torch.empty_like(parameter), *state]
    return call_cost(work, held=held, device=parameter.device, num_repeats=num_repeats), calls
