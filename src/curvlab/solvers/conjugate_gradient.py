"""Preconditioned conjugate gradients for many right-hand sides."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvlab.checkpoint import Checkpoint, fingerprint
from curvlab.linalg import LinearOperator
from curvlab.solvers.preconditioners import Preconditioner, build_preconditioner
from curvlab.solvers.solution import Solution, relative_norm
from curvlab.solvers.solver import (
    IndefiniteOperatorError,
    check_definite,
    check_finite,
    check_right_hand_side,
    check_stopping,
    open_checkpoint,
)
from curvlab.spectrum.probes import describe

Callback = Callable[[int, Tensor], None]
Monitor = Callable[[int, Callable[[], Tensor]], None]


@dataclass(frozen=True)
class ConjugateGradient:
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
        callback: called as callback(step, residuals) with (K,) relative residuals of the recurrence.
        monitor: called as monitor(step, iterate) after each step; iterate() gives x then, (P, K), a copy.
        checkpoint: file in which unfinished work is kept, saved every minute: the same call goes on there, with a
            preconditioner built anew, and ends at the same numbers.
        checkpoint_every: save after so many steps, too.

    Cost: one product a column and step, plus one for each time a residual is recomputed. Memory: five
    vectors for each column.
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

    def solve(
        self,
        operator: LinearOperator,
        b: Tensor,
        *,
        x0: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Solution:
        """Return x with A x ≈ b for b (P,) or (P, K), starting from x0 (zero by default).

        The generator is for a preconditioner that is built here; nothing else is random.
        """
        columns = check_right_hand_side(operator, b)
        check_definite(operator)
        x = self._start(operator, b, columns, x0)
        preconditioner, num_matvecs = build_preconditioner(self.preconditioner, operator, generator=generator)
        num_matvecs += columns.shape[1] if x0 is not None else 0
        residuals = columns - operator @ x if x0 is not None else columns.clone()
        relative = relative_norm(operator, residuals, columns)
        steps_left = torch.full_like(relative, self._step_limit(operator.shape[0]), dtype=torch.long)
        previous = torch.full_like(relative, math.inf)
        scale = operator.norm(columns)
        progress = _Progress(relative.clone(), scale, self.callback, self.monitor)
        checkpoint = self._open_checkpoint(operator, columns, x0)
        kept = None if checkpoint is None else checkpoint.load()
        if kept is not None:
            x, residuals, relative, previous, steps_left = (part.to(columns.device) for part in kept["columns"])
            progress.go_on([part.to(columns.device) for part in kept["history"]])
            num_matvecs = kept["num_matvecs"]
        while True:
            active = (relative > self.rtol) & (relative < 0.5 * previous) & (steps_left > 0)
            if not bool(active.any()):
                break
            descent = _Descent(operator, preconditioner, x[:, active], residuals[:, active])
            if kept is not None:
                descent.go_on(kept["descent"])
                kept = None
            start = {"columns": [x, residuals, relative, previous, steps_left], "num_matvecs": num_matvecs}
            save = _Save(checkpoint, start, progress, descent)
            # A little below rtol, so that rounding in the recurrence does not cost a restart.
            descent.run(0.9 * self.rtol * scale[active], steps_left[active], progress.at(active, x, descent), save)
            recomputed = columns[:, active] - operator @ descent.x
            num_matvecs += int(descent.num_steps.sum()) + int(active.sum())
            steps_left[active] -= descent.num_steps
            before = relative[active]
            after = relative_norm(operator, recomputed, columns[:, active])
            # A restart that lost ground is undone. Not so the first phase: it lowers the error in the norm
            # of A, which on an ill-conditioned problem raises the residual for many steps.
            better = (after < before) | previous[active].isinf()
            x[:, active] = torch.where(better, descent.x, x[:, active])
            residuals[:, active] = torch.where(better, recomputed, residuals[:, active])
            previous[active] = before
            relative[active] = torch.where(better, after, before)
        converged = bool((relative <= self.rtol).all())
        history = torch.stack(progress.history).cpu() if progress.history else None
        return Solution(x.reshape(b.shape), relative.reshape(b.shape[1:]), converged, num_matvecs, history=history)

    def _start(self, operator: LinearOperator, b: Tensor, columns: Tensor, x0: Tensor | None) -> Tensor:
        if x0 is None:
            return torch.zeros_like(columns)
        if x0.shape != b.shape:
            raise ValueError(f"x0 has shape {tuple(x0.shape)}, but b has {tuple(b.shape)}")
        x = check_right_hand_side(operator, x0).clone()
        # Nothing but x = 0 can be asked for where b = 0, and no relative residual could say so.
        x[:, operator.norm(columns) == 0] = 0
        return x

    def _open_checkpoint(self, operator: LinearOperator, columns: Tensor, x0: Tensor | None) -> Checkpoint | None:
        if self.checkpoint is None:
            return None
        name = f"ConjugateGradient {self.rtol} {self.max_steps} from {0 if x0 is None else fingerprint([x0])}"
        return open_checkpoint(self.checkpoint, operator, columns, name, every=self.checkpoint_every)

    def _step_limit(self, size: int) -> int:
        return self.max_steps if self.max_steps is not None else min(10 * size, 5000)


class _Progress:
    """Reports the residuals of all columns while only some of them move."""

    def __init__(
        self, relative: Tensor, scale: Tensor, callback: Callback | None, monitor: Monitor | None
    ) -> None:
        self.relative = relative
        self.scale = scale
        self.callback = callback
        self.monitor = monitor
        self.step = 0
        self.history: list[Tensor] = []

    def go_on(self, history: list[Tensor]) -> None:
        """Stand where another solve stood."""
        self.history, self.step, self.relative = history, len(history), history[-1].clone()

    def at(self, active: Tensor, x: Tensor, descent: _Descent) -> Callable[[Tensor, Tensor], None]:
        """Return a function that takes positions among the active columns and their residual norms."""
        columns = active.nonzero()[:, 0]

        def iterate() -> Tensor:
            whole = x.clone()
            whole[:, active] = descent.iterate()
            return whole

        def report(positions: Tensor, norms: Tensor) -> None:
            self.step += 1
            moving = columns[positions]
            self.relative[moving] = norms / self.scale[moving]
            self.history.append(self.relative.clone())
            if self.callback is not None:
                self.callback(self.step, self.relative.clone())
            if self.monitor is not None:
                self.monitor(self.step, iterate)

        return report


@dataclass(frozen=True)
class _Save:
    """Called after each step of a descent: keeps it, where that is due, with all that it began from."""

    checkpoint: Checkpoint | None
    start: dict[str, Any]
    progress: _Progress
    descent: _Descent

    def __call__(self) -> None:
        if self.checkpoint is not None and self.checkpoint.due(self.progress.step):
            own = {"history": self.progress.history, "descent": self.descent.state()}
            self.checkpoint.save(self.start | own)


class _Descent:
    """One uninterrupted run of the recurrence on a block of columns, those that finish being dropped.

    Attributes:
        x: (P, K), the iterates.
        num_steps: (K,), steps taken by each column.
    """

    def __init__(
        self, operator: LinearOperator, preconditioner: LinearOperator | None, x: Tensor, residuals: Tensor
    ) -> None:
        self.operator = operator
        self.preconditioner = preconditioner
        self.x = x.clone()
        self.num_steps = torch.zeros(x.shape[1], dtype=torch.long, device=x.device)
        self._moving = x.clone()
        self._alive = torch.arange(x.shape[1], device=x.device)
        self._residuals = residuals
        self._largest_quotient = 0.0  # of all pᵀAp / pᵀp: a lower bound of lambda_max
        self._search: tuple[Tensor, Tensor] | None = None  # the next directions and their rᵀz

    def iterate(self) -> Tensor:
        """Return x as it stands now, (P, K)."""
        x = self.x.clone()
        x[:, self._alive] = self._moving
        return x

    def state(self) -> dict[str, Any]:
        """Return what `go_on` needs, after a step."""
        tensors = [self.x, self.num_steps, self._moving, self._alive, self._residuals, *(self._search or ())]
        return {"tensors": tensors, "largest_quotient": self._largest_quotient}

    def go_on(self, state: dict[str, Any]) -> None:
        """Stand where another descent stood."""
        tensors = [tensor.to(self.x.device) for tensor in state["tensors"]]
        self.x, self.num_steps, self._moving, self._alive, self._residuals = tensors[:5]
        self._search = tensors[5], tensors[6]
        self._largest_quotient = state["largest_quotient"]

    def run(
        self,
        targets: Tensor,
        limits: Tensor,
        report: Callable[[Tensor, Tensor], None],
        after_step: Callable[[], None],
    ) -> None:
        """Move every column until its residual norm is at most its target or its steps are used up."""
        op = self.operator
        alive = self._alive
        directions, energy = self._preconditioned() if self._search is None else self._search
        while True:
            products = op @ directions
            check_finite(products, f"the product with {describe(op)}")
            self.num_steps[alive] += 1
            curvature = op.inner(directions, products)
            stuck = self._check_curvature(curvature, directions)
            lengths = torch.where(stuck, torch.zeros_like(energy), energy / curvature)
            self._moving = self._moving + lengths * directions
            self._residuals = self._residuals - lengths * products
            norms = op.norm(self._residuals)
            report(alive, norms)
            done = stuck | (norms <= targets[alive]) | (self.num_steps[alive] >= limits[alive])
            if bool(done.any()):
                self.x[:, alive[done]] = self._moving[:, done]
                going = ~done
                alive, directions, energy = alive[going], directions[:, going], energy[going]
                self._moving, self._residuals = self._moving[:, going], self._residuals[:, going]
                self._alive = alive
                if not bool(going.any()):
                    return
            preconditioned, new_energy = self._preconditioned()
            directions = preconditioned + (new_energy / energy) * directions
            energy = new_energy
            self._search = directions, energy
            after_step()

    def _preconditioned(self) -> tuple[Tensor, Tensor]:
        """Return z = M r and rᵀz."""
        r, preconditioner = self._residuals, self.preconditioner
        z = preconditioner @ r if preconditioner is not None else r
        energy = self.operator.inner(r, z)
        if not bool((energy > 0).all()):
            raise ValueError(
                f"the preconditioner {describe(preconditioner or self.operator)} is not positive definite: "
                "rᵀMr <= 0 for a residual r. It must approximate the inverse of the operator, damping included."
            )
        return z, energy

    def _check_curvature(self, curvature: Tensor, directions: Tensor) -> Tensor:
        """Return which columns cannot move on, pᵀAp = 0 up to rounding; raise when A is indefinite."""
        op = self.operator
        squares = op.inner(directions, directions)
        self._largest_quotient = max(self._largest_quotient, float((curvature / squares).max()))
        stuck = curvature <= 0
        if bool(stuck.any()):
            # A singular PSD operator gives zero, and rounding may make it negative; anything else must not.
            rounding = 100 * torch.finfo(op.dtype).eps * self._largest_quotient if op.is_psd else 0.0
            quotients = (curvature / squares)[stuck]
            if not op.is_psd or bool((quotients < -rounding).any()):
                raise IndefiniteOperatorError(
                    op, f"is not positive definite: pᵀAp / pᵀp = {float(quotients.min()):.3g} for a direction p"
                )
        return stuck
