"""What a training run of a given length does to curvature, in the place of a damped inverse."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvlab.arguments import real
from curvlab.linalg import LinearOperator, bordered, checked_product, orthonormalise
from curvlab.seeding import Seed
from curvlab.solvers.solution import Solution, relative_norm
from curvlab.solvers.solver import (
    IterativeSolver,
    check_definite,
    check_right_hand_side,
    check_stopping,
    depends_on,
    foreseen_columns,
)


@dataclass(frozen=True)
class TrainingFilter(IterativeSolver):
    """Return x = f(A) b with f(μ) = (1 - e^{-time μ}) / μ: where gradient flow on ½ xᵀAx - bᵀx is after `time`.

    Along an eigenvector of A a run of T steps at rate η and momentum m has moved by f(μ), with time = ηT / (1 - m)
    (`curvlab.training.RunLength`): 1/μ where it has converged, `time` where it has hardly begun. (A + I / time)⁻¹
    imitates that, with the same limits at both ends. The x of `Solution` is f(A) b, no solution of A x = b;
    `residual` is that of the flow at its end, ‖b - A x - x'‖ / ‖b‖ with x' = e^{-time A} b, which becomes
    ‖b - A x‖ / ‖b‖ for long times. The error is at most `time` ‖b‖ times the largest residual on the way.

    A needs no damping. Weight decay is part of the curvature of a run: pass G + weight_decay * identity.

    Functions of A are taken in the block Krylov space of all right-hand sides, as `BlockConjugateGradient` does
    (Saad 1992 for one vector): K products a step, about √(time λmax) steps where nothing is shared.

    Args:
        time: positive; unit: one over that of A.
        rtol: stop when the residual is at most this in every column.
        max_steps: the most steps; None: until it is.
        callback, checkpoint, progress: see IterativeSolver; its state has no `x`.

    Cost: K products a step, and for orthogonality to all m directions so far some 8 P K m operations; m³ now and
    then. Memory: the m directions.

    >>> from curvlab.linalg import DenseOperator
    >>> matrix = DenseOperator(torch.diag(torch.tensor([1e-3, 1.0, 100.0]).double()))
    >>> TrainingFilter(time=10.0, rtol=1e-9).solve(matrix, torch.ones(3).double()).x  # time, nearly 1, 1/100
    tensor([9.9502, 1.0000, 0.0100], dtype=torch.float64)
    """

    time: float
    rtol: float = 1e-2
    max_steps: int | None = None

    def __post_init__(self) -> None:
        if not (real("time", self.time) > 0 and math.isfinite(self.time)):
            raise ValueError(
                f"time must be positive and finite, got {self.time}: it is the sum of the learning rates over "
                "1 - momentum, curvlab.training.RunLength.of(history).time"
            )
        check_stopping(self.rtol, self.max_steps)

    def solve(self, operator: LinearOperator, b: Tensor, *, generator: Seed = None) -> Solution:
        """Return x = f(A) b for b (P,) or (P, K); deterministic."""
        columns = check_right_hand_side(operator, b)
        check_definite(operator)
        scale = operator.norm(columns)
        if not bool((scale > 0).any()):
            return Solution(torch.zeros_like(b), scale.reshape(b.shape[1:]), True, 0)
        return self.run(_Flow(self, operator, b))


class KrylovSpace:
    """Q = [Q_1, ..., Q_s] spanning (B, AB, ..., A^{s-1}B), with A Q = Q T + Q_next C E_sᵀ and B = Q_1 F.

    Block Lanczos with full reorthogonalisation, grown one block a `step`. `spectrum.BlockLanczos` looks for
    eigenvalues from random vectors and puts new random ones where a direction vanishes; here such a direction
    leaves the block, because functions of A times B lie in the space of B alone.

    Attributes:
        basis: Q, (P, m).
        projected: T = QᵀAQ, (m, m), fp64 on the CPU.
        factor: F, (r, K), fp64 on the CPU.
        num_matvecs: products so far.

    Args:
        operator: A, symmetric.
        vectors: B, (P, K), not all zero.
    """

    def __init__(self, operator: LinearOperator, vectors: Tensor) -> None:
        self.operator = operator
        self.num_matvecs = 0
        self._pending, self.factor = orthonormalise(operator, vectors)
        self.basis = self._pending[:, :0]
        self.projected = torch.zeros(0, 0, dtype=torch.float64)
        self._coupling = torch.zeros(self._pending.shape[1], 0, dtype=torch.float64)
        self._scale = 0.0  # a lower bound of ‖A‖: what rounding is measured against

    @property
    def complete(self) -> bool:
        """Whether the space holds A times all of itself: then functions of T give functions of A exactly."""
        return self._pending.shape[1] == 0

    def step(self) -> None:
        """Add the pending block to the basis, multiply by it, and find the next block."""
        old, block = self.basis.shape[1], self._pending
        products = checked_product(self.operator, block)
        self.num_matvecs += block.shape[1]
        self.basis = torch.cat([self.basis, block], dim=1)
        self.projected = bordered(self.projected, self._coupling, self.operator.gram(block, products))
        newest = self.projected[old - self._coupling.shape[1] :, old:]
        self._scale = max(self._scale, float(torch.linalg.matrix_norm(newest, ord=2)))
        self._pending, self._coupling = orthonormalise(
            self.operator, products, against=self.basis, scale=self._scale
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to go on here."""
        return {name: value for name, value in vars(self).items() if name != "operator"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where another one stood."""
        vars(self).update(state)

    def leak(self, coefficients: Tensor) -> Tensor:
        """Return ‖A Q c - Q T c‖ of each column of c, (m, K) -> (K,): what leaves the space."""
        return torch.linalg.vector_norm(self._coupling @ coefficients[-self._coupling.shape[1] :], dim=0)


@dataclass
class FlowState:
    """How far the space has grown.

    Attributes:
        space: of the right-hand sides, scaled to length 1.
        moved: (m, K), coefficients of x when it was last looked at.
        speed: likewise of x' = dx/dtime.
        history: (K,) residuals of each step; nan where nobody looked.
        next_look: at this step: one costs m³ operations.
        num_steps: blocks of products.
        done: whether the residual is small enough, or nothing can be added.
    """

    space: KrylovSpace
    moved: Tensor
    speed: Tensor
    history: list[Tensor] = field(default_factory=list)
    next_look: int = 1
    num_steps: int = 0
    done: bool = False


class _Flow:
    """The method, for `iterate`.

    Differs from Saad (1992) in: a block of right-hand sides, full reorthogonalisation, a residual of the flow at
    its end that is looked at again whenever the space has grown by a fifth, and is recomputed from x at the end.
    """

    def __init__(self, solver: TrainingFilter, operator: LinearOperator, b: Tensor) -> None:
        self.solver, self.operator, self.b = solver, operator, b
        columns = b[:, None] if b.ndim == 1 else b
        # Unit columns: one tolerance for all, and no column that vanishes beside a long one.
        self.scale = operator.norm(columns)
        self.unit = columns / torch.where(self.scale > 0, self.scale, torch.ones_like(self.scale))

    @cached_property
    def _foreseen(self) -> float | None:
        # As many as conjugate gradients with the damping 1 / time: both resolve curvature down to that.
        return foreseen_columns(self.operator, self.unit.shape[1], self.solver.rtol, beside=1 / self.solver.time)

    def foreseen(self, columns: int) -> float | None:
        return self._foreseen and self._foreseen / columns

    def expected_steps(self, state: FlowState) -> float | None:
        return self.foreseen(self.unit.shape[1])

    def depends_on(self) -> Mapping[str, Any]:
        return depends_on(self.solver, self.operator, self.b)

    def init(self) -> FlowState:
        nothing = torch.zeros(0, self.unit.shape[1], dtype=torch.float64)
        return FlowState(KrylovSpace(self.operator, self.unit), nothing, nothing)

    def step(self, state: FlowState) -> FlowState:
        space = state.space
        space.step()
        state.num_steps += 1
        last = space.complete or state.num_steps == self.solver.max_steps
        if not last and state.num_steps < state.next_look:
            state.history.append(torch.full((space.factor.shape[1],), math.nan, dtype=space.factor.dtype))
            return state
        state.moved, state.speed = self._coefficients(space)
        state.history.append(space.leak(state.moved))
        # A little below rtol, because the residual is recomputed at the end.
        state.done = last or float(state.history[-1].max()) <= 0.9 * self.solver.rtol
        state.next_look = state.num_steps + max(1, state.num_steps // 5)
        return state

    def result(self, state: FlowState) -> Solution:
        space, unit = state.space, self.unit
        x = space.basis @ state.moved.to(unit)
        residuals = unit - checked_product(self.operator, x) - space.basis @ state.speed.to(unit)
        residual = relative_norm(self.operator, residuals, unit)
        return Solution(
            (x * self.scale).reshape(self.b.shape),
            residual.reshape(self.b.shape[1:]),
            bool((residual <= self.solver.rtol).all()),
            space.num_matvecs + unit.shape[1],
            history=torch.stack(state.history),
        )

    def _coefficients(self, space: KrylovSpace) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(space.projected)
        start = vectors[: len(space.factor)].T @ space.factor
        exponents = -self.solver.time * values
        # expm1(z) / z, whose limit at 0 is 1: Ritz values of a singular A are 0 to rounding.
        safe = torch.where(exponents == 0, torch.ones_like(exponents), exponents)
        ratio = torch.where(exponents == 0, torch.ones_like(exponents), torch.expm1(exponents) / safe)
        moved = vectors @ (self.solver.time * ratio[:, None] * start)
        return moved, vectors @ (exponents.exp()[:, None] * start)
