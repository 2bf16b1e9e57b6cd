"""The matrices of Ginger and QNG in the coordinates of a stream, dense, and what they are compared with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvlab.optim import QNG, Ginger


@dataclass(frozen=True)
class Shifted:
    """shift I + M, M symmetric, (n, n): a curvature matrix as both methods have it.

    Attributes:
        shift: of the identity; M says nothing outside of the stream's span, and this is all there is.
        matrix: M.
    """

    shift: float
    matrix: Tensor

    @property
    def inverse(self) -> Tensor:
        """(shift I + M)⁻¹, from the eigenvalues of M, which may be far smaller than the shift or far larger."""
        values, vectors = torch.linalg.eigh(self.matrix)
        return (vectors / (self.shift + values)) @ vectors.T


def ginger_of(size: int, *, rank: int, decay: float, damping: float) -> Ginger:
    """Return Ginger of one vector of `size` numbers in double precision."""
    return Ginger([_vector(size)], 1.0, rank=rank, decay=decay, damping=damping)


def qng_of(size: int, *, rank: int, decay: float) -> QNG:
    """Return QNG of one vector of `size` numbers in double precision."""
    return QNG([_vector(size)], 1.0, rank=rank, decay=decay)


def _vector(size: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(size, dtype=torch.float64))


def update(optimizer: Ginger | QNG, d: Tensor) -> None:
    """Bring a gradient of sampled labels, (n,), into an optimizer of one vector."""
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = d.to(parameter.dtype, copy=True)
    optimizer.update_curvature()


def low_rank_part(ginger: Ginger) -> Tensor:
    """Return U diag(σ) Uᵀ, (n, n), which does not depend on the damping."""
    ((values, vectors),) = ginger.eigendecompositions()
    return (vectors * values) @ vectors.T


def inverse_of(optimizer: Ginger | QNG) -> Tensor:
    """Return what the optimizer multiplies gradients by, (n, n): a product for each column."""
    (parameter,) = optimizer.param_groups[0]["params"]
    identity = torch.eye(len(parameter), dtype=torch.float64)
    return torch.stack([optimizer.inverse_product(column) for column in identity], 1)


def product_of(qng: QNG, num_updates: int) -> Shifted:
    """Return A Aᵀ of QNG after so many updates, as α^min(τ, t) I + M."""
    settings = qng.param_groups[0]
    shift = settings["decay"] ** min(settings["rank"], num_updates)
    matrix = torch.linalg.inv(inverse_of(qng))
    return Shifted(shift, matrix - shift * torch.eye(len(matrix), dtype=matrix.dtype))


def moving_averages(vectors: Iterable[Tensor], decay: float) -> Iterator[Tensor]:
    """Yield G_1, G_2, ..., (n, n): Eq. 7 from G_0 = 0."""
    average: Tensor | float = 0.0
    for d in vectors:
        average = decay * average + (1 - decay) * torch.outer(d, d)
        yield average


def cut(matrix: Tensor, rank: int) -> Tensor:
    """Return the best approximation of a positive semi-definite matrix of this rank."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors[:, -rank:] * values[-rank:]) @ vectors[:, -rank:].T


def spectral_norm(matrix: Tensor) -> float:
    """Return ‖M‖₂ of a symmetric matrix."""
    return float(torch.linalg.eigvalsh((matrix + matrix.T) / 2).abs().max())
