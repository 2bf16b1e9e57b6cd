"""Conjugate gradients whose right-hand sides share one Krylov space."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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
class BlockConjugateGradient(ResidualSolver):
    """Solve A X = B, A symmetric positive definite, by block conjugate gradients (O'Leary 1980).

    X minimises the error in the norm of A over the Krylov space of all columns together, (b_1, ..., b_K, A b_1,
    ..., A b_K, A² b_1, ...): K products a step remove about K eigenvalues from every column, where separate
    columns each have to find the same eigenvalues again. Worth it wherever eigenvalues far above the damping are
    what takes the steps, as in trained networks. For one column it is `ConjugateGradient`.

    The stable variant DR-BCG (Dubrulle 2001) with residuals kept as orthonormal factor times coefficients.
    Directions that vanish, because columns depend on one another or are solved, leave the block (breakdown-free,
    Ji & Li 2017). The residual is recomputed from x before it is believed; where the recurrence had drifted away
    from it, the method starts again from x, as long as that at least halves the residual.

    Args:
        rtol: stop when ‖b - A x‖ <= rtol ‖b‖ in every column.
        max_steps: the most steps, restarts included; None: 10 P, at most 5000.
        preconditioner: see ConjugateGradient.
        callback, checkpoint, progress: see IterativeSolver.

    Cost: K products a step (fewer once directions vanish), one a column for each time a residual is recomputed;
    20 P K² operations in each step for orthogonality. Memory: ten vectors for each column.

    >>> from curvlab.linalg import DenseOperator
    >>> matrix = DenseOperator(torch.diag(torch.tensor([1.0, 2.0, 4.0])))
    >>> BlockConjugateGradient(rtol=1e-6).solve(matrix, torch.ones(3)).x
    tensor([1.0000, 0.5000, 0.2500])
    """

    preconditioner: LinearOperator | Preconditioner | None = None

    def solve(self, operator: LinearOperator, b: Tensor, *, generator: Seed = None) -> Solution:
        """Return x with A x ≈ b for b (P,) or (P, K); the generator is for a preconditioner that is built here."""
        generator = generator_for(operator, generator)
        check_right_hand_side(operator, b)
        check_definite(operator)
        return self.run(_BlockRecurrence(self, operator, b, generator))


@dataclass
class BlockDescent:
    """One uninterrupted run of the recurrence for A X = R, from X = 0.

    Attributes:
        x: X, (P, K).
        basis: Q, (P, w), with QᵀMQ = I; the block of residuals is Q C.
        directions: S, (P, w), the next ones.
        coefficients: C, (w, K).
        num_matvecs: products paid for.
        largest_quotient: about λmax, which rounding in products is relative to.
    """

    x: Tensor
    basis: Tensor
    directions: Tensor
    coefficients: Tensor
    num_steps: int = 0
    num_matvecs: int = 0
    largest_quotient: float = 0.0

    @property
    def stuck(self) -> bool:
        """Whether no direction is left."""
        return self.basis.shape[1] == 0


@dataclass
class BlockState(ResidualState):
    """Where block conjugate gradients stand, for columns of b that are scaled to length 1.

    Attributes:
        start: (P, K), iterates at the last restart.
        residuals: (P, K), b - A start.
        relative: (K,), their norms.
        previous: the largest at the restart before.
        relative_residuals: (K,), of the recurrence, and of the columns that it does not have.
        moving: those of the recurrence alone.
        num_matvecs: products up to the restart.
        active: (K,), which columns the recurrence has.
        scale: (K,), lengths of the columns of b.
        descent: the recurrence.
        history: relative_residuals of all steps, on the CPU.
        done: whether no restart would help.
    """

    start: Tensor
    residuals: Tensor
    relative: Tensor
    previous: float
    relative_residuals: Tensor
    moving: Tensor
    num_matvecs: int
    active: Tensor
    scale: Tensor
    descent: BlockDescent
    history: list[Tensor] = field(default_factory=list)
    num_steps: int = 0
    done: bool = False

    @property
    def x(self) -> Tensor:
        """The iterates, (P, K), a copy."""
        x = self.start.clone()
        x[:, self.active] += self.descent.x
        return x * self.scale


class _BlockRecurrence(ResidualMethod):
    """The method, for `iterate`.

    Differs from O'Leary's block CG and Dubrulle's DR-BCG in:
    1. residuals are orthonormal in the norm of M, factored by eigenvectors of a Gram matrix in fp64, not by QR;
    2. directions that vanish leave the block (Ji & Li 2017), so that dependent columns do no harm;
    3. the residual is recomputed before it is believed; a restart goes on with the unsolved columns, and is undone
       where it loses ground;
    4. all columns have length 1: one tolerance for all, and none that vanishes beside a long one;
    5. it stops at 0.9 rtol, so that rounding in the recurrence does not cost a restart.
    """

    def __init__(
        self,
        solver: BlockConjugateGradient,
        operator: LinearOperator,
        b: Tensor,
        generator: torch.Generator | None,
    ) -> None:
        self.solver, self.operator, self.b, self.generator = solver, operator, b, generator
        columns = b[:, None] if b.ndim == 1 else b
        self.scale = operator.norm(columns)
        self.sides = columns / torch.where(self.scale > 0, self.scale, torch.ones_like(self.scale))
        self.limit = step_limit(solver.max_steps, operator)

    def depends_on(self) -> Mapping[str, Any]:
        return depends_on(self.solver, self.operator, self.b, random=self.generator)

    def init(self) -> BlockState:
        self.inverse, num_matvecs = build_preconditioner(
            self.solver.preconditioner, self.operator, generator=self.generator
        )
        x, relative = torch.zeros_like(self.sides), (self.scale > 0).to(self.scale)
        none = torch.zeros_like(relative, dtype=torch.bool)
        nothing = BlockDescent(x[:, :0], x[:, :0], x[:, :0], x[:0, :0])
        state = BlockState(
            x, self.sides.clone(), relative, math.inf, relative, relative, num_matvecs, none, self.scale, nothing
        )
        self._restart(state)
        return state

    def step(self, state: BlockState) -> BlockState:
        now = state.descent
        # A little below rtol, so that rounding in the recurrence does not cost a restart.
        arrived = now.num_steps > 0 and float(state.moving.max()) <= 0.9 * self.solver.rtol
        if arrived or now.stuck or state.num_steps >= self.limit:
            self._believe(state)
            if state.done:
                return state
            now = state.descent
        self._move(now)
        state.num_steps += 1
        state.moving = self._residual_norms(now)
        state.relative_residuals = state.relative.clone()
        state.relative_residuals[state.active] = state.moving
        state.history.append(state.relative_residuals.cpu())
        return state

    def result(self, state: BlockState) -> Solution:
        converged = bool((state.relative <= self.solver.rtol).all())
        history = torch.stack(state.history) if state.history else None
        x, residual = (state.start * self.scale).reshape(self.b.shape), state.relative.reshape(self.b.shape[1:])
        method = in_words("block conjugate gradients", self.inverse)
        return Solution(x, residual, converged, state.num_matvecs, history=history, method=method)

    # ------------------------------------------------------------------------------ restarts
    def _restart(self, state: BlockState) -> None:
        """Begin again with the unsolved columns, if the last restart has brought them forward, or end."""
        largest = float(state.relative.max())
        state.done = not (
            largest > self.solver.rtol and largest < 0.5 * state.previous and state.num_steps < self.limit
        )
        if state.done:
            return
        state.previous, state.active = largest, state.relative > self.solver.rtol
        residuals = state.residuals[:, state.active]
        basis, directions, coefficients = self._factor(residuals)
        now = BlockDescent(torch.zeros_like(residuals), basis, directions, coefficients)
        if self.inverse is not None and not now.stuck:
            # Its directions see little of large eigenvalues, but M, near A⁻¹, does: rᵀr / rᵀMr, where QᵀMQ = I.
            now.largest_quotient = float(self.operator.norm(basis).max()) ** 2
        state.descent = now

    def _believe(self, state: BlockState) -> None:
        """Recompute the residuals of the columns that the recurrence has."""
        active, now = state.active, state.descent
        candidate = state.start[:, active] + now.x
        recomputed = self.sides[:, active] - checked_product(self.operator, candidate)
        state.num_matvecs += now.num_matvecs + int(active.sum())
        after = relative_norm(self.operator, recomputed, self.sides[:, active])
        # Lost ground is undone, except where the first run ended at the limit of steps: see ConjugateGradient.
        unfinished = state.num_steps == self.limit == now.num_steps
        better = (after < state.relative[active]) | unfinished
        state.start[:, active] = torch.where(better, candidate, state.start[:, active])
        state.residuals[:, active] = torch.where(better, recomputed, state.residuals[:, active])
        state.relative[active] = torch.where(better, after, state.relative[active])
        self._restart(state)

    # ---------------------------------------------------------------------------------- steps
    def _move(self, now: BlockDescent) -> None:
        """Minimise over the directions, and make the next ones conjugate to them."""
        directions = now.directions
        products = checked_product(self.operator, directions)
        now.num_steps += 1
        now.num_matvecs += directions.shape[1]
        inverse = self._inverse_curvature(now, products)
        now.x = now.x + directions @ (inverse @ now.coefficients).to(directions)
        remainder = now.basis - products @ inverse.to(products)
        now.basis, preconditioned, factor = self._factor(remainder)
        now.coefficients = factor @ now.coefficients
        now.directions = preconditioned + directions @ factor.T.to(directions)

    def _residual_norms(self, now: BlockDescent) -> Tensor:
        """Return the norms of the residual's columns, (K,)."""
        if self.inverse is None:  # an orthonormal basis
            return now.coefficients.norm(dim=0).to(now.x)
        return self.operator.norm(now.basis @ now.coefficients.to(now.basis))

    def _factor(self, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (Q, M Q, F) with vectors = Q F and QᵀMQ = I; F (w, K) is fp64 with w <= K.

        By eigenvectors of the Gram matrix (Stathopoulos & Wu 2002), in fp64: rank-revealing, and a few large
        products where Gram-Schmidt goes column by column. Rounding in the Gram matrix hides directions a
        millionth as long as the longest; they are factored by themselves, with what is found taken out.
        """
        op, precision = self.operator, torch.finfo(self.operator.dtype)
        rest = vectors
        images = vectors if self.inverse is None else self.inverse @ vectors
        coefficients = torch.eye(vectors.shape[1], dtype=torch.float64, device=vectors.device)
        floor: float | None = None
        bases, preconditioned, factors = [vectors[:, :0]], [vectors[:, :0]], [coefficients[:0]]
        while rest.shape[1] > 0:
            values, eigenvectors = self._gram_eigenvectors(rest, images)
            largest = float(values[-1])
            floor = max((30 * precision.eps) ** 2 * largest, precision.tiny) if floor is None else floor
            if largest <= floor:
                break
            kept = values > max(1e-12 * largest, floor)
            roots, chosen = values[kept].sqrt(), eigenvectors[:, kept]
            basis, image = rest @ (chosen / roots).to(rest), images @ (chosen / roots).to(rest)
            values, rotation = self._gram_eigenvectors(basis, image)  # once more: orthonormal to rounding
            basis, image = (part @ (rotation / values.sqrt()).to(rest) for part in (basis, image))
            factor = (values.sqrt()[:, None] * rotation.T) @ (roots[:, None] * chosen.T) @ coefficients
            left_out = eigenvectors[:, ~kept]
            rest, images, coefficients = (
                rest @ left_out.to(rest),
                images @ left_out.to(rest),
                left_out.T @ coefficients,
            )
            overlap = op.gram(basis.double(), images.double())
            rest, images = rest - basis @ overlap.to(rest), images - image @ overlap.to(rest)
            if self.inverse is not None and rest.shape[1] > 0:
                # What is left of the images after the subtraction is rounding of what was there before.
                images = self.inverse @ rest
            bases.append(basis)
            preconditioned.append(image)
            factors.append(factor + overlap @ coefficients)
        return torch.cat(bases, 1), torch.cat(preconditioned, 1), torch.cat(factors)

    def _gram_eigenvectors(self, vectors: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return eigenvalues, ascending, and eigenvectors of VᵀMV, in fp64."""
        gram = self.operator.gram(vectors.double(), images.double())
        values, eigenvectors = torch.linalg.eigh((gram + gram.T) / 2)
        if float(values[0]) < -1e-3 * float(values[-1].abs()):
            refuse_preconditioner(self.inverse or self.operator, "rᵀMr < 0")
        return values, eigenvectors

    def _inverse_curvature(self, now: BlockDescent, products: Tensor) -> Tensor:
        """Return (SᵀAS)⁻¹, (w, w) fp64; raises when A is indefinite, leaves out where it is zero to rounding."""
        op, directions = self.operator, now.directions
        curvature = op.gram(directions.double(), products.double())
        squares = op.gram(directions.double(), directions.double()).diagonal()
        root = squares.sqrt()
        values, vectors = torch.linalg.eigh((curvature + curvature.T) / (2 * root[:, None] * root))
        now.largest_quotient = max(now.largest_quotient, float(values.max()))
        rounding = 100 * torch.finfo(op.dtype).eps * now.largest_quotient
        if float(values.min()) < (-rounding if op.is_psd else 0.0) or (not op.is_psd and float(values.min()) == 0):
            raise IndefiniteOperatorError(
                op, f"is not positive definite: pᵀAp / pᵀp = {float(values.min()):.3g} for a direction p"
            )
        inverse = torch.where(values > torch.finfo(torch.float64).tiny, 1 / values, torch.zeros_like(values))
        return (vectors * inverse) @ vectors.T / (root[:, None] * root)
