"""Preconditioned conjugate gradients for many right-hand sides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from curvlab.arguments import tensor
from curvlab.linalg import LinearOperator, checked_product, generator_for
from curvlab.seeding import Seed
from curvlab.solvers.solution import Solution, relative_norm
from curvlab.solvers.solver import (
    IndefiniteOperatorError,
    Preconditioner,
    ResidualMethod,
    ResidualSolver,
    ResidualState,
    build_preconditioner,
    check_definite,
    check_right_hand_side,
    depends_on,
    in_words,
    refuse_preconditioner,
    step_limit,
)


@dataclass(frozen=True)
class ConjugateGradient(ResidualSolver):
    """Solve A x = b, A symmetric positive definite (Hestenes & Stiefel 1952).

    Every column has its own recurrence, but all unfinished ones share one product in each step. The residual
    is recomputed from x before it is believed; where the recurrence had drifted away from it, the method
    starts again from x, as long as that at least halves the residual.

    Args:
        rtol: stop a column at ‖b - A x‖ <= rtol ‖b‖.
        max_steps: the most steps of a column, restarts included; None: 10 P, at most 5000.
        preconditioner: an operator that approximates A⁻¹ (not A), positive definite, applied once in each step; or
            a recipe such as Nystrom(rank=300), built anew at each solve and counted in num_matvecs. To use one
            for many solves, build it yourself: `inverse, _ = Nystrom(300).build(op)`.
        callback, checkpoint, progress: see IterativeSolver.

    Cost: one product a column and step, plus one for each time a residual is recomputed. Memory: five
    vectors for each column.

    >>> from curvlab.linalg import DenseOperator
    >>> matrix = DenseOperator(torch.diag(torch.tensor([1.0, 2.0, 4.0])))
    >>> ConjugateGradient(rtol=1e-6).solve(matrix, torch.ones(3)).x
    tensor([1.0000, 0.5000, 0.2500])
    """

    preconditioner: LinearOperator | Preconditioner | None = None

    def solve(
        self,
        operator: LinearOperator,
        b: Tensor,
        *,
        x0: Tensor | None = None,
        generator: Seed = None,
    ) -> Solution:
        """Return x with A x ≈ b for b (P,) or (P, K), starting from x0 (zero by default).

        The generator is for a preconditioner that is built here; nothing else is random.
        """
        generator = generator_for(operator, generator)
        check_right_hand_side(operator, b)
        check_definite(operator)
        if x0 is not None and tensor("x0", x0).shape != b.shape:
            raise ValueError(f"x0 has shape {tuple(x0.shape)}, but b has {tuple(b.shape)}")
        return self.run(_Recurrence(self, operator, b, x0, generator))


@dataclass
class Descent:
    """One uninterrupted run of the recurrence on some columns; those that finish are dropped.

    Attributes:
        columns: (k,), of b, that it began with.
        x: (P, k), iterates of those that have finished.
        num_steps: (k,), of each.
        alive: (a,), places among them of those that move.
        moving: (P, a), their iterates.
        residuals: (P, a), of the recurrence.
        directions: (P, a), the next ones.
        energy: (a,), rᵀMr.
        largest_quotient: of all pᵀAp / pᵀp, a lower bound of λmax.
    """

    columns: Tensor
    x: Tensor
    num_steps: Tensor
    alive: Tensor
    moving: Tensor
    residuals: Tensor
    directions: Tensor
    energy: Tensor
    largest_quotient: float = 0.0

    @property
    def iterates(self) -> Tensor:
        """X as it stands now, (P, k)."""
        x = self.x.clone()
        x[:, self.alive] = self.moving
        return x


@dataclass
class ConjugateGradientState(ResidualState):
    """Where conjugate gradients stand.

    Attributes:
        start: (P, K), iterates at the last restart.
        residuals: (P, K), b - A start.
        relative: (K,), their norms over that of b.
        previous: (K,), the same at the restart before.
        steps_left: (K,).
        relative_residuals: (K,), of the recurrence.
        num_matvecs: products up to the restart.
        descent: the recurrence.
        history: relative_residuals of all steps.
        num_steps: steps in which some column moved.
        done: whether no restart would help.
    """

    start: Tensor
    residuals: Tensor
    relative: Tensor
    previous: Tensor
    steps_left: Tensor
    relative_residuals: Tensor
    num_matvecs: int
    descent: Descent
    history: list[Tensor] = field(default_factory=list)
    num_steps: int = 0
    done: bool = False

    @property
    def x(self) -> Tensor:
        """The iterates, (P, K), a copy."""
        x = self.start.clone()
        x[:, self.descent.columns] = self.descent.iterates
        return x


class _Recurrence(ResidualMethod):
    """The method, for `iterate`.

    Differs from scipy's cg in:
    1. many right-hand sides: each has its own recurrence, all share one product, and those that are solved leave;
    2. the residual is recomputed before it is believed; where the recurrence has drifted from it, the method
       starts again from x, and undoes what loses ground;
    3. a direction of zero curvature ends its column, negative curvature raises; scipy goes on with both;
    4. it stops at 0.9 rtol, so that rounding in the recurrence does not cost a restart.
    """

    together = False

    def __init__(
        self,
        solver: ConjugateGradient,
        operator: LinearOperator,
        b: Tensor,
        x0: Tensor | None,
        generator: torch.Generator | None,
    ) -> None:
        self.solver, self.operator, self.b, self.x0, self.generator = solver, operator, b, x0, generator
        self.sides = b[:, None] if b.ndim == 1 else b
        self.scale = operator.norm(self.sides)

    def depends_on(self) -> Mapping[str, Any]:
        return depends_on(self.solver, self.operator, self.b, x0=self.x0, random=self.generator)

    def init(self) -> ConjugateGradientState:
        op, b = self.operator, self.sides
        x = self._start()
        self.inverse, num_matvecs = build_preconditioner(self.solver.preconditioner, op, generator=self.generator)
        num_matvecs += b.shape[1] if self.x0 is not None else 0
        residuals = b - op @ x if self.x0 is not None else b.clone()
        relative = relative_norm(op, residuals, b)
        limit = step_limit(self.solver.max_steps, op)
        steps_left = torch.full_like(relative, limit, dtype=torch.long)
        previous = torch.full_like(relative, math.inf)
        none = torch.zeros(0, dtype=torch.long, device=x.device)
        nothing = Descent(none, x[:, :0], none, none, x[:, :0], x[:, :0], x[:, :0], relative[:0])
        state = ConjugateGradientState(
            x, residuals, relative, previous, steps_left, relative.clone(), num_matvecs, nothing
        )
        self._restart(state)
        return state

    def step(self, state: ConjugateGradientState) -> ConjugateGradientState:
        if len(state.descent.alive) == 0:
            self._believe(state)
            if state.done:
                return state
        op, now = self.operator, state.descent
        products = checked_product(op, now.directions)
        now.num_steps[now.alive] += 1
        stuck, lengths = self._lengths(now, op.inner(now.directions, products))
        now.moving = now.moving + lengths * now.directions
        now.residuals = now.residuals - lengths * products
        norms, columns = op.norm(now.residuals), now.columns[now.alive]
        state.relative_residuals = state.relative_residuals.clone()
        state.relative_residuals[columns] = norms / self.scale[columns]
        state.history.append(state.relative_residuals)
        state.num_steps += 1
        ended = stuck | (norms <= 0.9 * self.solver.rtol * self.scale[columns])
        self._drop(now, ended | (now.num_steps[now.alive] >= state.steps_left[columns]))
        if len(now.alive):
            z, energy = self._preconditioned(now.residuals)
            now.directions = z + (energy / now.energy) * now.directions
            now.energy = energy
        return state

    def result(self, state: ConjugateGradientState) -> Solution:
        converged = bool((state.relative <= self.solver.rtol).all())
        history = torch.stack(state.history).cpu() if state.history else None
        shape = self.b.shape
        x, residual = state.start.reshape(shape), state.relative.reshape(shape[1:])
        method = in_words("conjugate gradients", self.inverse)
        return Solution(x, residual, converged, state.num_matvecs, history=history, method=method)

    # ------------------------------------------------------------------------------ restarts
    def _start(self) -> Tensor:
        if self.x0 is None:
            return torch.zeros_like(self.sides)
        x = check_right_hand_side(self.operator, self.x0).clone()
        # Nothing but x = 0 can be asked for where b = 0, and no relative residual could say so.
        x[:, self.scale == 0] = 0
        return x

    def _restart(self, state: ConjugateGradientState) -> None:
        """Begin again with the columns that a restart has brought forward, or end."""
        unsolved = state.relative > self.solver.rtol
        active = unsolved & (state.relative < 0.5 * state.previous) & (state.steps_left > 0)
        state.done = not bool(active.any())
        if not state.done:
            state.descent = self._descent(state.start, state.residuals, active)

    def _descent(self, x: Tensor, residuals: Tensor, active: Tensor) -> Descent:
        columns = active.nonzero()[:, 0]
        x, residuals = x[:, active], residuals[:, active]
        directions, energy = self._preconditioned(residuals)
        places = torch.arange(len(columns), device=x.device)
        return Descent(columns, x, torch.zeros_like(places), places, x.clone(), residuals, directions, energy)

    def _believe(self, state: ConjugateGradientState) -> None:
        """Recompute the residuals of the columns that stopped."""
        now, sides = state.descent, self.sides[:, state.descent.columns]
        recomputed = sides - self.operator @ now.x
        state.num_matvecs += int(now.num_steps.sum()) + len(now.columns)
        state.steps_left[now.columns] -= now.num_steps
        before, previous = state.relative[now.columns], state.previous[now.columns]
        after = relative_norm(self.operator, recomputed, sides)
        # A restart that lost ground is undone. Not so the first run: it lowers the error in the norm
        # of A, which on an ill-conditioned problem raises the residual for many steps.
        better = (after < before) | previous.isinf()
        state.start[:, now.columns] = torch.where(better, now.x, state.start[:, now.columns])
        state.residuals[:, now.columns] = torch.where(better, recomputed, state.residuals[:, now.columns])
        state.previous[now.columns] = before
        state.relative[now.columns] = torch.where(better, after, before)
        self._restart(state)

    # ---------------------------------------------------------------------------------- steps
    @staticmethod
    def _drop(now: Descent, ended: Tensor) -> None:
        if bool(ended.any()):
            now.x[:, now.alive[ended]] = now.moving[:, ended]
            going = ~ended
            now.alive, now.energy = now.alive[going], now.energy[going]
            now.moving, now.residuals, now.directions = (
                part[:, going] for part in (now.moving, now.residuals, now.directions)
            )

    def _preconditioned(self, residuals: Tensor) -> tuple[Tensor, Tensor]:
        """Return z = M r and rᵀz."""
        z = residuals if self.inverse is None else self.inverse @ residuals
        energy = self.operator.inner(residuals, z)
        if not bool((energy > 0).all()):
            refuse_preconditioner(self.inverse or self.operator, "rᵀMr <= 0")
        return z, energy

    def _lengths(self, now: Descent, curvature: Tensor) -> tuple[Tensor, Tensor]:
        """Return which columns are stuck, pᵀAp = 0 to rounding, and step lengths; raise where A is indefinite."""
        op = self.operator
        squares = op.inner(now.directions, now.directions)
        now.largest_quotient = max(now.largest_quotient, float((curvature / squares).max()))
        stuck = curvature <= 0
        if bool(stuck.any()):
            # A singular PSD operator gives zero, and rounding may make it negative; anything else must not.
            rounding = 100 * torch.finfo(op.dtype).eps * now.largest_quotient if op.is_psd else 0.0
            quotients = (curvature / squares)[stuck]
            if not op.is_psd or bool((quotients < -rounding).any()):
                raise IndefiniteOperatorError(
                    op, f"is not positive definite: pᵀAp / pᵀp = {float(quotients.min()):.3g} for a direction p"
                )
        return stuck, torch.where(stuck, torch.zeros_like(curvature), now.energy / curvature)
