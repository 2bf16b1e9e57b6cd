from collections.abc import Callable

import pytest
import torch
from torch import Tensor


def example_matrices(kind: str, *, num_examples: int, size: int, seed: int = 0) -> Tensor:
    """(N, P, P), fp64, positive semi-definite examples a_n a_nᵀ with different tails."""
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(num_examples, size, generator=generator, dtype=torch.float64)
    if kind == "decaying":
        factors = factors * torch.arange(1, size + 1).double() ** -0.7
    elif kind == "heavy_tailed":  # a few examples carry most of the curvature
        factors = factors * torch.rand(num_examples, 1, generator=generator, dtype=torch.float64) ** -0.4
    elif kind == "rank_deficient":
        factors[:, size // 2 :] = 0
    return factors[:, :, None] * factors[:, None, :]


@pytest.fixture(params=["isotropic", "decaying", "heavy_tailed", "rank_deficient"])
def examples(request: pytest.FixtureRequest) -> Tensor:
    return example_matrices(request.param, num_examples=80, size=20)


@pytest.fixture(scope="session")
def build_examples() -> Callable[..., Tensor]:
    return example_matrices
