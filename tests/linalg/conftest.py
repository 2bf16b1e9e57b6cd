import pytest
import torch
from torch import Tensor


@pytest.fixture
def symmetric(generator: torch.Generator) -> Tensor:
    """(7, 7), fp64, indefinite."""
    matrix = torch.randn(7, 7, dtype=torch.float64, generator=generator)
    return matrix + matrix.T


@pytest.fixture
def gram_matrices(generator: torch.Generator) -> Tensor:
    """(5, 4, 4), fp64, each of rank one and positive semi-definite."""
    rows = torch.randn(5, 4, 1, dtype=torch.float64, generator=generator)
    return rows @ rows.mT
