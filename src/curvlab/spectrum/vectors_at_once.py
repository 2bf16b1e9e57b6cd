"""How many vectors of an operator's length may be held: from a budget of bytes, by default from what is free."""

from __future__ import annotations

from curvlab.linalg import LinearOperator
from curvlab.problem.memory import share_of_free


def vectors_that_fit(operator: LinearOperator, memory_budget: float | None) -> int:
    """Return how many vectors, of the rows that this process holds, fill the budget; 0 where not one fits.

    Args:
        operator: whose vectors.
        memory_budget: in bytes; None: 80 % of what is free now.
    """
    if memory_budget is not None and memory_budget < 1:
        raise ValueError(f"memory_budget is in bytes, at least 1, got {memory_budget}: 2e9 for 2 GB")
    budget = share_of_free(operator.device) if memory_budget is None else memory_budget
    if memory_budget is None and operator.device.type == "cpu":
        budget /= operator.ranks.size  # processes of one machine share its memory
    number = int(min(budget / (max(1, operator.num_rows) * operator.dtype.itemsize), 2**62))
    # Ranks go in step: with fewer vectors on one of them, it would ask for products that the others do not join.
    return min(operator.ranks.gather(number))
