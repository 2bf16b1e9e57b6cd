"""The solver to take where nothing else is asked for."""

from __future__ import annotations

from curvlab.solvers.block_conjugate_gradient import BlockConjugateGradient
from curvlab.solvers.preconditioners import Nystrom

# Residual 1e-2 on an overfitted MLP on MNIST, 25 right-hand sides: 1,050 products without, 900, 850, 825, 825 with
# ranks of 2, 4, 6 and 8 times 25, these included. Where few steps are enough, the rank is what it costs in vain.
_RANK_PER_COLUMN = 4


def default_solver(size: int, num_columns: int, *, rtol: float = 1e-2) -> BlockConjugateGradient:
    """Return block CG, with a Nyström preconditioner of four times the number of right-hand sides as rank.

    Without it for one right-hand side, where there is nothing to share and block CG is CG, and for matrices so
    small that the rank would be more than a tenth of them. The matrix has to be positive semi-definite plus the
    damping, as Gauss-Newton matrices are.

    Products a system in benchmarks/solvers, residual 1e-2, set-up included: on an overfitted MLP 34 for 25 sides
    and 18 for 100, against 43 and 22 of block CG alone and 152 of CG. Where few are enough it takes more, for 5
    sides 17 against 14 on a small OPT, 11 against 9 on a ResNet-20.

    Memory: block CG's ten or so vectors a column, and four times as many vectors as columns, eight times while the
    preconditioner is set up. Where that is too much (100 sides of a ResNet-18: 18 and 36 GB), take
    BlockConjugateGradient alone, or fewer sides at a time.

    Args:
        size: P of the (P, P) matrix.
        num_columns: right-hand sides.
        rtol: residual to reach in each.
    """
    if size < 1 or num_columns < 1:
        raise ValueError(f"size and num_columns must be at least 1, got {size} and {num_columns}")
    rank = _RANK_PER_COLUMN * num_columns
    if num_columns == 1 or 10 * rank > size:
        return BlockConjugateGradient(rtol=rtol)
    return BlockConjugateGradient(rtol=rtol, preconditioner=Nystrom(rank))
