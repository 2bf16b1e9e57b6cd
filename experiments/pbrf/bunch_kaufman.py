"""The dense solution of an indefinite system, and the inertia of its matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.linalg import LinearOperator, describe
from curvlab.solvers.direct import dense_matrix
from curvlab.solvers.solution import Solution, relative_norm
from curvlab.solvers.solver import check_right_hand_side


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

    def solve(
        self, operator: LinearOperator, b: Tensor, *, generator: torch.Generator | None = None
    ) -> IndefiniteSolution:
        """Return A⁻¹ b for b (P,) or (P, K). `converged`: relative residual at most sqrt(machine epsilon).

        Raises a ValueError when A is too large, not finite, or singular to working precision.
        """
        columns = check_right_hand_side(operator, b)
        size = operator.shape[0]
        dense = dense_matrix(operator, max_size=self.max_size, solver="BunchKaufman", instead="MinimumResidual")
        dense = dense.add_(dense.T.clone()).mul_(0.5)
        factor, pivots, _ = torch.linalg.ldl_factor_ex(dense)
        eigenvalues = _block_eigenvalues(factor, pivots)
        smallest = float(eigenvalues.abs().min())
        if smallest <= size * torch.finfo(dense.dtype).eps * float(eigenvalues.abs().max()):
            raise ValueError(
                f"{describe(operator)} is singular to rounding: a pivot of {smallest:.1g}. Add damping: "
                "op + damping * identity."
            )
        x = torch.linalg.ldl_solve(factor, pivots, columns)
        x = x + torch.linalg.ldl_solve(factor, pivots, columns - dense @ x)
        residual = relative_norm(operator, columns - dense @ x, columns)
        converged = bool((residual <= torch.finfo(operator.dtype).eps ** 0.5).all())
        num_negative = int((eigenvalues < 0).sum())
        return IndefiniteSolution(
            x.reshape(b.shape), residual.reshape(b.shape[1:]), converged, size, num_negative=num_negative
        )


def _block_eigenvalues(factor: Tensor, pivots: Tensor) -> Tensor:
    """Return the eigenvalues of D, (P,): of a lower factor, a pair of negative pivots marks a 2 × 2 block."""
    found = factor.diagonal().clone()
    first = (pivots < 0).nonzero().flatten()[::2]
    above, below, off = found[first], found[first + 1], factor[first + 1, first]
    mean, half = (above + below) / 2, torch.hypot((above - below) / 2, off)
    found[first], found[first + 1] = mean - half, mean + half
    return found
