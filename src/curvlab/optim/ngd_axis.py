"""Kaldi's online estimate of the Fisher matrix of one tensor axis, for a batch of tensors of one shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_DEFAULT_RANK = 80
_SHORT = 16  # axes up to here take one product with a (dim, dim) matrix instead of two thin ones


@dataclass(frozen=True)
class Smoothing:
    """Settings of the recursion, as in Povey, Zhang & Khudanpur (2015).

    Attributes:
        alpha: α, identity added, in units of the mean eigenvalue.
        eta: η, weight of the newest gradient in the moving average.
        epsilon: ε, absolute floor of all eigenvalues.
        delta: δ, floor of all eigenvalues relative to the largest.
    """

    alpha: float
    eta: float
    epsilon: float
    delta: float


@dataclass(frozen=True)
class AxisLayout:
    """Where an axis of size `dim` lies in the memory of one tensor: (before, dim, after), row-major.

    The gradient's slices along the other axes are the rows of X, (num_rows, dim).
    """

    before: int
    dim: int
    after: int
    rank: int

    @property
    def num_rows(self) -> int:
        """N."""
        return self.before * self.after

    @property
    def has_few_rows(self) -> bool:
        """Whether one gradient cannot fill the rank: the start then needs a scale of its own."""
        return self.num_rows < self.rank


def fitting_rank(dim: int, rank: int | None) -> int:
    """Return the rank used for an axis: at most dim - 1; None: half the axis, at most 80."""
    wanted = min((dim + 1) // 2, _MAX_DEFAULT_RANK) if rank is None else rank
    return min(wanted, dim - 1)


@dataclass
class AxisFisher:
    """F = RᵀDR + ρI, smoothed to F + κI = RᵀDR + βI, for B tensors; R has orthonormal rows.

    Kept as W = E^½ R with E = (β/D + 1)⁻¹, so that β (F + κI)⁻¹ = I - WᵀW; β = ρ(1+α) + α tr(D)/d, that is
    κ = α/d tr(F) (Saghir et al. 2024, Eq. 7), up to the rank's share of ρ.

    Attributes:
        layout: shape shared by the tensors of the batch.
        factor: W, (B, rank, dim).
        eigenvalues: D, (B, rank), squared gradient per row.
        rho: ρ, (B,).
    """

    layout: AxisLayout
    factor: Tensor
    eigenvalues: Tensor
    rho: Tensor

    def apply_(self, x: Tensor, scratch: Tensor, *, with_product: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return X - XWᵀW, shaped as `x`, the buffer that is free now, and on request J = WXᵀX, (B, rank, dim).

        `x` is (B, ...) contiguous, each member laid out as `layout` says. The result is written over `x` or over
        `scratch`, of the same shape; the other one is free. Cost: 4 · rank flops for each element, or 2 · dim
        where the axis is short; at most as much again for J.
        """
        before, dim, after = self.layout.before, self.layout.dim, self.layout.after
        if after == 1:
            shape = (len(x), before, dim)
            product = self._apply_to_rows_(x.view(shape), scratch.view(shape), with_product=with_product)
        else:
            shape = (len(x) * before, dim, after)
            product = self._apply_to_columns_(x.view(shape), scratch.view(shape), with_product=with_product)
        return (scratch, x, product) if self._is_short else (x, scratch, product)

    def scaled_inverse(self) -> Tensor:
        """Return β(F + κI)⁻¹ = I - WᵀW, (B, dim, dim)."""
        identity = torch.eye(self.layout.dim, dtype=self.factor.dtype, device=self.factor.device)
        return torch.baddbmm(identity, self.factor.mT, self.factor, alpha=-1)

    def _apply_to_rows_(self, rows: Tensor, scratch: Tensor, *, with_product: bool) -> Tensor | None:
        """`rows`: (B, N, dim)."""
        factor = self.factor
        if self._is_short:
            torch.bmm(rows, self.scaled_inverse(), out=scratch)
            return factor @ (rows.mT @ rows) if with_product else None
        hidden = rows @ factor.mT
        product = hidden.mT @ rows if with_product else None
        rows.baddbmm_(hidden, factor, alpha=-1)
        return product

    def _apply_to_columns_(self, columns: Tensor, scratch: Tensor, *, with_product: bool) -> Tensor | None:
        """`columns`: (B · before, dim, after)."""
        if self._is_short:
            torch.bmm(self._repeated(self.scaled_inverse()), columns, out=scratch)
            return self.factor @ self._summed(columns @ columns.mT) if with_product else None
        factor = self._repeated(self.factor)
        hidden = factor @ columns
        product = self._summed(hidden @ columns.mT) if with_product else None
        columns.baddbmm_(factor.mT, hidden, alpha=-1)
        return product

    @property
    def _is_short(self) -> bool:
        """Whether one product with a (dim, dim) matrix is cheaper than two with thin ones."""
        return self.layout.dim <= min(_SHORT, 2 * self.layout.rank)

    def _repeated(self, matrices: Tensor) -> Tensor:
        return matrices[:, None].expand(-1, self.layout.before, -1, -1).flatten(0, 1)

    def _summed(self, products: Tensor) -> Tensor:
        return products.unflatten(0, (-1, self.layout.before)).sum(1)


def kronecker(matrices: Sequence[Tensor]) -> Tensor:
    """Return A ⊗ B ⊗ ..., of matrices (B, m, m), (B, n, n), ..., the first of which acts on the outermost axis."""
    product = matrices[0]
    for matrix in matrices[1:]:
        size = product.shape[-1] * matrix.shape[-1]
        product = torch.einsum("bij,bkl->bikjl", product, matrix).reshape(-1, size, size)
    return product


def initial_estimate(layout: AxisLayout, like: Tensor, smoothing: Smoothing) -> tuple[Tensor, Tensor, Tensor]:
    """Return W (rank, dim), D (rank,) and ρ () before any gradient: ρ = D = ε and a fixed R.

    Row i of R is non-zero in columns i, i + rank, i + 2 rank, ..., the first of them 1.1 times the others.
    """
    rank, dim = layout.rank, layout.dim
    columns = torch.arange(dim, device=like.device)
    own = torch.arange(rank, device=like.device)[:, None]
    basis = (columns % rank == own).to(like.dtype) + 0.1 * (columns == own).to(like.dtype)
    basis = basis / torch.linalg.vector_norm(basis, dim=1, keepdim=True)
    weight = 1 / (2 + smoothing.alpha * (dim + rank) / dim)  # E where ρ = D
    eigenvalues = basis.new_full((rank,), smoothing.epsilon)
    return weight**0.5 * basis, eigenvalues, basis.new_full((), smoothing.epsilon)
