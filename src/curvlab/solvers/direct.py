"""The dense solution, for small problems and as a reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.arguments import whole
from curvlab.linalg import LinearOperator, describe
from curvlab.seeding import Seed
from curvlab.solvers.solution import Solution, relative_norm
from curvlab.solvers.solver import check_finite, check_right_hand_side


@dataclass(frozen=True)
class Direct:
    """Solve A x = b by factorising the dense matrix: Cholesky, or eigenvalues when A is not definite.

    Args:
        max_size: refuse operators larger than this; the matrix takes P² numbers.

    The residual is that of the matrix as built, before it is made symmetric.

    Cost: P products to build the matrix, P³/3 operations.

    >>> from curvlab.linalg import DenseOperator
    >>> Direct().solve(DenseOperator(torch.diag(torch.tensor([1.0, -2.0, 4.0]))), torch.ones(3)).x
    tensor([ 1.0000, -0.5000,  0.2500])
    """

    max_size: int = 5000

    def __post_init__(self) -> None:
        whole("max_size", self.max_size)

    def solve(self, operator: LinearOperator, b: Tensor, *, generator: Seed = None) -> Solution:
        """Return A⁻¹ b for b (P,) or (P, K). `converged`: relative residual at most sqrt(machine epsilon)."""
        columns = check_right_hand_side(operator, b)
        dense = dense_matrix(operator, max_size=self.max_size, solver="Direct", instead="ConjugateGradient")
        x = _solve_symmetric((dense + dense.T) / 2, columns, name=describe(operator))
        residual = relative_norm(operator, columns - dense @ x, columns)
        converged = bool((residual <= torch.finfo(operator.dtype).eps ** 0.5).all())
        return Solution(x.reshape(b.shape), residual.reshape(b.shape[1:]), converged, len(dense))


def dense_matrix(operator: LinearOperator, *, max_size: int, solver: str, instead: str) -> Tensor:
    """Return the matrix of an operator, (P, P), not made symmetric. Cost: P products.

    Args:
        operator: to be built.
        max_size: of P.
        solver: that needs it, for the message.
        instead: a solver that needs no matrix, likewise.

    Raises:
        ValueError: it is larger than `max_size`, or not finite.
    """
    size = operator.shape[0]
    if size > max_size:
        raise ValueError(
            f"{solver} builds a dense ({size}, {size}) matrix, more than max_size = {max_size}: use "
            f"{instead}, or raise max_size if the memory is there."
        )
    dense = operator.to_dense()
    check_finite(dense, f"the matrix of {describe(operator)}")
    return dense


def _solve_symmetric(matrix: Tensor, columns: Tensor, *, name: str) -> Tensor:
    """Return A⁻¹ B; raises a ValueError when A is singular to working precision."""
    rounding = matrix.shape[0] * torch.finfo(matrix.dtype).eps
    factor, failed = torch.linalg.cholesky_ex(matrix)
    pivots = factor.diagonal() ** 2
    if int(failed) == 0 and bool(pivots.min() > rounding * pivots.max()):
        return torch.cholesky_solve(columns, factor)
    eigenvalues, vectors = torch.linalg.eigh(matrix)
    magnitudes = eigenvalues.abs()
    num_zero = int((magnitudes <= rounding * magnitudes.max()).sum())
    if num_zero:
        raise ValueError(
            f"{name} is singular: {num_zero} of {len(eigenvalues)} eigenvalues are zero to rounding. Add "
            "damping: op + damping * identity."
        )
    return vectors @ ((vectors.T @ columns) / eigenvalues[:, None])
