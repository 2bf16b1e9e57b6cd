"""The solver to take where nothing else is asked for."""

from __future__ import annotations

from curvlab.arguments import whole
from curvlab.linalg import LinearOperator
from curvlab.progress import SECONDS_WORTH_A_FORECAST, announce, duration
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
    """Return block CG with the preconditioner that makes it cheapest; its bar and its Solution say which.

    The choice is told in a line, with the steps and products that are predicted, and the time where it is more
    than ten seconds: on a terminal where products are a hundred and more, else to the logger "curvlab".

    With `operator`, a Gauss-Newton matrix of a network of linear and convolutional layers: as many rows of the
    examples with most curvature (`Rows`) as take the fewest seconds, counted for each number of them, none and all
    included (`plan_rows`). The more steps block CG would take, the more rows pay. With all rows it takes one step,
    but to set M of them up takes O(M³): where its steps are few, few rows or none take less, also where rows are
    more than the P parameters. The (P, P) matrix itself is P products, which seldom takes less.

    Else a Nyström preconditioner of four times the number of right-hand sides as rank; none for a single side,
    where block CG is CG and there is nothing to share, where fewer than 15 steps are predicted, and for matrices
    so small that the rank would exceed half their size, or, with nothing predicted, a tenth. The matrix has to be
    a positive semi-definite one plus the damping, as damped Gauss-Newton matrices are.

    The measurements are results of `make bench-solvers` and `make bench-scale`: on fitted networks rows save most
    of the products and of the seconds of block CG, alone or with a Nyström preconditioner; at a damping of λmax
    there is nothing to save. No number of examples has a cliff, and to choose takes less than a system.

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
    whole("memory_for_rows", memory_for_rows)
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
    rows = f"{recipe.num_rows:,} rows of examples" if isinstance(recipe, Rows) else "no preconditioner"
    chosen = f"a Nyström preconditioner of rank {rank}" if isinstance(recipe, Nystrom) else rows
    if plan is not None:
        _tell(plan, str(plan) if chosen == rows else chosen, num_columns)
    return BlockConjugateGradient(rtol=rtol, preconditioner=recipe, progress=f"block CG, {chosen}")


def _tell(plan: RowsPlan, taken: str, num_columns: int) -> None:
    products = round(num_columns * plan.steps)
    line = f"default solver: block conjugate gradients, {taken}, about {products:,} products"
    if plan.seconds > SECONDS_WORTH_A_FORECAST:
        line += f", {duration(plan.seconds)} on one CPU core"
    announce(line, worth_a_line=products >= _PRODUCTS_WORTH_A_LINE)
