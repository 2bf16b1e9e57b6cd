"""Random probe vectors, and products with them that are checked."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from curvlab.linalg import LinearOperator, SumOperator

Distribution = Literal["rademacher", "gaussian"]


def draw_probes(
    operator: LinearOperator,
    num_probes: int,
    *,
    distribution: Distribution = "rademacher",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return (P, num_probes) with independent entries of mean 0 and variance 1: signs, or normals."""
    if distribution not in ("rademacher", "gaussian"):
        raise ValueError(f"distribution must be 'rademacher' or 'gaussian', got {distribution!r}")
    normals = operator.randn(num_probes, generator)  # the operator's own, so that sharded vectors agree
    return torch.where(normals < 0, -1.0, 1.0).to(normals) if distribution == "rademacher" else normals


def checked_product(operator: LinearOperator, vectors: Tensor) -> Tensor:
    """Return A V, or raise a ValueError when it is not finite."""
    products = operator @ vectors
    if not bool(torch.isfinite(products).all()):
        raise ValueError(
            f"the product with {describe(operator)} is not finite (NaN or inf): check the model's "
            "parameters and outputs for NaN, or use float64."
        )
    return products


def describe(operator: LinearOperator) -> str:
    """Return the type's name; for a sum those of its terms."""
    if isinstance(operator, SumOperator):
        return " + ".join(type(term).__name__ for term in operator.terms)
    return type(operator).__name__
