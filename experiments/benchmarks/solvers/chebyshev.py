"""Chebyshev iteration: the best method that needs no inner products, given the ends of the spectrum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from curvlab.linalg import LinearOperator, checked_product
from curvlab.seeding import Seed, as_generator
from curvlab.solvers import IndefiniteOperatorError, Solution
from curvlab.solvers.solution import relative_norm
from curvlab.solvers.solver import (
    IterativeSolver,
    check_definite,
    check_right_hand_side,
    check_stopping,
    depends_on,
    step_limit,
)
from curvlab.spectrum import top_eigenvalues


@dataclass(frozen=True)
class Chebyshev(IterativeSolver):
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
        callback, checkpoint, progress: see IterativeSolver.

    Cost: one product for each column and step, some ten for the largest eigenvalue. Memory: four vectors for each
    column.
    """

    rtol: float = 1e-2
    max_steps: int | None = None
    largest_eigenvalue: float | None = None

    def __post_init__(self) -> None:
        check_stopping(self.rtol, self.max_steps)
        if self.largest_eigenvalue is not None and self.largest_eigenvalue <= 0:
            raise ValueError(f"largest_eigenvalue must be positive, got {self.largest_eigenvalue}")

    def solve(self, operator: LinearOperator, b: Tensor, *, generator: Seed = None) -> Solution:
        """Return x with A x ≈ b for b (P,) or (P, K); the generator is for measuring the largest eigenvalue."""
        generator = as_generator(generator, operator.device)
        check_right_hand_side(operator, b)
        check_definite(operator)
        smallest = operator.damping
        if not (operator.is_psd and smallest > 0):
            raise IndefiniteOperatorError(
                operator, f"is not known to have all eigenvalues above its damping {smallest:g} > 0"
            )
        return self.run(_Recurrence(self, operator, b, as_generator(generator, operator.device)))


@dataclass
class ChebyshevState:
    """Where the recurrence stands; columns that are solved have left it.

    Attributes:
        x: (P, K), the iterates.
        relative_residuals: (K,), computed from x.
        residuals: (P, a), of the columns that are not solved.
        directions: (P, a), the next ones.
        ratio: of the last two Chebyshev polynomials at 0.
        largest: a bound above λmax.
        num_matvecs: products so far.
        generator: what measured it.
        history: relative_residuals of all steps.
        num_steps: steps taken.
        done: whether all columns are solved, or no more steps are allowed.
    """

    x: Tensor
    relative_residuals: Tensor
    residuals: Tensor
    directions: Tensor
    ratio: float
    largest: float
    num_matvecs: int
    generator: torch.Generator | None
    history: list[Tensor] = field(default_factory=list)
    num_steps: int = 0
    done: bool = False


class _Recurrence:
    """The method, for `iterate`.

    Differs from Saad (2003), Algorithm 12.1, in:
    1. many right-hand sides, those that are solved leave;
    2. the residual is computed from x at each step, by the one product there is, not by the recurrence;
    3. a residual longer than twice b shows that an eigenvalue lies above the bound, and raises.
    """

    def __init__(
        self, solver: Chebyshev, operator: LinearOperator, b: Tensor, generator: torch.Generator | None
    ) -> None:
        self.solver, self.operator, self.b, self.generator = solver, operator, b, generator
        self.columns = b[:, None] if b.ndim == 1 else b
        self.limit = step_limit(solver.max_steps, operator)

    def depends_on(self) -> Mapping[str, Any]:
        return depends_on(self.solver, self.operator, self.b, random=self.generator)

    def init(self) -> ChebyshevState:
        largest, num_matvecs = self._largest()
        center, radius = self._interval(largest)
        relative = (self.operator.norm(self.columns) > 0).to(self.columns)
        residuals = self.columns[:, self._alive(relative)].clone()
        return ChebyshevState(
            x=torch.zeros_like(self.columns),
            relative_residuals=relative,
            residuals=residuals,
            directions=residuals / center,
            ratio=radius / center,
            largest=largest,
            num_matvecs=num_matvecs,
            generator=self.generator,
            done=not bool(self._alive(relative).any()),
        )

    def step(self, state: ChebyshevState) -> ChebyshevState:
        op, (center, radius) = self.operator, self._interval(state.largest)
        alive = self._alive(state.relative_residuals)
        state.x[:, alive] += state.directions
        residuals = self.columns[:, alive] - checked_product(op, state.x[:, alive])
        state.num_matvecs += residuals.shape[1]
        state.num_steps += 1
        relative = state.relative_residuals.clone()
        relative[alive] = relative_norm(op, residuals, self.columns[:, alive])
        # Within the interval the polynomial is at most 1, so the residual is never longer than b.
        if not float(relative.max()) <= 2:
            raise ValueError(
                f"Chebyshev iteration diverges (relative residual {float(relative.max()):.3g} at step "
                f"{state.num_steps}): an eigenvalue lies above largest_eigenvalue = {state.largest:.3g}. Pass a "
                "larger bound, or None to measure it."
            )
        state.relative_residuals = relative
        state.history.append(relative)
        ratio = 1 / (2 * center / radius - state.ratio)
        directions = ratio * state.ratio * state.directions + 2 * ratio / radius * residuals
        state.ratio, going = ratio, self._alive(relative[alive])
        state.residuals, state.directions = residuals[:, going], directions[:, going]
        state.done = state.num_steps == self.limit or not bool(going.any())
        return state

    def result(self, state: ChebyshevState) -> Solution:
        residual = state.relative_residuals
        converged = bool((residual <= self.solver.rtol).all())
        history = torch.stack(state.history).cpu() if state.history else None
        shape = self.b.shape
        return Solution(
            state.x.reshape(shape), residual.reshape(shape[1:]), converged, state.num_matvecs, history=history
        )

    def _alive(self, relative: Tensor) -> Tensor:
        return relative > self.solver.rtol

    def _interval(self, largest: float) -> tuple[float, float]:
        """Return its center and its radius."""
        smallest = self.operator.damping
        return (largest + smallest) / 2, max((largest - smallest) / 2, 1e-6 * largest)

    def _largest(self) -> tuple[float, int]:
        """Return a bound above the largest eigenvalue, and the products it took."""
        if self.solver.largest_eigenvalue is not None:
            return self.solver.largest_eigenvalue, 0
        found = top_eigenvalues(self.operator, 1, rtol=0.01, progress=False, generator=self.generator)
        return 1.01 * float(found.values[0] + found.error_bounds[0]), found.num_matvecs
