"""Minimum residuals: for symmetric matrices that are not definite, such as Hessians."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvlab.linalg import LinearOperator, checked_product
from curvlab.seeding import Seed
from curvlab.solvers.solution import Solution, relative_norm
from curvlab.solvers.solver import (
    ResidualMethod,
    ResidualSolver,
    ResidualState,
    check_right_hand_side,
    depends_on,
    step_limit,
)


@dataclass(frozen=True)
class MinimumResidual(ResidualSolver):
    """Solve A x = b, A symmetric and not singular, definite or not (MINRES: Paige & Saunders 1975).

    Each step takes the x in the Krylov space of b whose residual is smallest, so that the residual never grows.
    Every column has its own recurrence, all share one product in each step, and one that has arrived stays.
    For definite matrices conjugate gradients need about as many products and bring the error down sooner.

    Args:
        rtol: stop when ‖b - A x‖ <= rtol ‖b‖ in every column.
        max_steps: at most; None: 10 P, at most 5000.
        callback, checkpoint, progress: see IterativeSolver.

    Cost: one product a column and step, and one for the residual. Memory: seven vectors for each column.

    >>> from curvlab.linalg import DenseOperator
    >>> matrix = DenseOperator(torch.diag(torch.tensor([1.0, -2.0, 4.0])))
    >>> MinimumResidual(rtol=1e-5).solve(matrix, torch.ones(3)).x
    tensor([ 1.0000, -0.5000,  0.2500])
    """

    def solve(self, operator: LinearOperator, b: Tensor, *, generator: Seed = None) -> Solution:
        """Return x with A x ≈ b for b (P,) or (P, K). Deterministic."""
        check_right_hand_side(operator, b)
        return self.run(_Recurrence(self, operator, b))


@dataclass(frozen=True)
class MinimumResidualState(ResidualState):
    """Where the recurrence stands: Lanczos' vectors, and a QR of its tridiagonal matrix by rotations (c, s).

    Attributes:
        unscaled: (P, K), the iterates for columns of length 1.
        scale: (K,), lengths of the columns of b.
        previous, current: (P, K), Lanczos' vectors: A v = beta_next v_next + alpha v + beta v_previous.
        directions: the last two.
        beta, c, s, dbar, epsilon: (K,), named as usual.
        relative_residuals: (K,), of the recurrence.
        history: of all steps, on the CPU.
        done: whether all columns have arrived, or no more steps are allowed.
    """

    unscaled: Tensor
    scale: Tensor
    previous: Tensor
    current: Tensor
    directions: tuple[Tensor, Tensor]
    beta: Tensor
    c: Tensor
    s: Tensor
    dbar: Tensor
    epsilon: Tensor
    relative_residuals: Tensor
    history: list[Tensor] = field(default_factory=list)
    num_steps: int = 0
    done: bool = False

    @property
    def x(self) -> Tensor:
        """The iterates, (P, K)."""
        return self.unscaled * self.scale


class _Recurrence(ResidualMethod):
    """The method, for `iterate`.

    Differs from scipy's minres in:
    1. many right-hand sides, each with its own recurrence; one that has arrived stays, as its own may break down;
    2. the residual is recomputed from x at the end; scipy states that of the recurrence;
    3. it has no shift and no preconditioner, and it estimates no norms and no condition number.
    """

    together = False

    def __init__(self, solver: MinimumResidual, operator: LinearOperator, b: Tensor) -> None:
        self.solver, self.operator, self.b = solver, operator, b
        self.sides = b[:, None] if b.ndim == 1 else b
        self.limit = step_limit(solver.max_steps, operator)

    @cached_property
    def _foreseen(self) -> float | None:
        if not self.operator.is_psd:  # the trace says nothing of eigenvalues on both sides of 0
            return None
        return super()._foreseen

    def depends_on(self) -> Mapping[str, Any]:
        return depends_on(self.solver, self.operator, self.b)

    def init(self) -> MinimumResidualState:
        columns = self.sides
        scale = self.operator.norm(columns)
        unit = torch.where(scale > 0, scale, torch.ones_like(scale))
        zeros, zero, residual = torch.zeros_like(columns), torch.zeros_like(scale), (scale > 0).to(scale)
        return MinimumResidualState(
            unscaled=zeros,
            scale=unit,
            previous=zeros,
            current=columns / unit,
            directions=(zeros, zeros),
            beta=zero,
            c=-torch.ones_like(scale),
            s=zero,
            dbar=zero,
            epsilon=zero,
            relative_residuals=residual,
            done=not bool(self._moving(residual).any()),
        )

    def _moving(self, residual: Tensor) -> Tensor:
        return residual > 0.9 * self.solver.rtol

    def step(self, state: MinimumResidualState) -> MinimumResidualState:
        op, current, c, s, residual = self.operator, state.current, state.c, state.s, state.relative_residuals
        product = checked_product(op, current) - state.beta * state.previous
        alpha = op.inner(current, product)
        product -= alpha * current
        beta = op.norm(product)
        delta, gbar = c * state.dbar + s * alpha, s * state.dbar - c * alpha
        epsilon, dbar = s * beta, -c * beta
        gamma = (gbar.square() + beta.square()).sqrt()
        gamma = torch.where(gamma > 0, gamma, torch.ones_like(gamma))
        c, s = gbar / gamma, beta / gamma
        before, last = state.directions
        direction = (current - state.epsilon * before - delta * last) / gamma
        moving = self._moving(residual)
        x = state.unscaled + torch.where(moving, c * residual, torch.zeros_like(c)) * direction
        residual = torch.where(moving, s * residual, residual)
        state.history.append(residual.cpu())
        num_steps = state.num_steps + 1
        return replace(
            state,
            unscaled=x,
            previous=current,
            current=product / torch.where(beta > 0, beta, torch.ones_like(beta)),
            directions=(last, direction),
            beta=beta,
            c=c,
            s=s,
            dbar=dbar,
            epsilon=epsilon,
            relative_residuals=residual,
            num_steps=num_steps,
            done=num_steps >= self.limit or not bool(self._moving(residual).any()),
        )

    def result(self, state: MinimumResidualState) -> Solution:
        x = state.x
        reached = relative_norm(self.operator, self.sides - self.operator @ x, self.sides)
        converged = bool((reached <= self.solver.rtol).all())
        history = torch.stack(state.history) if state.history else None
        num_matvecs = (state.num_steps + 1) * self.sides.shape[1]
        shape = self.b.shape
        return Solution(x.reshape(shape), reached.reshape(shape[1:]), converged, num_matvecs, history=history)
