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
