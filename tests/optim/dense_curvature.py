"""Moving averages of outer products and what the Ginger paper does with them, dense and in NumPy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

SHAPES = [(4, 3), (), (7,)]  # of the parameters that stand for one vector of 20
SIZE = 20


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]


def set_gradients(members: Sequence[nn.Parameter], vector: np.ndarray | Tensor) -> None:
    """Give the parameters the pieces of a vector as gradients."""
    pieces = torch.as_tensor(vector).split([parameter.numel() for parameter in members])
    for parameter, piece in zip(members, pieces, strict=True):
        parameter.grad = piece.reshape(parameter.shape).to(parameter.dtype, copy=True)


def update(optimizer: torch.optim.Optimizer, members: Sequence[nn.Parameter], vector: np.ndarray | Tensor) -> None:
    set_gradients(members, vector)
    optimizer.update_curvature()


def inverse(optimizer: torch.optim.Optimizer, size: int = SIZE) -> np.ndarray:
    """G⁻¹, (P, P), one product a column."""
    columns = [optimizer.inverse_product(e) for e in torch.eye(size, dtype=torch.float64)]
    return torch.stack(columns, 1).numpy()


def colored_vectors(count: int, size: int = SIZE, seed: int = 0) -> np.ndarray:
    """Return (count, size): Gaussians whose covariance has eigenvalues from 9 to 0.01 in a random basis."""
    random = np.random.default_rng(seed)
    basis = np.linalg.qr(random.standard_normal((size, size)))[0]
    return random.standard_normal((count, size)) * np.geomspace(3, 0.1, size) @ basis.T


def moving_average(vectors: np.ndarray, decay: float, start: float = 0.0) -> np.ndarray:
    """Eq. 7 from G_0 = start I."""
    G = start * np.eye(vectors.shape[1])
    for d in vectors:
        G = decay * G + (1 - decay) * np.outer(d, d)
    return G


def printed_algorithm(
    vectors: np.ndarray, *, decay: float, damping: float, rank: int, mended: bool = False
) -> list[np.ndarray]:
    """Algorithm 1 as printed, letter by letter, or as misprints.yaml mends it: its G⁻¹ after each update."""
    size, ratio = vectors.shape[1], damping / decay
    U, sigma, found = np.zeros((size, 0)), np.zeros(0), []
    for d in vectors:
        K = sigma / (ratio**2 + ratio * sigma)
        scaled = decay * sigma
        h = d / damping - U @ (scaled / (damping**2 + damping * scaled) * (U.T @ d))
        if mended:
            h, K = d / ratio - U @ (K * (U.T @ d)), K / decay
        beta = (1 / decay - 1) / (decay + (1 - decay) * h @ d)
        values, vectors_of = np.linalg.eigh(U @ np.diag(K) @ U.T + beta * np.outer(h, h))
        K, U = values[::-1][:rank], vectors_of[:, ::-1][:, :rank]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sigma = np.where(1 - damping * K == 0, 0.0, damping**2 * K / (1 - damping * K))
        found.append(np.eye(size) / damping - U @ np.diag(K) @ U.T)
    return found


def quasi_natural_inverse(
    vectors: np.ndarray, *, decay: float, rank: int, as_coded: bool = False
) -> tuple[np.ndarray, list[np.ndarray]]:
    """(A Aᵀ)⁻¹ of QNG after all updates, and the last factors K, oldest first; one factor after the other."""
    kept: list[np.ndarray] = []  # q, oldest first

    def factor(q: np.ndarray) -> np.ndarray:
        beta = (np.sqrt(decay + (1 - decay) * q @ q) - np.sqrt(decay)) / (q @ q)
        return np.sqrt(decay) * np.eye(len(q)) + beta * np.outer(q, q)

    def inverse_factor(x: np.ndarray) -> np.ndarray:
        if as_coded:
            result = x.copy()
            for q in kept:
                weight = (1 - np.sqrt(decay / (decay + (1 - decay) * q @ q))) / (q @ q)
                result = result - weight * (q @ x) * q  # x, where the product would have what is left of it
            return result * decay ** (-len(kept) / 2)
        for q in kept:
            x = np.linalg.solve(factor(q), x)
        return x

    for d in vectors:
        kept.append(inverse_factor(d))
        if len(kept) > rank:
            # The new q was found with the factors before it, the oldest of which goes now.
            kept.pop(0)
    size = vectors.shape[1]
    B = np.stack([inverse_factor(e) for e in np.eye(size)], 1)
    return B.T @ B, [factor(q) for q in kept]
