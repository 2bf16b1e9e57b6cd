"""How many vectors fit, and that a sketch holds no more: measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from curvlab.linalg import DenseOperator, identity
from curvlab.spectrum.eigenvalues import vectors_that_fit

SIZE = 2_000_000  # numbers of a vector: 16 MB in float64

# A diagonal operator: a product holds nothing but what it returns. Prints by how much the peak rises, in vectors.
MEASURE = f"""
import sys, torch
from curvlab.linalg import LinearOperator
from curvlab.spectrum import sketch_eigenvalues, top_eigenvalues
SIZE = {SIZE}
class Diagonal(LinearOperator):
    def __init__(self):
        super().__init__(SIZE, dtype=torch.float64, device="cpu")
        self.values = torch.arange(1, SIZE + 1, dtype=torch.float64).reciprocal_().sqrt_()
    def matmat(self, vectors):
        return vectors * self.values[:, None]
op, budget = Diagonal(), float(sys.argv[2]) * SIZE * 8
torch.linalg.eigh(torch.eye(50, dtype=torch.float64)); torch.randn(1000, 50).T @ torch.randn(1000, 50)
def peak():  # of this program: ru_maxrss would be its parent's where that has been larger
    with open("/proc/self/status") as lines:
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
before = peak()
generator = torch.Generator().manual_seed(0)
if sys.argv[1] == "sketch":
    sketch_eigenvalues(op, sketch_size=20, chunk_size=20, memory_budget=budget, generator=generator)
else:
    found = top_eigenvalues(op, rtol=1e-9, max_matvecs=40, memory_budget=budget, generator=generator)
    assert found.num_matvecs > 15
print((peak() - before) / SIZE / 8)
"""


def rise(what: str, num_vectors: int) -> float:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, what, str(num_vectors)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


@pytest.mark.parametrize("what", ["sketch"])
def test_peak_is_the_budgets_and_a_products_own_and_not_the_rows(what: str) -> None:
    narrow = rise(what, 12)
    # Copies that a product and inner products make come on top: 18.7 here. All 20 rows at once take 100.
    assert 3 < narrow < 22, f"12 vectors were given, {narrow:.1f} were taken"


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
