"""The solver to take where nothing else is asked for."""

from __future__ import annotations

from curvlab.arguments import whole
from curvlab.linalg import LinearOperator
from curvlab.progress import announce
from curvlab.solvers.block_cg import BlockConjugateGradient
from curvlab.solvers.preconditioners import Nystrom, Rows, RowsPlan, plan_rows
from curvlab.solvers.solver import check_stopping

# Residual 1e-2 on an overfitted MLP on MNIST, 25 right-hand sides: 1,050 products without a preconditioner; with
# ranks of 2, 4, 6 and 8 times 25, whose set-up is counted, 900, 850, 825 and 825. Where block CG alone needs few
# steps, the set-up costs more than it saves, so the rank is kept small.
_RANK_PER_COLUMN = 4
# Steps that block CG has to need before the set-up pays: at 8 to 14 it costs two or three products a system more.
_STEPS_WORTH_A_RANK = 15
_PRODUCTS_WORTH_A_LINE = 100

MEMORY_FOR_ROWS = 2**30


def default_solver(
    size: int,
    num_columns: int,
    *,
    rtol: float = 1e-2,
    operator: LinearOperator | None = None,
    memory_for_rows: int = MEMORY_FOR_ROWS,
) -> BlockConjugateGradient:
    """Return block CG with the preconditioner that makes it cheapest; its Solution says in words which.

    The choice is told in a line, with the steps and products that are predicted: on a terminal where these are a
    hundred and more.

    With `operator`, a Gauss-Newton matrix of a network of linear and convolutional layers: as many rows of the
    examples with most curvature (`Rows`) as pay, by the seconds counted for every number of them, none included
    (`plan_rows`). All rows are taken where they are few, as in a regression; few where block CG needs few steps;
    the more, the more it would need.

    Else a Nyström preconditioner of four times the number of right-hand sides as rank; none for a single side,
    where block CG is CG and there is nothing to share, where fewer than 15 steps are predicted, and for matrices
    so small that the rank would exceed half their size, or, with nothing predicted, a tenth. The matrix has to be
    a positive semi-definite one plus the damping, as damped Gauss-Newton matrices are.

    Measured on fitted networks for a residual of 1e-2, in products a system and seconds on a shared core. The
    784-128-128-10 on 18,000 MNIST digits, 10 sides, λ = 1e-3: block CG 75 (155 s), Nyström 63 (127 s), 1,000 rows
    22 (44 s), 2,815 rows 12 (26 s), 4,096 rows, which are chosen, 10 (25 s), 5,711 rows 7 (45 s); λ = 1/(ηT) =
    0.012: Nyström 22 (42 s), 2,048 rows, which are chosen, 7 (14 s); λ = λmax: Nyström 7 (13 s), block CG 4
    (7.5 s). On 6,000 digits, 25 sides, λ = 1e-3: block CG 45 (67 s), Nyström 35 (53 s), 2,000 rows 7
    (14 s), 4,000 rows 5 (15 s). A regression on Concrete, 25 sides, λ = 1/(ηT): Nyström 24 (5.5 s), all 927 rows,
    which are chosen, 2 (1 s).
    No number of examples has a cliff. A 196-32-10 on MNIST digits at 14 × 14, 10 sides, λ = 1e-3, in the order
    block CG, Nyström, 1,024, 2,048 and 4,096 rows: 28, 24, 12, 9, 7 (8.0, 6.3, 3.8, 3.5, 5.5 s) on 17,000, of
    which 1,024 rows are chosen; 28, 25, 12, 9, 7 (7.4, 6.7, 4.2, 4.1, 5.6 s) on 18,000, of which 2,048 are;
    and on all 60,000 Nyström 24, the rows 18, 14, 11 (21.8; 14.9, 11.3, 13.9 s), of which 2,048 are. At λmax on
    17,000 block CG, which is chosen, 3 (0.75 s), 1,024 rows 3 (0.9 s). To choose took 0.1 to 0.9 s. The choice is
    not the fastest where there are many more rows than parameters: an 8-50-1 on 3,000 points, 25 sides, λ = 1e-4:
    all rows, which are chosen, 3 (1.6 s), 512 rows 18 (1.0 s).

    Products per right-hand side in benchmarks/solvers, for a residual of 1e-2, set-up included: on an overfitted
    MLP 34 with 25 sides and 18 with 100 by Nyström, where block CG alone takes 43 and 22, and CG 152.

    Memory, in vectors of P numbers: about ten for each column (block CG); and either the rows' budget at most, or,
    for Nyström, four more for each column, eight while it is set up. Where that is too much (100 sides of a
    ResNet-18: the preconditioner takes 18 GB, and 36 GB while it is set up), use BlockConjugateGradient alone, or
    fewer sides at a time.

    Args:
        size: P of the (P, P) matrix.
        num_columns: right-hand sides.
        rtol: residual to reach in each.
        operator: G + damping I, whose damping says how many steps there are. Cost of looking: four forwards.
        memory_for_rows: bytes that rows may take.
    """
    whole("size", size)
    whole("num_columns", num_columns, why="right-hand sides, or queries")
    check_stopping(rtol, None)
    plan = None
    if operator is not None:
        plan = plan_rows(operator, num_columns, rtol=rtol, memory_budget=memory_for_rows)
    rank = _RANK_PER_COLUMN * num_columns
    soon = plan is not None and plan.steps_without < _STEPS_WORTH_A_RANK
    recipe: Rows | Nystrom | None = None
    if plan is not None and plan.num_rows > 0:
        recipe = Rows(plan.num_rows, memory_budget=memory_for_rows)
    elif not (num_columns == 1 or (10 if plan is None else 2) * rank > size or soon):
        recipe = Nystrom(rank)
    if plan is not None:
        _tell(plan, recipe, num_columns)
    return BlockConjugateGradient(rtol=rtol, preconditioner=recipe)


def _tell(plan: RowsPlan, recipe: Rows | Nystrom | None, num_columns: int) -> None:
    taken = f"a Nyström preconditioner of rank {recipe.rank}" if isinstance(recipe, Nystrom) else str(plan)
    products = round(num_columns * plan.steps)
    line = f"default solver: block conjugate gradients, {taken}, about {products:,} products"
    announce(line, worth_a_line=products >= _PRODUCTS_WORTH_A_LINE)
