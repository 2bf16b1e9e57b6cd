"""The interface of a preconditioner that is built from the operator it is for."""

from __future__ import annotations

from typing import Protocol

import torch

from curvlab.linalg import LinearOperator


class Preconditioner(Protocol):
    """A recipe; `ConjugateGradient` follows it at each solve and counts what it costs."""

    def build(
        self, operator: LinearOperator, *, generator: torch.Generator | None = None
    ) -> tuple[LinearOperator, int]:
        """Return a positive definite operator that approximates the inverse, and the products it took."""
        ...


def build_preconditioner(
    preconditioner: LinearOperator | Preconditioner | None,
    operator: LinearOperator,
    *,
    generator: torch.Generator | None = None,
) -> tuple[LinearOperator | None, int]:
    """Return the approximate inverse that a solver's `preconditioner` stands for, and the products it took."""
    if preconditioner is None or isinstance(preconditioner, LinearOperator):
        return preconditioner, 0
    return preconditioner.build(operator, generator=generator)
