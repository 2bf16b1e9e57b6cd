"""Minimum residuals: for symmetric matrices that are not definite, such as Hessians."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from curvlab.linalg import LinearOperator
from curvlab.solvers.solution import Solution, relative_norm
from curvlab.solvers.solver import check_finite, check_right_hand_side, open_checkpoint
from curvlab.spectrum.probes import describe


@dataclass(frozen=True)
class MinimumResidual:
    """Solve A x = b, A symmetric and not singular, definite or not (MINRES: Paige & Saunders 1975).

    Each step takes the x in the Krylov space of b whose residual is smallest, so that the residual never grows.
    Every column has its own recurrence, all share one product in each step, and one that has arrived stays.
    For definite matrices conjugate gradients need about as many products and bring the error down sooner.

    Args:
        rtol: stop when ‖b - A x‖ <= rtol ‖b‖ in every column.
        max_steps: at most; None: 10 P, at most 5000.
        callback: called as callback(step, residuals) with (K,) relative residuals of the recurrence.
        checkpoint: file in which the recurrence is kept, see BlockConjugateGradient.
        checkpoint_every: save after so many steps, too.

    Cost: one product a column and step, and one for the residual. Memory: seven vectors for each column.
    """

    rtol: float = 1e-2
    max_steps: int | None = None
    callback: Callable[[int, Tensor], None] | None = None
    checkpoint: str | Path | None = None
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.rtol < 1:
            raise ValueError(f"rtol must be between 0 and 1, got {self.rtol}: it is ‖b - A x‖ / ‖b‖")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {self.max_steps}")

    def solve(self, operator: LinearOperator, b: Tensor, *, generator: torch.Generator | None = None) -> Solution:
        """Return x with A x ≈ b for b (P,) or (P, K). Deterministic."""
        columns = check_right_hand_side(operator, b)
        limit = min(10 * operator.shape[0], 5000) if self.max_steps is None else self.max_steps
        scale = operator.norm(columns)
        unit = torch.where(scale > 0, scale, torch.ones_like(scale))
        x, num_steps = torch.zeros_like(columns), 0
        # Lanczos: A v = beta_next v_next + alpha v + beta v_previous, and a QR of its tridiagonal matrix by
        # rotations (c, s); the names are those of the usual presentation.
        previous, current = torch.zeros_like(columns), columns / unit
        beta, zero = torch.zeros_like(scale), torch.zeros_like(scale)
        c, s, dbar, epsilon = -torch.ones_like(scale), zero, zero, zero
        residual = (scale > 0).to(scale)
        history: list[Tensor] = []
        directions = (torch.zeros_like(columns), torch.zeros_like(columns))
        name = type(self).__name__
        checkpoint = open_checkpoint(self.checkpoint, operator, columns, name, every=self.checkpoint_every)
        if checkpoint is not None and (kept := checkpoint.load()) is not None:
            num_steps, numbers = kept["num_steps"], kept["numbers"].to(scale)
            x, previous, current, *directions = kept["vectors"].to(columns)
            beta, c, s, dbar, epsilon, residual = numbers
            history = list(kept["history"])
        while num_steps < limit and bool((residual > 0.9 * self.rtol).any()):
            product = operator @ current - beta * previous
            check_finite(product, f"a product with {describe(operator)}")
            alpha = operator.inner(current, product)
            product -= alpha * current
            beta_next = operator.norm(product)
            old_epsilon, delta, gbar = epsilon, c * dbar + s * alpha, s * dbar - c * alpha
            epsilon, dbar = s * beta_next, -c * beta_next
            gamma = (gbar.square() + beta_next.square()).sqrt()
            gamma = torch.where(gamma > 0, gamma, torch.ones_like(gamma))
            c, s = gbar / gamma, beta_next / gamma
            direction = (current - old_epsilon * directions[0] - delta * directions[1]) / gamma
            # A column that has arrived takes no further step: its recurrence may break down.
            x += torch.where(residual > 0.9 * self.rtol, c * residual, zero) * direction
            residual = torch.where(residual > 0.9 * self.rtol, s * residual, residual)
            directions = (directions[1], direction)
            previous, beta = current, beta_next
            current = product / torch.where(beta_next > 0, beta_next, torch.ones_like(beta_next))
            num_steps += 1
            history.append(residual.cpu())
            if self.callback is not None:
                self.callback(num_steps, residual)
            if checkpoint is not None and checkpoint.due(num_steps):
                checkpoint.save(
                    {
                        "num_steps": num_steps,
                        "history": history,
                        "vectors": torch.stack([x, previous, current, *directions]),
                        "numbers": torch.stack([beta, c, s, dbar, epsilon, residual]),
                    }
                )
        x *= unit
        reached = relative_norm(operator, columns - operator @ x, columns)
        return Solution(
            x.reshape(b.shape),
            reached.reshape(b.shape[1:]),
            bool((reached <= self.rtol).all()),
            (num_steps + 1) * columns.shape[1],
            history=torch.stack(history) if history else None,
        )
