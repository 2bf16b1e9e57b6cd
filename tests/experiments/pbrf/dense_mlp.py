"""A network of one hidden layer of four tanh written out; its mean squares, and their dense curvature."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).double()


def outputs(vector: Tensor, inputs: Tensor) -> Tensor:
    w, b, v, c = vector.split([4 * inputs.shape[1], 4, 4, 1])
    return torch.tanh(inputs @ w.reshape(4, -1).T + b) @ v[:, None] + c


def losses(vector: Tensor, data: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = (part.double() for part in data)
    return (outputs(vector, inputs) - targets).square().mean(1)


def dense_hessian(model: nn.Module, data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The Hessian of the mean loss, (P, P), and every example's gradient, (N, P), in double."""
    theta = weights(model)
    mean = hessian(lambda vector: losses(vector, data).mean(), theta)
    return mean, jacobian(lambda vector: losses(vector, data), theta)


def dense_gauss_newton(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    rows = jacobian(lambda vector: outputs(vector, data[0])[:, 0], weights(model))
    return 2 / len(rows) * rows.T @ rows
