"""Kaldi's online estimate of the Fisher matrix of one tensor axis, for a batch of tensors of one shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

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

    def beta(self, alpha: float) -> Tensor:
        """Return β, (B,)."""
        return self.rho * (1 + alpha) + alpha / self.layout.dim * self.eigenvalues.sum(-1)

    def apply_(self, x: Tensor, *, with_product: bool) -> tuple[Tensor, Tensor | None]:
        """Return X - XWᵀW, shaped as `x`, and on request J = WXᵀX, (B, rank, dim); `x` may be overwritten.

        `x` is (B, ...) contiguous, each member laid out as `layout` says. Cost: 4 · rank flops an element, or
        2 · dim where the axis is short; as much again, at most, for J.
        """
        if self.layout.after == 1:
            rows = x.view(len(x), self.layout.before, self.layout.dim)
            output, product = self._apply_to_rows_(rows, with_product=with_product)
        else:
            columns = x.view(len(x) * self.layout.before, self.layout.dim, self.layout.after)
            output, product = self._apply_to_columns_(columns, with_product=with_product)
        return output.view_as(x), product

    def _apply_to_rows_(self, rows: Tensor, *, with_product: bool) -> tuple[Tensor, Tensor | None]:
        """`rows`: (B, N, dim)."""
        factor = self.factor
        if self._is_short:
            product = factor @ (rows.mT @ rows) if with_product else None
            return rows @ self._projection(), product
        hidden = rows @ factor.mT
        product = hidden.mT @ rows if with_product else None
        return rows.baddbmm_(hidden, factor, alpha=-1), product

    def _apply_to_columns_(self, columns: Tensor, *, with_product: bool) -> tuple[Tensor, Tensor | None]:
        """`columns`: (B · before, dim, after)."""
        factor = self._repeated(self.factor)
        if self._is_short:
            product = self.factor @ self._summed(columns @ columns.mT) if with_product else None
            return self._repeated(self._projection()) @ columns, product
        hidden = factor @ columns
        product = self._summed(hidden @ columns.mT) if with_product else None
        return columns.baddbmm_(factor.mT, hidden, alpha=-1), product

    @property
    def _is_short(self) -> bool:
        """Whether one product with a (dim, dim) matrix is cheaper than two with thin ones."""
        return self.layout.dim <= _SHORT

    def _projection(self) -> Tensor:
        identity = torch.eye(self.layout.dim, dtype=self.factor.dtype, device=self.factor.device)
        return torch.baddbmm(identity, self.factor.mT, self.factor, alpha=-1)

    def _repeated(self, matrices: Tensor) -> Tensor:
        return matrices[:, None].expand(-1, self.layout.before, -1, -1).flatten(0, 1)

    def _summed(self, products: Tensor) -> Tensor:
        return products.unflatten(0, (-1, self.layout.before)).sum(1)


def start(layout: AxisLayout, like: Tensor, smoothing: Smoothing) -> tuple[Tensor, Tensor, Tensor]:
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


@dataclass(frozen=True)
class AxisUpdate:
    """What a gradient contributes to an axis: J = WXᵀX, (B, rank, dim), and ‖X‖²_F, (B,)."""

    fisher: AxisFisher
    product: Tensor
    squared_norm: Tensor


def absorb(updates: Sequence[AxisUpdate], smoothing: Smoothing) -> None:
    """Bring one gradient into each estimate, in place: F <- (η/N) XᵀX + (1-η) F =: T, cut to its rank.

    Y = RT, (rank, dim), with YYᵀ = UCUᵀ gives R' = C^-½ UᵀY, ρ' = (tr T - tr C^½)/(dim - rank) and D' = C^½ - ρ',
    both at least max(ε, δ max C^½). It is the recursion of Povey et al. (2015, Z = YYᵀ), a step of subspace
    iteration; formed from Y itself, it also restores orthonormal rows of R where rounding has lost them.

    YYᵀ squares the condition of Y, so it is formed and decomposed in double precision, all estimates of one rank
    at once. C is cut at (ρ(1-η))², which exact arithmetic never reaches, and at rounding.

    Raises:
        ValueError: the gradients hold NaN or infinity.
    """
    by_rank = sorted(updates, key=lambda update: update.fisher.layout.rank)
    for _, group in groupby(by_rank, key=lambda update: update.fisher.layout.rank):
        members = list(group)
        products = [_basis_times_moment(member, smoothing) for member in members]
        spectra, rotations = _eigh(torch.cat([_gram(product) for product in products]))
        sizes = [len(product) for product in products]
        parts = zip(members, products, spectra.split(sizes), rotations.split(sizes), strict=True)
        for member, product, spectrum, rotation in parts:
            _replace(member, product, spectrum, rotation, smoothing)


def _gram(product: Tensor) -> Tensor:
    wide = product.double()
    return wide @ wide.mT


def _eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    if not bool(matrices.isfinite().all()):  # waits for the device, as eigh itself does
        raise ValueError(
            "NGD found NaN or infinity in its gradients, or gradients beyond the range of their precision: the "
            "iteration has diverged. Lower lr, or raise alpha."
        )
    spectra, rotations = torch.linalg.eigh(matrices)
    return spectra, rotations


def _basis_times_moment(update: AxisUpdate, smoothing: Smoothing) -> Tensor:
    """Return Y = RT = E^-½ [(η/N) J + (1-η)(D + ρ) W], (B, rank, dim)."""
    fisher, eta = update.fisher, smoothing.eta
    if fisher.layout.has_few_rows:
        _rescale_start(update, smoothing)
    inverse_root = (fisher.beta(smoothing.alpha)[:, None] / fisher.eigenvalues + 1).sqrt()
    old = (1 - eta) * (fisher.eigenvalues + fisher.rho[:, None]) * inverse_root
    new = eta / fisher.layout.num_rows * inverse_root
    return new[..., None] * update.product + old[..., None] * fisher.factor


def _rescale_start(update: AxisUpdate, smoothing: Smoothing) -> None:
    """Set ρ = D = ‖X‖²/(N d), the mean eigenvalue, in estimates that still stand at their floor ε.

    With fewer rows than the rank, the first gradient leaves directions in which T is ε times the identity, 1e-10
    beside the gradient: the recursion would take them from rounding. W does not change: E is the same wherever
    ρ = D.
    """
    fisher, layout = update.fisher, update.fisher.layout
    floor = smoothing.epsilon * (1 + 1e-5)
    fresh = (fisher.rho <= floor) & (fisher.eigenvalues.amax(-1) <= floor)
    scale = (update.squared_norm / (layout.num_rows * layout.dim)).clamp_min(smoothing.epsilon)
    fisher.rho.copy_(torch.where(fresh, scale, fisher.rho))
    fisher.eigenvalues.copy_(torch.where(fresh[:, None], scale[:, None], fisher.eigenvalues))


def _replace(
    update: AxisUpdate, product: Tensor, spectrum: Tensor, rotation: Tensor, smoothing: Smoothing
) -> None:
    """Write W', D' and ρ' from Y and the eigendecomposition of YYᵀ."""
    fisher, layout, eta = update.fisher, update.fisher.layout, smoothing.eta
    rounding = layout.rank * torch.finfo(spectrum.dtype).eps * spectrum.amax(-1)
    least = torch.maximum(((1 - eta) * fisher.rho.double()).square(), rounding)
    roots = torch.maximum(spectrum, least[:, None]).sqrt()
    trace_before = layout.dim * fisher.rho.double() + fisher.eigenvalues.double().sum(-1)
    trace = eta / layout.num_rows * update.squared_norm.double() + (1 - eta) * trace_before
    rho = (trace - roots.sum(-1)) / (layout.dim - layout.rank)
    floor = (smoothing.delta * roots.amax(-1)).clamp_min(smoothing.epsilon)
    fisher.eigenvalues.copy_(torch.maximum(roots - rho[:, None], floor[:, None]))
    fisher.rho.copy_(torch.maximum(rho, floor))
    weights = (fisher.beta(smoothing.alpha)[:, None] / fisher.eigenvalues + 1).rsqrt()
    left = (weights / roots)[..., None] * rotation.mT
    fisher.factor.copy_(left.to(product.dtype) @ product)
