"""Kaldi's online estimate of the Fisher matrix of one tensor axis, for a batch of tensors of one shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

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

    All tensors are views of what `Estimates` keeps for many axes, which writes new values into them.

    Attributes:
        layout: shape shared by the tensors of the batch.
        factor: W, (B, rank, dim).
        product: J = WXᵀX of the gradient that was observed last, (B, rank, dim).
        eigenvalues: D, (B, rank), squared gradient per row.
        rho: ρ, (B,).
        norm: ‖X‖_F of the stack that was observed last, (B,); its caller's to write.
    """

    layout: AxisLayout
    factor: Tensor
    product: Tensor
    eigenvalues: Tensor
    rho: Tensor
    norm: Tensor
    _inverse: Tensor | None = field(default=None, init=False)
    _identity: Tensor | None = field(default=None, init=False)

    def scaled_inverse(self) -> Tensor:
        """Return β(F + κI)⁻¹ = I - WᵀW, (B, dim, dim), kept until `forget`."""
        if self._inverse is None:
            if self._identity is None:
                self._identity = torch.eye(self.layout.dim, dtype=self.factor.dtype, device=self.factor.device)
            self._inverse = torch.baddbmm(self._identity, self.factor.mT, self.factor, alpha=-1)
        return self._inverse

    def forget(self) -> None:
        """Say that W has changed."""
        self._inverse = None

    @property
    def is_short(self) -> bool:
        """Whether one product with a (dim, dim) matrix is cheaper than two with thin ones."""
        return self.layout.dim <= min(_SHORT, 2 * self.layout.rank)


class AxisProduct:
    """The product of a stack X, (B, ...), with β(F + κI)⁻¹ along one axis, between two buffers that stay in place.

    All views are made here, once: on small tensors they would take longer than the arithmetic.

    Attributes:
        fisher: F.
        flat: X, (B, numbers of a tensor).
        result, free: the buffer that `multiply` leaves the result in, and the other one.
    """

    def __init__(self, fisher: AxisFisher, x: Tensor, scratch: Tensor) -> None:
        """`x` and `scratch`: (B, ...), contiguous, each member laid out as `fisher.layout` says."""
        layout, count = fisher.layout, len(x)
        self.fisher, self.flat = fisher, x.view(count, -1)
        self.result, self.free = (scratch, x) if fisher.is_short else (x, scratch)
        self._in_rows = layout.after == 1
        self._before = 1 if self._in_rows else layout.before  # matrices of columns in a tensor
        shape, hidden = (count * layout.before, layout.dim, layout.after), (layout.rank, layout.after)
        if self._in_rows:
            shape, hidden = (count, layout.before, layout.dim), (layout.before, layout.rank)
        self._x, self._out = x.view(shape), scratch.view(shape)
        size = shape[0] * math.prod(hidden)
        self._hidden = scratch.view(-1)[:size].view(shape[0], *hidden)  # rank < dim, so it fits
        self._x_mT, self._hidden_mT, self._factor_mT = self._x.mT, self._hidden.mT, fisher.factor.mT
        self._inverse: Tensor | None = None
        self._inverse_of: Tensor | None = None

    def multiply(self, *, observe: bool) -> None:
        """Write X - XWᵀW into `result`; with `observe`, also J into `fisher.product`.

        Cost: 4 · rank flops for each element, or 2 · dim where the axis is short; at most as much again for J.
        """
        if self.fisher.is_short:
            if observe:
                self.observe()
            inverse = self._repeated_inverse()
            torch.bmm(*((self._x, inverse) if self._in_rows else (inverse, self._x)), out=self._out)
            return
        factor_mT = self._project()
        if observe:
            self._observe_hidden()
        if self._in_rows:
            self._x.baddbmm_(self._hidden, self.fisher.factor, alpha=-1)
        else:
            self._x.baddbmm_(factor_mT, self._hidden, alpha=-1)

    def observe(self) -> None:
        """Write J = WXᵀX into `fisher.product`."""
        if not self.fisher.is_short:
            self._project()
            return self._observe_hidden()
        x, x_mT = self._x, self._x_mT
        moment = torch.bmm(x_mT, x) if self._in_rows else self._summed(torch.bmm(x, x_mT))
        torch.bmm(self.fisher.factor, moment, out=self.fisher.product)
        return None

    def _project(self) -> Tensor:
        """Write XWᵀ into `_hidden`; return Wᵀ for each matrix in `_x`."""
        if self._in_rows:
            torch.bmm(self._x, self._factor_mT, out=self._hidden)
            return self._factor_mT
        factor = self._repeated(self.fisher.factor)
        torch.bmm(factor, self._x, out=self._hidden)
        return self._factor_mT if self._before == 1 else factor.mT

    def _observe_hidden(self) -> None:
        if self._in_rows:
            torch.bmm(self._hidden_mT, self._x, out=self.fisher.product)
        elif self._before == 1:
            torch.bmm(self._hidden, self._x_mT, out=self.fisher.product)
        else:
            self.fisher.product.copy_(self._summed(torch.bmm(self._hidden, self._x_mT)))

    def _repeated_inverse(self) -> Tensor:
        inverse = self.fisher.scaled_inverse()
        if self._inverse is None or self._inverse_of is not inverse:
            self._inverse_of, self._inverse = inverse, self._repeated(inverse)
        return self._inverse

    def _repeated(self, matrices: Tensor) -> Tensor:
        if self._before == 1:
            return matrices
        return matrices[:, None].expand(-1, self._before, -1, -1).flatten(0, 1)

    def _summed(self, products: Tensor) -> Tensor:
        return products if self._before == 1 else products.unflatten(0, (-1, self._before)).sum(1)


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
