"""What solves for influence beside the library's solvers: a dense saddle, LiSSA as the paper has it, its mean.

The mean of LiSSA (Eq. 48 from t = 0, depth T, scaling σ) multiplies an eigenvalue μ of the damped matrix's inverse
by 1 - (1 - μ/σ)^T: it is a descent of length T/σ, cut off. So is a retraining by SGD of length ηT, whose factor is
1 - e^{-ηTμ}. Both are functions of the matrix, taken here in the Krylov space of the right-hand sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.linalg import LinearOperator, describe
from curvlab.seeding import Seed
from curvlab.solvers import DivergenceError, Lissa, Solution
from curvlab.solvers.direct import dense_matrix
from curvlab.solvers.gradient_flow import KrylovSpace
from curvlab.solvers.solution import relative_norm
from curvlab.solvers.solver import check_right_hand_side

SCALES = (10, 25, 50, 100, 150, 200, 250, 300, 400, 500)  # Sec. C.2
DEPTH = 5000  # T, Sec. C.2
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True, repr=False)
class IndefiniteSolution(Solution):
    """A solution with the inertia of the matrix.

    Attributes:
        num_negative: eigenvalues of A below zero (Sylvester: as many as of the block diagonal factor).
    """

    num_negative: int = 0


@dataclass(frozen=True)
class BunchKaufman:
    """Solve A x = b for a symmetric A of any signature by A = P L D Lᵀ Pᵀ, D of 1 × 1 and 2 × 2 blocks.

    For a Hessian at a saddle: a Krylov method that is stopped early leaves out the directions whose eigenvalues
    lie next to zero, which is another estimate, however small its residual; see `MinimumResidual`. Far fewer
    operations than `Direct`, which computes all eigenvalues of such a matrix. One step of refinement.

    Args:
        max_size: refuse operators larger than this; matrix and factor take 2 P² numbers.

    Cost: P products to build the matrix, P³/3 operations.

    Source: Bunch & Kaufman 1977 (LAPACK's sytrf).
    """

    max_size: int = 20_000

    def solve(self, operator: LinearOperator, b: Tensor, *, generator: Seed = None) -> IndefiniteSolution:
        """Return A⁻¹ b for b (P,) or (P, K). `converged`: relative residual at most sqrt(machine epsilon).

        Raises a ValueError when A is too large, not finite, or singular to working precision.
        """
        columns = check_right_hand_side(operator, b)
        dense = dense_matrix(operator, max_size=self.max_size, solver="BunchKaufman", instead="MinimumResidual")
        dense = dense.add_(dense.T.clone()).mul_(0.5).cpu()  # LAPACK's pivots are those that are read below
        columns = columns.cpu()
        factor, pivots, _ = torch.linalg.ldl_factor_ex(dense)
        eigenvalues, epsilon = _block_eigenvalues(factor, pivots), torch.finfo(dense.dtype).eps
        smallest = float(eigenvalues.abs().min())
        if smallest <= len(dense) * epsilon * float(eigenvalues.abs().max()):
            raise ValueError(
                f"{describe(operator)} is singular to rounding: a pivot of {smallest:.1g}. Add damping: "
                "op + damping * identity."
            )
        x = torch.linalg.ldl_solve(factor, pivots, columns)
        x = x + torch.linalg.ldl_solve(factor, pivots, columns - dense @ x)
        left, right = (columns - dense @ x).to(b), columns.to(b)
        residual = relative_norm(operator, left, right)
        converged, num_negative = bool((residual <= epsilon**0.5).all()), int((eigenvalues < 0).sum())
        x, residual = x.to(b).reshape(b.shape), residual.reshape(b.shape[1:])
        return IndefiniteSolution(x, residual, converged, len(dense), num_negative=num_negative)


def _block_eigenvalues(factor: Tensor, pivots: Tensor) -> Tensor:
    """Return the eigenvalues of D, (P,): of a lower factor, a pair of negative pivots marks a 2 × 2 block."""
    found = factor.diagonal().clone()
    first = (pivots < 0).nonzero().flatten()[::2]
    above, below, off = found[first], found[first + 1], factor[first + 1, first]
    mean, half = (above + below) / 2, torch.hypot((above - below) / 2, off)
    found[first], found[first + 1] = mean - half, mean + half
    return found


# ------------------------------------------------------------------------------------ LiSSA, sampled
@dataclass(frozen=True)
class RepeatedLissa:
    """The mean of R runs of `Lissa` with step size 1/σ, for the smallest σ of a list with which none diverges.

    That is how this project reads the paper's "tuned so that the algorithm converges". Where all diverge the
    solution is nan; `converged` says that one did not. Eq. 49 starts at t = 1 and is then off by v/σ; it must
    start at t = 0, and its powers stand for products of matrices of different batches.

    Attributes:
        batch_size: examples a step; the paper does not state it.
        num_steps: T.
        num_repeats: R.
        scales: σ, in rising order.
    """

    batch_size: int
    num_steps: int
    num_repeats: int = 5
    scales: Sequence[float] = SCALES

    def solve(self, operator: LinearOperator, b: Tensor, *, generator: Seed = None) -> Solution:
        """Return the mean of the repeats, with its residual. `num_matvecs` counts every σ that ran to its end."""
        if not self.scales:
            raise ValueError("scales is empty: give at least one")
        for scale in self.scales:
            lissa = Lissa(1 / scale, self.batch_size, self.num_steps, check_residual=False)
            try:
                found = [lissa.solve(operator, b, generator=generator) for _ in range(self.num_repeats)]
            except DivergenceError:
                continue
            x = torch.stack([solution.x for solution in found]).mean(0)
            columns, right = x.reshape(len(x), -1), b.reshape(len(b), -1)
            residual = relative_norm(operator, right - operator @ columns, right).reshape(b.shape[1:])
            count = sum(solution.num_matvecs for solution in found) + right.shape[1]
            return Solution(x, residual, bool(x.isfinite().all()), count)
        nothing = torch.full(b.shape[1:], math.nan, dtype=b.dtype, device=b.device)
        return Solution(torch.full_like(b, math.nan), nothing, False, 0)


# ------------------------------------------------------------------------------------ functions of a matrix
def series(scale: float, num_steps: int) -> Function:
    """Return Eq. 48 as a function of the damped matrix's eigenvalues: (1 - (1 - μ/σ)^T) / μ, T/σ at 0."""

    def function(values: Tensor) -> Tensor:
        return _over(1 - (1 - values / scale) ** num_steps, values, num_steps / scale)

    return function


def descent(length: float) -> Function:
    """Return what gradient descent of that length reaches: (1 - e^{-length μ}) / μ, `length` at 0."""
    return lambda values: _over(-torch.expm1(-length * values), values, length)


def _over(found: Tensor, values: Tensor, at_zero: float) -> Tensor:
    safe = torch.where(values == 0, torch.ones_like(values), values)
    return torch.where(values == 0, torch.full_like(values, at_zero), found / safe)


@dataclass(frozen=True)
class MatrixFunctions:
    """f(A) B for several f.

    Attributes:
        values: (P, K) by name, not finite where f overflows.
        change: by name, the largest ‖Δ‖/‖x‖ of a column between the last two looks; 0 in a complete space.
        num_matvecs: products.
    """

    values: dict[str, Tensor]
    change: dict[str, float]
    num_matvecs: int


def matrix_functions(
    operator: LinearOperator, b: Tensor, functions: Mapping[str, Function], *, rtol: float, max_steps: int
) -> MatrixFunctions:
    """Return f(A) B in the block Krylov space of B, (P, K), grown until nothing finite changes by more than rtol.

    Looked at whenever the space has grown by a fifth. A function that grows without bound (LiSSA with σ below
    half the largest eigenvalue) does not keep the others from ending.

    Cost: K products a step, and for orthogonality to all m directions so far some 8 P K m operations.
    """
    norms = operator.norm(b)
    unit = b / torch.where(norms > 0, norms, torch.ones_like(norms))
    space, next_look = KrylovSpace(operator, unit), 1
    found: dict[str, Tensor] = {}
    change = dict.fromkeys(functions, math.inf)
    for step in range(1, max_steps + 1):
        space.step()
        if step < next_look and step < max_steps and not space.complete:
            continue
        next_look = step + max(1, step // 5)
        values, vectors = torch.linalg.eigh(space.projected)
        start = vectors[: len(space.factor)].T @ space.factor
        for name, function in functions.items():
            now, before = vectors @ (function(values)[:, None] * start), found.get(name)
            found[name] = now
            if space.complete:
                change[name] = 0.0
            elif before is not None:
                moved = now.clone()
                moved[: len(before)] -= before
                change[name] = float((moved.norm(dim=0) / now.norm(dim=0)).max())
        if max((c for name, c in change.items() if found[name].isfinite().all()), default=0.0) <= rtol:
            break
    results = {name: (space.basis @ own.to(space.basis)) * norms for name, own in found.items()}
    return MatrixFunctions(results, change, space.num_matvecs)
