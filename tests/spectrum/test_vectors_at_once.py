"""How many vectors fit, and that a sketch holds no more."""

from __future__ import annotations

import pytest
import torch
from curvature_oracles import Memory
from torch import Tensor

from curvlab.linalg import DenseOperator, LinearOperator, identity
from curvlab.spectrum import sketch_eigenvalues
from curvlab.spectrum.eigenvalues import vectors_that_fit


class Diagonal(LinearOperator):
    """A product holds nothing but what it returns."""

    def __init__(self, size: int) -> None:
        super().__init__(size, dtype=torch.float64, device="cpu")
        self.values = torch.arange(1, size + 1, dtype=torch.float64).rsqrt()

    def matmat(self, vectors: Tensor) -> Tensor:
        return vectors * self.values[:, None]


def test_peak_is_the_budgets_and_a_products_own_and_not_the_rows() -> None:
    size, bytes_of_a_vector = 20_000, 8 * 20_000
    with Memory() as memory:
        sketch_eigenvalues(
            Diagonal(size), sketch_size=20, chunk_size=20, memory_budget=12.0 * bytes_of_a_vector, generator=0
        )
    taken = memory.peak / bytes_of_a_vector
    # Copies that a product and inner products make come on top. All 20 rows at once take 100.
    assert 3 < taken < 16, f"12 vectors were given, {taken:.1f} were taken"


def test_number_that_fits() -> None:
    operator = DenseOperator(torch.eye(10))
    assert vectors_that_fit(operator, 400.0) == 10
    assert vectors_that_fit(0.5 * operator + 0.1 * identity, 439.0) == 10
    assert vectors_that_fit(operator, 39.0) == 0
    assert vectors_that_fit(operator, float("inf")) > 1e12
    assert vectors_that_fit(operator, None) > 1000
    with pytest.raises(ValueError, match="memory_budget is in bytes, at least 1, got 0: 2e9 for 2 GB"):
        vectors_that_fit(operator, 0)


def test_ranks_take_the_least_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    class TwoRanks:
        size = 2

        def gather(self, value: int) -> list[int]:
            return [value, 7]

    operator = DenseOperator(torch.eye(10))
    monkeypatch.setattr(operator, "ranks", TwoRanks(), raising=False)
    assert vectors_that_fit(2.0 * operator, 4000.0) == 7
    assert vectors_that_fit(operator, 40.0) == 1
