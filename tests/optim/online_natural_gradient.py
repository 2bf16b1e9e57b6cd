"""Kaldi's online natural gradient once more: one tensor, one axis, one formula at a time, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

SETTINGS = {"alpha": 4.0, "eta": 0.1, "epsilon": 1e-10, "delta": 5e-4}


class Axis:
    """One axis of one tensor, as in Povey, Zhang & Khudanpur (2015), with their K, L and Z."""

    def __init__(self, dim: int, rank: int, *, alpha: float, eta: float, epsilon: float, delta: float) -> None:
        self.dim, self.rank = dim, rank
        self.alpha, self.eta, self.epsilon, self.delta = alpha, eta, epsilon, delta
        self.rho, self.D = epsilon, np.full(rank, epsilon)
        R = np.zeros((rank, dim))
        for i in range(rank):
            for j in range(i, dim, rank):
                R[i, j] = 1.1 if j == i else 1.0
            R[i] /= np.sqrt((R[i] ** 2).sum())
        self.W = np.sqrt(self.E())[:, None] * R

    def beta(self) -> float:
        return self.rho * (1 + self.alpha) + self.alpha * self.D.sum() / self.dim

    def E(self) -> np.ndarray:
        return 1 / (self.beta() / self.D + 1)

    def output(self, X: np.ndarray) -> np.ndarray:
        return X - X @ self.W.T @ self.W

    def update(self, X: np.ndarray) -> None:
        N, d, r, eta = len(X), self.dim, self.rank, self.eta
        H = X @ self.W.T
        J = H.T @ X
        K, L = J @ J.T, H.T @ H
        root = np.diag(self.E() ** -0.5)
        old = np.diag(self.D + self.rho)
        cross = root @ L @ root @ old
        Z = (eta / N) ** 2 * root @ K @ root + (eta / N) * (1 - eta) * (cross + cross.T) + (1 - eta) ** 2 * old**2
        C, U = np.linalg.eigh(Z)
        C = np.maximum(C, (self.rho * (1 - eta)) ** 2)
        rho = (eta / N * (X**2).sum() + (1 - eta) * (d * self.rho + self.D.sum()) - np.sqrt(C).sum()) / (d - r)
        floor = max(self.epsilon, self.delta * np.sqrt(C).max())
        B = J + (1 - eta) / (eta / N) * old @ self.W
        self.D, self.rho = np.maximum(np.sqrt(C) - rho, floor), max(rho, floor)
        self.W = eta / N * np.diag(self.E() ** 0.5) @ np.diag(C**-0.5) @ U.T @ root @ B


class Recursion:
    """All axes of one tensor."""

    def __init__(
        self, shape: Sequence[int], *, rank: int | None, period: int, rescale: bool, **settings: float
    ) -> None:
        self.period, self.rescale, self.calls = period, rescale, 0
        default = {d: min((d + 1) // 2, 80) if rank is None else rank for d in shape}
        self.axes = {k: Axis(d, min(default[d], d - 1), **settings) for k, d in enumerate(shape) if d > 1}

    def __call__(self, gradient: np.ndarray) -> np.ndarray:
        x = gradient
        for k, axis in self.axes.items():
            moved = np.moveaxis(x, k, -1)
            X = moved.reshape(-1, axis.dim)
            for _ in range(3 if self.calls == 0 else 0):
                axis.update(X)
            Y = axis.output(X)
            if self.calls < 10 or self.calls % self.period == 0:
                axis.update(X)
            if self.rescale:
                Y = Y * np.linalg.norm(X) / np.linalg.norm(Y)
            x = np.moveaxis(Y.reshape(moved.shape), -1, k)
        self.calls += 1
        return x


def outputs(
    parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor]
) -> list[Tensor]:
    """Take one step of lr = 1 and return the displacements, negated."""
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.to(parameter.dtype)
    optimizer.step()
    return [old - new.detach() for old, new in zip(before, parameters, strict=True)]


def colored(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return a random gradient whose axes have covariances of their own."""
    x = torch.randn(tuple(shape), dtype=torch.float64, generator=generator)
    for axis, dim in enumerate(shape):
        scales = torch.linspace(0.2, 2, dim, dtype=torch.float64).roll(axis)
        x = x * scales.reshape([-1 if k == axis else 1 for k in range(len(shape))])
    return x
