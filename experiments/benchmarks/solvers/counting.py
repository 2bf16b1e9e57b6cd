"""What a solver paid by when: products in full-data equivalents, seconds, and how good its answer was."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from curvlab.curvature import GaussNewtonOperator
from curvlab.linalg import LinearOperator

GROWTH = 1.25  # between steps at which the iterate is looked at


@dataclass
class Counter:
    """Work so far, one unit for each product of one vector with the matrix of the whole data."""

    work: float = 0.0


class CountedOperator(LinearOperator):
    """A curvature matrix that counts its products, and those of its batches by their share of the data."""

    def __init__(self, operator: GaussNewtonOperator, counter: Counter, *, weight: float = 1.0) -> None:
        super().__init__(operator.shape[0], dtype=operator.dtype, device=operator.device)
        self.operator, self.counter, self.weight = operator, counter, weight

    def matmat(self, vectors: Tensor) -> Tensor:
        """Return A V."""
        self.counter.work += self.weight * vectors.shape[1]
        return self.operator.matmat(vectors)

    # Batches are uniform here.
    def sample(  # type: ignore[override]
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> CountedOperator:
        """Return a batch, whose products count batch_size / N."""
        weight = batch_size / self.operator.num_examples
        return CountedOperator(self.operator.sample(batch_size, generator), self.counter, weight=weight)

    @property
    def is_psd(self) -> bool:
        """As the operator counted."""
        return self.operator.is_psd


@dataclass
class Recorder:
    """Compares iterates with the reference at steps 1, 2, 3, ..., growing by a quarter; that time is not counted.

    Attributes:
        counter: of the products.
        reference: (P, R), solutions of the first R systems.
        point_gradients: (M, P), of training losses; products with a solution are influence scores, up to sign.
    """

    counter: Counter
    reference: Tensor
    point_gradients: Tensor
    clock: Callable[[], float]
    rows: list[dict[str, float | Tensor]] = field(default_factory=list)
    _next: float = 1.0
    _paused: float = 0.0
    _start: float = field(default=math.nan)

    def start(self) -> None:
        """Begin to count seconds."""
        self._start = self.clock()

    def __call__(self, state: Any) -> None:
        """Look at the iterate if it is time."""
        if (step := state.num_steps) < self._next:
            return
        self._next = max(step + 1, step * GROWTH)
        self.record(state.x)

    def record(self, x: Tensor) -> None:
        """Add a row: work, seconds, error and correlation of each system."""
        now = self.clock()
        seconds = now - self._start - self._paused
        x = x[:, : self.reference.shape[1]].to(self.reference)
        reference = self.reference[:, : x.shape[1]]
        errors = (x - reference).norm(dim=0) / reference.norm(dim=0)
        correlations = pearson(self.point_gradients @ x, self.point_gradients @ reference)
        self.rows.append(
            {"work": self.counter.work, "seconds": seconds, "errors": errors, "correlations": correlations}
        )
        self._paused += self.clock() - now


def pearson(left: Tensor, right: Tensor) -> Tensor:
    """Return the correlation of each pair of columns, (M, K), (M, K) -> (K,)."""
    left, right = left - left.mean(0), right - right.mean(0)
    return (left * right).sum(0) / (left.norm(dim=0) * right.norm(dim=0))
