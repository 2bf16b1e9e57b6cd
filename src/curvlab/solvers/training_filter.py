"""What a training run of a given length does to curvature, in the place of a damped inverse."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from curvlab.checkpoint import Checkpoint
from curvlab.linalg import LinearOperator
from curvlab.solvers.krylov import KrylovSpace
from curvlab.solvers.solution import Solution, relative_norm
from curvlab.solvers.solver import check_definite, check_right_hand_side, open_checkpoint
from curvlab.spectrum.probes import checked_product


@dataclass(frozen=True)
class TrainingFilter:
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
        checkpoint: file in which the directions are kept, see BlockConjugateGradient.
        checkpoint_every: save after so many steps, too.

    Cost: K products a step, and for orthogonality to all m directions so far some 8 P K m operations; m³ now and
    then. Memory: the m directions.
    """

    time: float
    rtol: float = 1e-2
    max_steps: int | None = None
    checkpoint: str | Path | None = None
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        if not (self.time > 0 and math.isfinite(self.time)):
            raise ValueError(
                f"time must be positive and finite, got {self.time}: it is the sum of the learning rates over "
                "1 - momentum, curvlab.training.RunLength.of(history).time"
            )
        if not 0 < self.rtol < 1:
            raise ValueError(f"rtol must be between 0 and 1, got {self.rtol}: it is the residual over ‖b‖")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {self.max_steps}")

    def solve(self, operator: LinearOperator, b: Tensor, *, generator: torch.Generator | None = None) -> Solution:
        """Return x = f(A) b for b (P,) or (P, K); deterministic."""
        columns = check_right_hand_side(operator, b)
        check_definite(operator)
        # Unit columns: one tolerance for all, and no column that vanishes beside a long one.
        scale = operator.norm(columns)
        unit = columns / torch.where(scale > 0, scale, torch.ones_like(scale))
        if not bool((scale > 0).any()):
            return Solution(torch.zeros_like(b), scale.reshape(b.shape[1:]), True, 0)
        space = KrylovSpace(operator, unit)
        name = f"{type(self).__name__} {self.time} {self.rtol}"
        file = open_checkpoint(self.checkpoint, operator, columns, name, every=self.checkpoint_every)
        moved, speed, looks = self._grown(space, file)
        x = space.basis @ moved.to(unit)
        residuals = unit - checked_product(operator, x) - space.basis @ speed.to(unit)
        residual = relative_norm(operator, residuals, unit)
        return Solution(
            (x * scale).reshape(b.shape),
            residual.reshape(b.shape[1:]),
            bool((residual <= self.rtol).all()),
            space.num_matvecs + columns.shape[1],
            history=torch.stack(looks),
        )

    def _grown(self, space: KrylovSpace, file: Checkpoint | None) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Grow the space until the residual is small; return coefficients of x and of x', (m, K), and residuals.

        There is one of each step, (K,): nan at those without a look.
        """
        num_steps, next_look = 0, 1
        looks: list[Tensor] = []
        if file is not None and (kept := file.load()) is not None:
            num_steps, next_look, looks = kept["num_steps"], kept["next_look"], list(kept["looks"])
            space.restore(kept["space"])
        while True:
            if file is not None and num_steps and file.due(num_steps):
                done = {"num_steps": num_steps, "next_look": next_look, "looks": torch.stack(looks)}
                file.save(done | {"space": space.state()})
            space.step()
            num_steps += 1
            last = space.complete or num_steps == self.max_steps
            if not last and num_steps < next_look:
                looks.append(torch.full((space.factor.shape[1],), math.nan, dtype=space.factor.dtype))
                continue
            moved, speed = self._coefficients(space)
            looks.append(space.leak(moved))
            # A little below rtol, because the residual is recomputed at the end.
            if last or float(looks[-1].max()) <= 0.9 * self.rtol:
                return moved, speed, looks
            next_look = num_steps + max(1, num_steps // 5)  # m³ operations: not at every step

    def _coefficients(self, space: KrylovSpace) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(space.projected)
        start = vectors[: len(space.factor)].T @ space.factor
        exponents = -self.time * values
        # expm1(z) / z, whose limit at 0 is 1: Ritz values of a singular A are 0 to rounding.
        safe = torch.where(exponents == 0, torch.ones_like(exponents), exponents)
        ratio = torch.where(exponents == 0, torch.ones_like(exponents), torch.expm1(exponents) / safe)
        moved = vectors @ (self.time * ratio[:, None] * start)
        return moved, vectors @ (exponents.exp()[:, None] * start)
