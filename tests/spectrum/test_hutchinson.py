import pytest
import torch
from torch import Tensor

from curvlab.linalg import DenseOperator
from curvlab.spectrum import hutchinson_trace


class CountingOperator(DenseOperator):
    """Counts columns, to check the cost that is reported."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__(matrix)
        self.columns = 0

    def matmat(self, vectors: Tensor) -> Tensor:
        self.columns += vectors.shape[1]
        return super().matmat(vectors)


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
def test_intervals_cover_dense_trace(matrix: Tensor, distribution: str) -> None:
    operator, truth = DenseOperator(matrix), float(matrix.trace())
    generator = torch.Generator().manual_seed(1)
    covered = 0
    for _ in range(200):
        estimate = hutchinson_trace(operator, num_matvecs=40, distribution=distribution, generator=generator)
        covered += abs(estimate.value - truth) <= 2.023 * estimate.stderr + 1e-10  # t, 39 degrees of freedom
    assert 180 <= covered <= 200
    if float(matrix.norm() ** 2 - matrix.diagonal().norm() ** 2) > 1e-6:  # else signs are exact
        assert covered <= 198


def test_variance_is_the_known_one(build_matrix) -> None:
    matrix = build_matrix("decaying", 60)
    num = 4000
    for distribution, variance in (
        ("gaussian", 2 * (matrix**2).sum()),
        ("rademacher", 2 * ((matrix**2).sum() - (matrix.diagonal() ** 2).sum())),
    ):
        generator = torch.Generator().manual_seed(0)
        estimate = hutchinson_trace(
            DenseOperator(matrix), num_matvecs=num, distribution=distribution, generator=generator
        )
        assert num * estimate.stderr**2 == pytest.approx(float(variance), rel=0.15)


def test_diagonal_matrix_is_exact_with_signs() -> None:
    operator = DenseOperator(torch.diag(torch.arange(5.0, dtype=torch.float64)))
    estimate = hutchinson_trace(operator, num_matvecs=3, generator=torch.Generator().manual_seed(0))
    assert estimate.value == 10.0
    assert estimate.stderr == 0.0


@pytest.mark.parametrize("rtol", [0.2, 0.05])
def test_stops_on_relative_standard_error(build_matrix, rtol: float) -> None:
    operator = CountingOperator(build_matrix("decaying", 60))
    generator = torch.Generator().manual_seed(0)
    estimate = hutchinson_trace(operator, rtol=rtol, chunk_size=5, generator=generator)
    assert estimate.stderr <= rtol * estimate.value
    assert estimate.num_matvecs == operator.columns
    assert 10 <= estimate.num_matvecs < 10_000


def test_limit_on_products_is_kept_and_stderr_tells(build_matrix) -> None:
    operator = CountingOperator(build_matrix("decaying", 60))
    estimate = hutchinson_trace(operator, rtol=1e-6, max_matvecs=70, generator=torch.Generator().manual_seed(0))
    assert estimate.num_matvecs == operator.columns == 70
    assert estimate.stderr > 1e-6 * estimate.value


def test_same_generator_same_estimate(build_matrix) -> None:
    operator = DenseOperator(build_matrix("decaying", 60))
    results = [
        hutchinson_trace(operator, num_matvecs=10, generator=torch.Generator().manual_seed(s)).value
        for s in (0, 0, 1)
    ]
    assert results[0] == results[1] != results[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "say how much work"),
        ({"rtol": 0.0}, "rtol must be positive"),
        ({"num_matvecs": 0}, "num_matvecs=0"),
        ({"num_matvecs": 5, "distribution": "uniform"}, "'rademacher' or 'gaussian'"),
    ],
)
def test_bad_settings(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hutchinson_trace(DenseOperator(torch.eye(3)), **settings)


def test_nan_is_refused() -> None:
    matrix = torch.eye(3, dtype=torch.float64)
    operator = DenseOperator(matrix)
    operator.matrix[0, 0] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        hutchinson_trace(operator, num_matvecs=2)
