"""Chebyshev iteration: the best method that needs no inner products, given the ends of the spectrum."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvlab.linalg import LinearOperator
from curvlab.solvers.conjugate_gradient import Callback, Monitor
from curvlab.solvers.solution import Solution, relative_norm
from curvlab.solvers.solver import (
    IndefiniteOperatorError,
    check_definite,
    check_right_hand_side,
    check_stopping,
    open_checkpoint,
)
from curvlab.spectrum import top_eigenvalues
from curvlab.spectrum.probes import checked_product


@dataclass(frozen=True)
class Chebyshev:
    """Solve A x = b with the spectrum of A in [a, b]: Chebyshev iteration (Saad 2003, Algorithm 12.1).

    After t steps the residual is T_t((b + a - 2A) / (b - a)) / T_t((b + a) / (b - a)) applied to b: at most 2 q^t
    of it with q = (√(b/a) - 1) / (√(b/a) + 1), the rate that heavy ball (Polyak 1964) reaches in the limit with
    fixed coefficients. Without damping it would be gradient descent's 1 - a/b. It does not adapt to gaps in the
    spectrum as conjugate gradients do.

    a is `operator.damping`, so A must be positive semi-definite plus damping; b is measured if it is not given.

    Args:
        rtol: stop a column at ‖b - A x‖ <= rtol ‖b‖; the residual is computed from x at each step, at no cost.
        max_steps: the most steps of a column; None: 10 P, at most 5000.
        largest_eigenvalue: of A, damping included, or a bound above it; None: by Lanczos, which is counted.
        callback: called as callback(step, residuals) with (K,) relative residuals.
        monitor: called as monitor(step, iterate) after each step; iterate() gives x then, (P, K), a copy.
        checkpoint: file in which the recurrence and the largest eigenvalue are kept, see BlockConjugateGradient.
        checkpoint_every: save after so many steps, too.

    Cost: one product for each column and step, some ten for the largest eigenvalue. Memory: four vectors for each
    column.
    """

    rtol: float = 1e-2
    max_steps: int | None = None
    largest_eigenvalue: float | None = None
    callback: Callback | None = None
    monitor: Monitor | None = None
    checkpoint: str | Path | None = None
    checkpoint_every: int | None = None

    def __post_init__(self) -> None:
        check_stopping(self.rtol, self.max_steps)
        if self.largest_eigenvalue is not None and self.largest_eigenvalue <= 0:
            raise ValueError(f"largest_eigenvalue must be positive, got {self.largest_eigenvalue}")

    def solve(self, operator: LinearOperator, b: Tensor, *, generator: torch.Generator | None = None) -> Solution:
        """Return x with A x ≈ b for b (P,) or (P, K); the generator is for measuring the largest eigenvalue."""
        columns = check_right_hand_side(operator, b)
        check_definite(operator)
        smallest = operator.damping
        if not (operator.is_psd and smallest > 0):
            raise IndefiniteOperatorError(
                operator, f"is not known to have all eigenvalues above its damping {smallest:g} > 0"
            )
        # rtol decides which columns the recurrence still has.
        name = f"{type(self).__name__} {self.rtol} {self.largest_eigenvalue}"
        file = open_checkpoint(self.checkpoint, operator, columns, name, every=self.checkpoint_every)
        kept = None if file is None else file.load()
        largest, num_matvecs = self._largest(operator, generator, kept)
        center, radius = (largest + smallest) / 2, max((largest - smallest) / 2, 1e-6 * largest)
        x, relative = torch.zeros_like(columns), (operator.norm(columns) > 0).to(columns)
        alive = relative > self.rtol
        residuals, ratio = columns[:, alive].clone(), radius / center
        directions = residuals / center
        history: list[Tensor] = []
        if kept is not None:
            x, relative, residuals, directions = (part.to(columns) for part in kept["vectors"])
            ratio, history, alive = kept["ratio"], list(kept["history"].to(columns)), relative > self.rtol
        limit = self.max_steps if self.max_steps is not None else min(10 * operator.shape[0], 5000)
        for step in range(len(history) + 1, limit + 1):
            if not bool(alive.any()):
                break
            x[:, alive] += directions
            residuals = columns[:, alive] - checked_product(operator, x[:, alive])
            num_matvecs += residuals.shape[1]
            relative[alive] = relative_norm(operator, residuals, columns[:, alive])
            self._check_growth(float(relative.max()), largest, step)
            history.append(relative.clone())
            if self.callback is not None:
                self.callback(step, relative.clone())
            if self.monitor is not None:
                self.monitor(step, x.clone)
            next_ratio = 1 / (2 * center / radius - ratio)
            directions = next_ratio * ratio * directions + 2 * next_ratio / radius * residuals
            ratio = next_ratio
            going = relative[alive] > self.rtol
            residuals, directions = residuals[:, going], directions[:, going]
            alive = relative > self.rtol
            if file is not None and file.due(step):
                done: dict[str, Any] = {"largest": largest, "num_matvecs": num_matvecs, "ratio": ratio}
                done["generator"] = None if generator is None else generator.get_state()
                vectors = [x, relative, residuals, directions]
                file.save(done | {"vectors": vectors, "history": torch.stack(history)})
        converged = bool((relative <= self.rtol).all())
        looks = torch.stack(history).cpu() if history else None
        return Solution(x.reshape(b.shape), relative.reshape(b.shape[1:]), converged, num_matvecs, history=looks)

    def _largest(
        self, operator: LinearOperator, generator: torch.Generator | None, kept: dict[str, Any] | None
    ) -> tuple[float, int]:
        """Return a bound above the largest eigenvalue, and the products so far: those it took, or those kept."""
        if kept is not None:
            if generator is not None and kept["generator"] is not None:
                generator.set_state(kept["generator"])
            return kept["largest"], kept["num_matvecs"]
        if self.largest_eigenvalue is not None:
            return self.largest_eigenvalue, 0
        found = top_eigenvalues(operator, 1, rtol=0.01, generator=generator)
        return 1.01 * float(found.values[0] + found.error_bounds[0]), found.num_matvecs

    def _check_growth(self, relative: float, largest: float, step: int) -> None:
        # Within the interval the polynomial is at most 1, so the residual is never longer than b.
        if not relative <= 2:
            raise ValueError(
                f"Chebyshev iteration diverges (relative residual {relative:.3g} at step {step}): an eigenvalue "
                f"lies above largest_eigenvalue = {largest:.3g}. Pass a larger bound, or None to measure it."
            )
