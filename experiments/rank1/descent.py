"""Runs of an optimizer on a problem: what it reached, step by step, and what that cost."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from curvlab.linalg import flatten
from curvlab.optim import CubicNewton, UniformDirection
from experiments.rank1.problems import Problem


@dataclass(frozen=True)
class Trace:
    """One run; entry k belongs to x_k, before step k.

    Attributes:
        gradient_norms: ‖∇f(x_k)‖; nan at the end of a run that diverged.
        values: f(x_k).
        points: x_k of each step for n = 1, else empty.
        num_products: Hessian products paid so far.
        smallest: smallest eigenvalue of each step's D (symmetric part), uniform directions only.
        shifts: δ + α_k of each step, after the safeguard; likewise.
        slopes: ∇fᵀ(step), likewise.
        alphas: α_k of the rule of each step, before the safeguard, likewise.
        spectral_norms: λ as the optimizer had measured it by then, likewise; nan when it needs none.
        lipschitz_constants: M likewise, given or measured.
        num_safeguarded: steps on which the safeguard acted.
        diverged: whether the run ended in a gradient or value that is not finite.
        seconds_per_step: mean wall time.
    """

    gradient_norms: list[float]
    values: list[float]
    points: list[float]
    num_products: list[int]
    smallest: list[float]
    shifts: list[float]
    slopes: list[float]
    alphas: list[float]
    spectral_norms: list[float]
    lipschitz_constants: list[float]
    num_safeguarded: int
    diverged: bool
    seconds_per_step: float


_LISTS = (
    *("gradient_norms", "values", "points", "num_products", "smallest", "shifts", "slopes"),
    *("alphas", "spectral_norms", "lipschitz_constants"),
)


def descend(problem: Problem, optimizer: Optimizer, *, num_steps: int, stop_at: float = 0.0) -> Trace:
    """Take `num_steps` steps, fewer when the gradient norm reaches `stop_at` or the run diverges.

    A method that diverges has gradients or values that are not finite, or above 1e12 times the first ones.
    """
    found: dict[str, list[Any]] = {name: [] for name in _LISTS}
    num_safeguarded, diverged = 0, False
    start = time.perf_counter()
    for step in range(num_steps + 1):
        value = float(problem.closure().detach())
        norm = float(flatten(p.grad for p in problem.parameters if p.grad is not None).norm())
        found["values"].append(value)
        found["gradient_norms"].append(norm)
        found["num_products"].append(products(optimizer))
        if problem.size == 1:
            found["points"].append(float(problem.parameters[0].detach()))
        diverged = not (norm < 1e12 * max(found["gradient_norms"][0], 1e-12) and abs(value) < 1e100)
        if diverged:
            found["gradient_norms"][-1] = math.nan  # where f overflows, its gradient may come out as 0
        if diverged or norm <= stop_at or step == num_steps:
            break
        try:
            optimizer.step(partial(float, value))  # the gradients are there already
        except torch.linalg.LinAlgError:  # D + shift I exactly singular
            diverged = True
            break
        if isinstance(optimizer, UniformDirection) and optimizer.last_step is not None:
            info = optimizer.last_step
            found["smallest"].append(info.smallest_eigenvalue)
            found["shifts"].append(info.shift)
            found["slopes"].append(info.slope)
            found["alphas"].append(info.alpha)
            found["spectral_norms"].append(info.spectral_norm)
            found["lipschitz_constants"].append(info.hessian_lipschitz)
            num_safeguarded += info.safeguarded
    seconds = (time.perf_counter() - start) / max(len(found["values"]) - 1, 1)
    return Trace(
        **found,
        num_safeguarded=num_safeguarded,
        diverged=diverged,
        seconds_per_step=seconds,
    )


def products(optimizer: Optimizer) -> int:
    """Return the Hessian products that an optimizer has paid for."""
    if isinstance(optimizer, CubicNewton):
        return optimizer.num_matvecs
    last = getattr(optimizer, "last_step", None)
    return 0 if last is None else last.num_matvecs


def restart(problem: Problem, start: Sequence[torch.Tensor]) -> None:
    """Put the parameters back to `start`."""
    for parameter, old in zip(problem.parameters, start, strict=True):
        parameter.data.copy_(old)


def current_point(problem: Problem) -> list[torch.Tensor]:
    """Return copies of the parameters."""
    return [parameter.detach().clone() for parameter in problem.parameters]
