"""Chebyshev iteration: the best method that needs no inner products, given the ends of the spectrum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from curvlab.linalg import LinearOperator, checked_product
from curvlab.seeding import Seed
from curvlab.solvers import Solution
from curvlab.solvers.solution import relative_norm
from curvlab.solvers.solver import step_limit
from curvlab.spectrum import top_eigenvalues


class Iterate(NamedTuple):
    """What a callback is shown: steps taken, and x (P, K), changed in place."""

    num_steps: int
    x: Tensor


@dataclass(frozen=True)
class Chebyshev:
    """Solve A x = b with the spectrum of A in [a, b]: Chebyshev iteration (Saad 2003, Algorithm 12.1).

    After t steps the residual is T_t((b + a - 2A) / (b - a)) / T_t((b + a) / (b - a)) applied to b: at most 2 q^t
    of it with q = (√(b/a) - 1) / (√(b/a) + 1), the rate that heavy ball (Polyak 1964) reaches in the limit with
    fixed coefficients. Without damping it would be gradient descent's 1 - a/b. It does not adapt to gaps in the
    spectrum as conjugate gradients do.

    a is the damping of A, a positive semi-definite matrix plus damping > 0; b is measured by Lanczos.

    Differs from Saad's in that many right-hand sides go together, of which those that are solved leave, and in
    that the residual is computed from x at each step, by the one product there is.

    Args:
        rtol: a column stops at ‖b - A x‖ <= rtol ‖b‖.
        callback: called after each step.

    Cost: one product for each column and step, some ten for the largest eigenvalue.
    """

    rtol: float
    callback: Callable[[Iterate], object] = lambda _: None

    def solve(self, operator: LinearOperator, b: Tensor, *, generator: Seed = None) -> Solution:
        """Return x with A x ≈ b for b (P, K); the generator is for measuring the largest eigenvalue."""
        smallest, largest, num_matvecs = bounds(operator, generator)
        center, radius = (largest + smallest) / 2, max((largest - smallest) / 2, 1e-6 * largest)
        x, relative = torch.zeros_like(b), (operator.norm(b) > 0).to(b)
        alive = relative > self.rtol
        directions, ratio, num_steps = b[:, alive] / center, radius / center, 0
        while bool(alive.any()) and num_steps < step_limit(None, operator):
            x[:, alive] += directions
            residuals = b[:, alive] - checked_product(operator, x[:, alive])
            num_matvecs, num_steps = num_matvecs + residuals.shape[1], num_steps + 1
            relative[alive] = relative_norm(operator, residuals, b[:, alive])
            # Within the interval the polynomial is at most 1, so the residual is never longer than b.
            if not float(relative.max()) <= 2:
                raise ValueError(f"Chebyshev iteration diverges: an eigenvalue lies above {largest:.3g}")
            last, ratio = ratio, 1 / (2 * center / radius - ratio)
            directions = ratio * last * directions + 2 * ratio / radius * residuals
            going = relative > self.rtol
            alive, directions = going, directions[:, going[alive]]
            self.callback(Iterate(num_steps, x))
        return Solution(x, relative, not bool(alive.any()), num_matvecs)


def bounds(operator: LinearOperator, generator: Seed = None) -> tuple[float, float, int]:
    """Return bounds of the spectrum, the damping and 1.01 times what Lanczos finds, and the products it took."""
    found = top_eigenvalues(operator, 1, rtol=0.01, progress=False, generator=generator)
    return operator.damping, 1.01 * float(found.values[0] + found.error_bounds[0]), found.num_matvecs
