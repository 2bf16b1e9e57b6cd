"""Conjugate gradients whose right-hand sides share one Krylov space."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvlab.linalg import LinearOperator
from curvlab.solvers.conjugate_gradient import Callback, Monitor
from curvlab.solvers.preconditioners import Preconditioner, build_preconditioner
from curvlab.solvers.solution import Solution, relative_norm
from curvlab.solvers.solver import (
    IndefiniteOperatorError,
    check_definite,
    check_right_hand_side,
    check_stopping,
    open_checkpoint,
)
from curvlab.spectrum.probes import checked_product, describe


@dataclass(frozen=True)
class BlockConjugateGradient:
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
        callback: called as callback(step, residuals) with (K,) relative residuals of the recurrence.
        monitor: called as monitor(step, iterate) after each step; iterate() gives x then, (P, K), a copy.
        checkpoint: file in which the recurrence is kept, saved every minute: after a kill the same call goes on
            there and ends at the same numbers. A preconditioner is built anew; the residual tells if A has
            changed.
        checkpoint_every: save after so many steps, too.

    Cost: K products a step (fewer once directions vanish), one a column for each time a residual is recomputed;
    20 P K² operations in each step for orthogonality. Memory: ten vectors for each column.
    """

    rtol: float = 1e-2
    max_steps: int | None = None
    preconditioner: LinearOperator | Preconditioner | None = None
    callback: Callback | None = None
    monitor: Monitor | None = None
    checkpoint: str | Path | None = None
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        check_stopping(self.rtol, self.max_steps)

    def solve(self, operator: LinearOperator, b: Tensor, *, generator: torch.Generator | None = None) -> Solution:
        """Return x with A x ≈ b for b (P,) or (P, K); the generator is for a preconditioner that is built here."""
        columns = check_right_hand_side(operator, b)
        check_definite(operator)
        preconditioner, num_matvecs = build_preconditioner(self.preconditioner, operator, generator=generator)
        # Unit columns: one tolerance for all, and no column that vanishes beside a long one.
        scale = operator.norm(columns)
        unit = columns / torch.where(scale > 0, scale, torch.ones_like(scale))
        x, residuals, relative = torch.zeros_like(unit), unit.clone(), (scale > 0).to(scale)
        num_steps, previous = 0, math.inf
        history: list[Tensor] = []
        limit = self.max_steps if self.max_steps is not None else min(10 * operator.shape[0], 5000)
        name = type(self).__name__
        checkpoint = open_checkpoint(self.checkpoint, operator, columns, name, every=self.checkpoint_every)
        if (kept := checkpoint.load() if checkpoint is not None else None) is not None:
            x, residuals, relative = (kept[name].to(x) for name in ("x", "residuals", "relative"))
            num_steps, previous, num_matvecs, history = (
                kept[name] for name in ("num_steps", "previous", "num_matvecs", "history")
            )
        while kept is not None or (
            float(relative.max()) > self.rtol and float(relative.max()) < 0.5 * previous and num_steps < limit
        ):
            previous = float(relative.max()) if kept is None else previous
            active = relative > self.rtol
            descent = _BlockDescent(operator, preconditioner, residuals[:, active], kept and kept["descent"])
            kept = None
            while num_steps < limit and not descent.stuck:
                descent.step()
                num_steps += 1
                moving = descent.residual_norms()
                reported = relative.clone()
                reported[active] = moving
                history.append(reported.cpu())
                if self.callback is not None:
                    self.callback(num_steps, reported)
                if self.monitor is not None:
                    self.monitor(num_steps, partial(_iterate, x, active, descent, scale))
                # A little below rtol, so that rounding in the recurrence does not cost a restart.
                if float(moving.max()) <= 0.9 * self.rtol:
                    break
                if checkpoint is not None and checkpoint.due(num_steps):
                    checkpoint.save(
                        {
                            "x": x, "residuals": residuals, "relative": relative, "num_steps": num_steps,
                            "previous": previous, "num_matvecs": num_matvecs, "descent": descent.state(),
                            "history": history,
                        }
                    )  # fmt: skip
            candidate = x[:, active] + descent.x
            recomputed = unit[:, active] - checked_product(operator, candidate)
            num_matvecs += descent.num_matvecs + int(active.sum())
            after = relative_norm(operator, recomputed, unit[:, active])
            # Lost ground is undone, except where the first phase ran out of steps: see ConjugateGradient.
            unfinished = num_steps == limit == descent.num_steps
            better = (after < relative[active]) | unfinished
            x[:, active] = torch.where(better, candidate, x[:, active])
            residuals[:, active] = torch.where(better, recomputed, residuals[:, active])
            relative[active] = torch.where(better, after, relative[active])
        converged = bool((relative <= self.rtol).all())
        return Solution(
            (x * scale).reshape(b.shape),
            relative.reshape(b.shape[1:]),
            converged,
            num_matvecs,
            history=torch.stack(history) if history else None,
        )


def _iterate(x: Tensor, active: Tensor, descent: _BlockDescent, scale: Tensor) -> Tensor:
    whole = x.clone()
    whole[:, active] += descent.x
    return whole * scale


