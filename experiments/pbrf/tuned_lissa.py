"""LiSSA as the paper runs it: the scaling tuned until it converges, and averaged over repeats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.linalg import LinearOperator
from curvlab.solvers import DivergenceError, Lissa, Solution
from curvlab.solvers.solution import relative_norm

SCALES = (10, 25, 50, 100, 150, 200, 250, 300, 400, 500)  # Sec. C.2


@dataclass(frozen=True)
class TunedLissa:
    """The mean of R runs of `Lissa` with step size 1/σ, for the smallest σ of a list that converges.

    Converged means that every column's residual is at most `rtol`. Where no σ gets there, the best is returned,
    that with the smallest of the columns' largest residuals, with `converged` False; where all diverge, nan.

    Eq. 49 starts at t = 1 and is then off by v/σ; it must start at t = 0, and its powers stand for products of
    matrices of different batches.

    Attributes:
        batch_size: examples a step; the paper does not state it.
        num_steps: T.
        num_repeats: R.
        scales: σ, in rising order.
        rtol: of the residual; None: 0.1.
    """

    batch_size: int
    num_steps: int
    num_repeats: int = 5
    scales: Sequence[float] = SCALES
    rtol: float | None = None

    def solve(self, operator: LinearOperator, b: Tensor, *, generator: torch.Generator | None = None) -> Solution:
        """Return the mean of the repeats, with its residual. `num_matvecs` counts every σ that ran to its end."""
        if not self.scales:
            raise ValueError("scales is empty: give at least one")
        nothing = torch.full(b.shape[1:], math.nan, dtype=b.dtype, device=b.device)
        best, worst, count = Solution(torch.full_like(b, math.nan), nothing, False, 0), math.inf, 0
        for scale in self.scales:
            lissa = Lissa(1 / scale, self.batch_size, self.num_steps, check_residual=False)
            try:
                found = [lissa.solve(operator, b, generator=generator) for _ in range(self.num_repeats)]
            except DivergenceError:
                continue
            x = torch.stack([solution.x for solution in found]).mean(0)
            columns, right = x.reshape(len(x), -1), b.reshape(len(b), -1)
            residual = relative_norm(operator, right - operator @ columns, right)
            count += sum(solution.num_matvecs for solution in found) + right.shape[1]
            converged = bool((residual <= (self.rtol or 0.1)).all())
            if float(residual.max()) < worst:
                worst = float(residual.max())
                best = Solution(x, residual.reshape(b.shape[1:]), converged, count)
            if converged:
                break
        return Solution(best.x, best.residual, best.converged, count)
