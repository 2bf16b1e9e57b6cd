"""Iterates of a solver beside exact solutions, by the products that they took."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from curvlab.linalg import DerivedOperator, LinearOperator
from experiments.shared.stats import correlation


@dataclass
class Counter:
    """Work so far, one unit for each product of one vector with the matrix of the whole data."""

    work: float = 0.0


class CountedOperator(DerivedOperator):
    """An operator whose products are counted, each as `weight`; it has no batches."""

    def __init__(self, operator: LinearOperator, counter: Counter, *, weight: float = 1.0) -> None:
        super().__init__(operator)
        self.counter, self.weight = counter, weight

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return A V."""
        self.counter.work += self.weight * vectors.shape[1]
        return self.origin.matmat(vectors)

    @property
    def is_psd(self) -> bool:
        """As the operator counted."""
        return self.origin.is_psd

    @property
    def damping(self) -> float:
        """As the operator counted."""
        return self.origin.damping


@dataclass
class Stride:
    """Steps 1, 2, 3, ..., from the last one on further apart by a factor.

    Attributes:
        growth: the factor.
    """

    growth: float
    _next: float = 1.0

    def wants(self, step: int) -> bool:
        """Return whether a step is looked at."""
        if step < self._next:
            return False
        self._next = max(step + 1, step * self.growth)
        return True


@dataclass
class Trajectory:
    """Iterates compared with the exact solutions, in the order of their work.

    Attributes:
        reference: exact solutions, (P, K).
        test_gradients: (M, P), of the same dtype; their products with a solution are scores, up to sign.
    """

    reference: Tensor
    test_gradients: Tensor
    _rows: list[tuple[float, Tensor, Tensor]] = field(default_factory=list)

    def add(self, work: float, x: Tensor) -> None:
        """Compare an iterate."""
        self._rows.append((work, *self.compare(x)))

    def compare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return relative errors (that of 0 = 0 is 0), and correlations of scores over the tests, (K,) each."""
        x, scale = x.to(self.reference), self.reference.norm(dim=0)
        errors = (x - self.reference).norm(dim=0) / torch.where(scale > 0, scale, torch.ones_like(scale))
        return errors, correlation(self.test_gradients @ x, self.test_gradients @ self.reference)

    def as_tensors(self) -> dict[str, Any]:
        """Return work as a list, errors and correlations as (S, K)."""
        work, errors, correlations = zip(*self._rows, strict=True)
        return {"work": list(work), "errors": torch.stack(errors), "correlations": torch.stack(correlations)}
