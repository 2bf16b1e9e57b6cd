"""Models whose loss at every parameter is known, and E[nbeta K] by quadrature: shares no code with the sampler."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

FP64 = torch.float64


def mean_output(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


class Polynomial(nn.Module):
    """K(w) = sum or product of w_i^p_i, the same for every example; minimum 0 at w = 0."""

    def __init__(self, powers: tuple[int, ...], *, product: bool) -> None:
        super().__init__()
        self.powers, self.product = powers, product
        self.w = nn.Parameter(torch.zeros(len(powers), dtype=FP64))

    def forward(self, inputs: Tensor) -> Tensor:
        terms = torch.stack([self.w[i] ** power for i, power in enumerate(self.powers)])
        return (terms.prod() if self.product else terms.sum()).expand(len(inputs))


class Stretched(nn.Module):
    """K(w) = sum_i h_i w_i² / 2: parameters of very different curvature."""

    def __init__(self, curvatures: list[float]) -> None:
        super().__init__()
        self.register_buffer("curvatures", torch.tensor(curvatures, dtype=FP64))
        self.w = nn.Parameter(torch.zeros(len(curvatures), dtype=FP64))

    def forward(self, inputs: Tensor) -> Tensor:
        return (0.5 * self.curvatures * self.w**2).sum().expand(len(inputs))


def no_inputs(num_examples: int = 8) -> tuple[Tensor, Tensor]:
    return torch.zeros(num_examples, 1, dtype=FP64), torch.zeros(num_examples, dtype=FP64)


def quadrature(powers: tuple[int, ...], *, nbeta: float, localization: float) -> float:
    """E[nbeta prod w_i^p_i] under exp(-nbeta prod w_i^p_i - localization/2 |w|²), even powers, midpoint rule."""
    points = {2: 1200, 3: 140}[len(powers)]
    axis = (np.arange(points) + 0.5) * (8 / math.sqrt(localization) / points)
    grids = np.meshgrid(*[axis] * len(powers), indexing="ij", sparse=True)
    energy, square = np.ones(()), np.zeros(())
    for grid, power in zip(grids, powers, strict=True):
        energy = energy * grid**power
        square = square + grid**2
    weight = np.exp(-nbeta * energy - localization / 2 * square)
    return float((nbeta * energy * weight).sum() / weight.sum())


class ReducedRank(nn.Module):
    """y = B A x at the most singular true parameter of rank r: both factors are diag(1, ..., 1, 0, ..., 0)."""

    def __init__(self, num_inputs: int, num_outputs: int, num_hidden: int, rank: int) -> None:
        super().__init__()
        first, last = torch.zeros(num_hidden, num_inputs), torch.zeros(num_outputs, num_hidden)
        for i in range(rank):
            first[i, i] = last[i, i] = 1.0
        self.first, self.last = nn.Parameter(first.to(FP64)), nn.Parameter(last.to(FP64))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.first.T @ self.last.T


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - targets).square().sum(-1).mean()


def aoyagi_watanabe(num_inputs: int, num_outputs: int, num_hidden: int, rank: int) -> float:
    """Learning coefficient of reduced-rank regression (Aoyagi & Watanabe 2005, Theorem 1)."""
    m, n, h, r = num_inputs, num_outputs, num_hidden, rank
    if m + h < n + r:
        return (h * m - h * r + n * r) / 2
    if n + h < m + r:
        return (h * n - h * r + m * r) / 2
    if m + n < h + r:
        return m * n / 2
    odd = (m + h + n + r) % 2
    return (odd - (h + r) ** 2 - m**2 - n**2 + 2 * (h + r) * m + 2 * (h + r) * n + 2 * m * n) / 8


def linear_regression(
    num_examples: int, num_features: int, *, seed: int
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a linear model at its least-squares solution, with its data; P = num_features + 1."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_examples, num_features, generator=generator, dtype=FP64)
    targets = inputs.sum(1, keepdim=True) + 0.3 * torch.randn(num_examples, 1, generator=generator, dtype=FP64)
    design = torch.cat([inputs, torch.ones(num_examples, 1, dtype=FP64)], 1)
    solution = torch.linalg.lstsq(design, targets).solution
    model = nn.Linear(num_features, 1).to(FP64)
    with torch.no_grad():
        model.weight.copy_(solution[:-1].T)
        model.bias.copy_(solution[-1])
    return model, (inputs, targets)


def regular_coefficient(inputs: Tensor, *, nbeta: float, localization: float) -> float:
    """1/2 sum of nbeta e_i / (nbeta e_i + localization), e_i the eigenvalues of the squared error's Hessian."""
    design = torch.cat([inputs, torch.ones(len(inputs), 1, dtype=FP64)], 1)
    stiffness = nbeta * torch.linalg.eigvalsh(2 * design.T @ design / len(inputs))
    return 0.5 * float((stiffness / (stiffness + localization)).sum())
