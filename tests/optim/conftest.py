from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from curvlab.linalg import DenseOperator


class Quadratic(nn.Module):
    """½ xᵀHx - bᵀx."""

    def __init__(self, matrix: Tensor, linear: Tensor, start: Tensor) -> None:
        super().__init__()
        self.matrix, self.linear = matrix, linear
        self.x = nn.Parameter(start.clone())

    def forward(self) -> Tensor:
        return 0.5 * self.x @ self.matrix @ self.x - self.linear @ self.x

    def closure(self) -> Tensor:
        self.zero_grad()
        value = self()
        value.backward()
        return value

    @property
    def operator(self) -> DenseOperator:
        return DenseOperator(self.matrix)


@pytest.fixture
def make_quadratic(generator: torch.Generator) -> Callable[..., Quadratic]:
    """Quadratics with given eigenvalues in a random basis."""

    def make(eigenvalues: list[float]) -> Quadratic:
        size = len(eigenvalues)
        draw = torch.randn(size, size + 2, dtype=torch.float64, generator=generator)
        basis = torch.linalg.qr(draw[:, :size]).Q
        matrix = basis @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ basis.T
        return Quadratic((matrix + matrix.T) / 2, draw[:, size], draw[:, size + 1])

    return make
