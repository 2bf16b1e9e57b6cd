"""Gradients of single examples by autograd, and weighted ridge regression: nothing here comes from src."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def gradient(value: Tensor, model: nn.Module) -> Tensor:
    """Return the gradient of a number with respect to all parameters, (P,)."""
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(value, list(model.parameters()), retain_graph=True)]
    )


def gradient_rows(model: nn.Module, loss: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """Return each example's gradient of its own loss, (N, P)."""
    return torch.stack([gradient(loss(model(x[None]), y[None]), model) for x, y in zip(*data, strict=True)])


def ridge(x: Tensor, y: Tensor, weights: Tensor, damping: float) -> Tensor:
    """Return the minimum of 1/N Σ w_i (y_i - θᵀx_i)² + damping/2 |θ|² by its normal equations, (F,)."""
    matrix = 2 / len(x) * x.T @ (weights[:, None] * x) + damping * torch.eye(x.shape[1], dtype=torch.float64)
    return torch.linalg.solve(matrix, 2 / len(x) * x.T @ (weights * y))
