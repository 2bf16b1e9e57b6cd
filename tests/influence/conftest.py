"""Linear least squares, where influence and the proximal response are known in closed form."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LeastSquares:
    """y ≈ W x, mean squared error over examples and outputs, and what follows from it by hand."""

    model: nn.Linear
    loss: nn.Module
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    gram: Tensor  # (P, P): 2/(NC) kron(I_C, XᵀX)
    train_gradients: Tensor  # (N, P)
    test_gradients: Tensor  # (M, P)


@pytest.fixture
def least_squares(generator: torch.Generator) -> LeastSquares:
    features, outputs, num_train, num_test = 5, 3, 12, 7

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    model = nn.Linear(features, outputs, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(draw(outputs, features))
    train, test = (
        (draw(num_train, features), draw(num_train, outputs)),
        (draw(num_test, features), draw(num_test, outputs)),
    )

    def gradients(x: Tensor, y: Tensor) -> Tensor:
        residual = x @ model.weight.detach().T - y
        return torch.einsum("no,nf->nof", 2 / outputs * residual, x).reshape(len(x), -1)

    gram = torch.kron(torch.eye(outputs, dtype=torch.float64), 2 / (num_train * outputs) * train[0].T @ train[0])
    return LeastSquares(model, nn.MSELoss(), train, test, gram, gradients(*train), gradients(*test))