class _BlockDescent:
    """One uninterrupted run of the recurrence for A X = R.

    With Q (P, w), QᵀMQ = I, and C (w, K): the residual block is Q C; S are the directions, X the iterates.

    Attributes:
        x: (P, K), the iterates, from zero.
        stuck: whether no direction is left.
        num_steps: steps taken.
        num_matvecs: products paid for.
    """

    def __init__(
        self,
        operator: LinearOperator,
        preconditioner: LinearOperator | None,
        residuals: Tensor,
        kept: dict[str, Any] | None = None,
    ) -> None:
        self.operator, self.preconditioner = operator, preconditioner
        self.x = torch.zeros_like(residuals)
        self.num_steps = self.num_matvecs = 0
        self._largest_quotient = 0.0  # about lambda_max, which rounding in products is relative to
        if kept is not None:
            vars(self).update({k: v.to(residuals.device) if isinstance(v, Tensor) else v for k, v in kept.items()})
            return
        self._basis, self._directions, self._coefficients = self._factor(residuals)
        if preconditioner is not None and not self.stuck:
            # Its directions see little of large eigenvalues, but M, near A⁻¹, does: rᵀr / rᵀMr, where QᵀMQ = I.
            self._largest_quotient = float(operator.norm(self._basis).max()) ** 2

    @property
    def stuck(self) -> bool:
        return self._basis.shape[1] == 0

    def state(self) -> dict[str, Any]:
        """Return what a run that goes on here needs, beside the operators."""
        return {k: v for k, v in vars(self).items() if k not in ("operator", "preconditioner")}

    def step(self) -> None:
        """Minimise over the directions, and make the next ones conjugate to them."""
        op, directions = self.operator, self._directions
        products = checked_product(op, directions)
        self.num_steps += 1
        self.num_matvecs += directions.shape[1]
        inverse = self._inverse_curvature(products)
        self.x = self.x + directions @ (inverse @ self._coefficients).to(directions)
        remainder = self._basis - products @ inverse.to(products)
        self._basis, preconditioned, factor = self._factor(remainder)
        self._coefficients = factor @ self._coefficients
        self._directions = preconditioned + directions @ factor.T.to(directions)

    def residual_norms(self) -> Tensor:
        """Return the norms of the residual's columns, (K,)."""
        if self.preconditioner is None:  # an orthonormal basis
            return self._coefficients.norm(dim=0).to(self.x)
        return self.operator.norm(self._basis @ self._coefficients.to(self._basis))

    def _factor(self, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (Q, M Q, F) with vectors = Q F and QᵀMQ = I; F (w, K) is fp64 with w <= K.

        By eigenvectors of the Gram matrix (Stathopoulos & Wu 2002), in fp64: rank-revealing, and a few large
        products where Gram-Schmidt goes column by column. Rounding in the Gram matrix hides directions a
        millionth as long as the longest; they are factored by themselves, with what is found taken out.
        """
        op, precision = self.operator, torch.finfo(self.operator.dtype)
        rest = vectors
        images = vectors if self.preconditioner is None else self.preconditioner @ vectors
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
            if self.preconditioner is not None and rest.shape[1] > 0:
                # What is left of the images after the subtraction is rounding of what was there before.
                images = self.preconditioner @ rest
            bases.append(basis)
            preconditioned.append(image)
            factors.append(factor + overlap @ coefficients)
        return torch.cat(bases, 1), torch.cat(preconditioned, 1), torch.cat(factors)

    def _gram_eigenvectors(self, vectors: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return eigenvalues, ascending, and eigenvectors of VᵀMV, in fp64."""
        gram = self.operator.gram(vectors.double(), images.double())
        values, eigenvectors = torch.linalg.eigh((gram + gram.T) / 2)
        if float(values[0]) < -1e-3 * float(values[-1].abs()):
            raise ValueError(
                f"the preconditioner {describe(self.preconditioner or self.operator)} is not positive definite: "
                "rᵀMr < 0 for a residual r. It must approximate the inverse of the operator, damping included."
            )
        return values, eigenvectors

    def _inverse_curvature(self, products: Tensor) -> Tensor:
        """Return (SᵀAS)⁻¹, (w, w) fp64; raises when A is indefinite, leaves out where it is zero to rounding."""
        op, directions = self.operator, self._directions
        curvature = op.gram(directions.double(), products.double())
        squares = op.gram(directions.double(), directions.double()).diagonal()
        root = squares.sqrt()
        values, vectors = torch.linalg.eigh((curvature + curvature.T) / (2 * root[:, None] * root))
        self._largest_quotient = max(self._largest_quotient, float(values.max()))
        rounding = 100 * torch.finfo(op.dtype).eps * self._largest_quotient
        if float(values.min()) < (-rounding if op.is_psd else 0.0) or (not op.is_psd and float(values.min()) == 0):
            raise IndefiniteOperatorError(
                op, f"is not positive definite: pᵀAp / pᵀp = {float(values.min()):.3g} for a direction p"
            )
        inverse = torch.where(values > torch.finfo(torch.float64).tiny, 1 / values, torch.zeros_like(values))
        return (vectors * inverse) @ vectors.T / (root[:, None] * root)
