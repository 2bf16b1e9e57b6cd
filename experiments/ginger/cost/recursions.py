"""Recursions of the Ginger paper that the optimizer does not use, dense or in the given precision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def algorithm_1(vectors: Iterable[Tensor], *, decay: float, damping: float, rank: int) -> Iterator[Tensor]:
    """Yield G⁻¹ = γ⁻¹I - U K Uᵀ after each update, (n, n), by Algorithm 1 letter by letter.

    Its `h` is that of ασ, but its K that of σ with γ/α, and without the α⁻¹ of Eq. 17; its β is
    (α⁻¹ - 1)/(α + (1 - α)hᵀd).
    """
    basis, sigma = torch.zeros(0), torch.zeros(0)
    for d in vectors:
        if not len(basis):
            basis, sigma = d.new_zeros(len(d), 0), d.new_zeros(0)
        h = d / damping - basis @ (_kappa(decay * sigma, damping) * (basis.T @ d))
        beta = (1 / decay - 1) / (decay + (1 - decay) * h @ d)
        matrix = (basis * _kappa(sigma, damping / decay)) @ basis.T + beta * torch.outer(h, h)
        values, vectors_of = torch.linalg.eigh(matrix)
        kappa, basis = values.flip(0)[:rank], vectors_of.flip(1)[:, :rank]
        remainder = 1 - damping * kappa
        sigma = torch.where(remainder == 0, 0.0, damping**2 * kappa / remainder)  # the printed pseudo-inverse
        yield torch.eye(len(d), dtype=d.dtype) / damping - (basis * kappa) @ basis.T


def kept_inverse(
    vectors: Iterable[Tensor], *, decay: float, damping: float, rank: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield U (n, k) and κ (k,) of the inverse γ⁻¹I - U diag(κ) Uᵀ after each update, as long as it is finite.

    What Sec. 2.3 says, with α-factors that fit each other, in the precision of the vectors: the inverse is updated
    (Eq. 17, in Brand's basis) and cut, and σ comes from it by Eq. 18.
    """
    basis, sigma = torch.zeros(0), torch.zeros(0)
    for d in vectors:
        if not len(basis):
            basis, sigma = d.new_zeros(len(d), 0), d.new_zeros(0)
        kappa = _kappa(decay * sigma, damping)
        h = d / damping - basis @ (kappa * (basis.T @ d))
        beta = (1 - decay) / (1 + (1 - decay) * h @ d)
        inside = basis.T @ h
        outside = h - basis @ inside
        outside = outside - basis @ (basis.T @ outside)
        length = outside.norm()
        column = torch.cat([inside, length[None]])
        core = torch.diag(torch.cat([kappa, kappa.new_zeros(1)])) + beta * torch.outer(column, column)
        if not bool(core.isfinite().all()):
            return
        values, rotation = torch.linalg.eigh(core)
        kappa = values.flip(0)[:rank]
        basis = torch.cat([basis, (outside / length)[:, None]], 1) @ rotation.flip(1)[:, :rank]
        sigma = damping**2 * kappa / (1 - damping * kappa)
        yield basis, kappa


def _kappa(sigma: Tensor, damping: float) -> Tensor:
    """Return the diagonal of K_γ, Eq. 16."""
    return sigma / (damping * (damping + sigma))
