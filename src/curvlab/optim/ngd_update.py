"""Updates of Kaldi's online Fisher estimates, those of equal dimension and rank together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from curvlab.optim.ngd_axis import AxisFisher, Smoothing


@dataclass(frozen=True)
class AxisUpdate:
    """What a gradient contributes to an axis: J = WXᵀX, (B, rank, dim), and ‖X‖²_F, (B,)."""

    fisher: AxisFisher
    product: Tensor
    squared_norm: Tensor


def update_estimates(updates: Iterable[AxisUpdate], smoothing: Smoothing) -> None:
    """Bring one gradient into each estimate, in place: F <- (η/N) XᵀX + (1-η) F =: T, truncated to its rank.

    Y = RT, (rank, dim), with YYᵀ = UCUᵀ gives R' = C^-½ UᵀY, ρ' = (tr T - tr C^½)/(dim - rank) and D' = C^½ - ρ',
    both at least max(ε, δ max C^½). It is the recursion of Povey et al. (2015, Z = YYᵀ), a step of subspace
    iteration; formed from Y itself, it also restores orthonormal rows of R where rounding has lost them.

    YYᵀ squares the condition of Y, so it is formed and decomposed in double precision, all estimates of one rank
    at once. Values of C below (ρ(1-η))², which exact arithmetic never reaches, or below rounding are raised to it.
    The gradients must be finite: NGD has checked them.
    """
    in_order = sorted(updates, key=lambda update: (*_kind(update), _dim(update)))
    for _, of_rank in groupby(in_order, key=_kind):
        stacks = [_Stack.of(list(members)) for _, members in groupby(of_rank, key=_dim)]
        products = [stack.basis_times_moment(smoothing) for stack in stacks]
        sizes = [len(product) for product in products]
        spectra, rotations = torch.linalg.eigh(torch.cat([_gram(product) for product in products]))
        parts = zip(stacks, products, spectra.split(sizes), rotations.split(sizes), strict=True)
        for stack, product, spectrum, rotation in parts:
            stack.replace(product, spectrum, rotation, smoothing)


def _dim(update: AxisUpdate) -> int:
    return update.fisher.layout.dim


def _kind(update: AxisUpdate) -> tuple[int, str, str]:
    """Return what estimates that are decomposed together have in common."""
    return update.fisher.layout.rank, str(update.product.dtype), str(update.product.device)


def _gram(product: Tensor) -> Tensor:
    wide = product.double()
    return wide @ wide.mT


@dataclass
class _Stack:
    """Updates of B estimates of one dimension and rank, from tensors of any shape.

    Attributes:
        members: the updates, of one or more estimates each.
        factor, eigenvalues, rho: copies of theirs; W (B, rank, dim), D (B, rank), ρ (B,).
        product, squared_norm: theirs; J (B, rank, dim), ‖X‖² (B,).
        num_rows: N, (B,).
        has_few_rows: `AxisLayout.has_few_rows`, (B,).
    """

    members: Sequence[AxisUpdate]
    factor: Tensor
    eigenvalues: Tensor
    rho: Tensor
    product: Tensor
    squared_norm: Tensor
    num_rows: Tensor
    has_few_rows: Tensor

    @classmethod
    def of(cls, members: Sequence[AxisUpdate]) -> _Stack:
        fishers = [member.fisher for member in members]
        sizes = [len(member.product) for member in members]
        return cls(
            members=members,
            factor=torch.cat([fisher.factor for fisher in fishers]),
            eigenvalues=torch.cat([fisher.eigenvalues for fisher in fishers]),
            rho=torch.cat([fisher.rho for fisher in fishers]),
            product=torch.cat([member.product for member in members]),
            squared_norm=torch.cat([member.squared_norm for member in members]),
            num_rows=_repeated([fisher.layout.num_rows for fisher in fishers], sizes, fishers[0].rho),
            has_few_rows=_repeated([fisher.layout.has_few_rows for fisher in fishers], sizes, fishers[0].rho) > 0,
        )

    @property
    def dim(self) -> int:
        return self.factor.shape[2]

    @property
    def rank(self) -> int:
        return self.factor.shape[1]

    def beta(self, alpha: float) -> Tensor:
        """Return β, (B,)."""
        return self.rho * (1 + alpha) + alpha / self.dim * self.eigenvalues.sum(-1)

    def basis_times_moment(self, smoothing: Smoothing) -> Tensor:
        """Return Y = RT = E^-½ [(η/N) J + (1-η)(D + ρ) W], (B, rank, dim)."""
        eta = smoothing.eta
        self._rescale_start(smoothing)
        inverse_root = (self.beta(smoothing.alpha)[:, None] / self.eigenvalues + 1).sqrt()
        old = (1 - eta) * (self.eigenvalues + self.rho[:, None]) * inverse_root
        new = (eta / self.num_rows)[:, None] * inverse_root
        return torch.addcmul(new[..., None] * self.product, old[..., None], self.factor)

    def _rescale_start(self, smoothing: Smoothing) -> None:
        """Set ρ = D = ‖X‖²/(N d), the mean eigenvalue, in estimates that still stand at their floor ε.

        With fewer rows than the rank, the first gradient leaves directions in which T is ε times the identity,
        1e-10 beside the gradient: the recursion would take them from rounding. W does not change: E is the same
        wherever ρ = D.
        """
        floor = smoothing.epsilon * (1 + 1e-5)
        fresh = self.has_few_rows & (self.rho <= floor) & (self.eigenvalues.amax(-1) <= floor)
        scale = (self.squared_norm / (self.num_rows * self.dim)).clamp_min(smoothing.epsilon)
        self.rho = torch.where(fresh, scale, self.rho)
        self.eigenvalues = torch.where(fresh[:, None], scale[:, None], self.eigenvalues)

    def replace(self, product: Tensor, spectrum: Tensor, rotation: Tensor, smoothing: Smoothing) -> None:
        """Write W', D' and ρ' from Y and the eigendecomposition of YYᵀ into the members' estimates."""
        eta = smoothing.eta
        rounding = self.rank * torch.finfo(spectrum.dtype).eps * spectrum.amax(-1)
        least = torch.maximum(((1 - eta) * self.rho.double()).square(), rounding)
        roots = torch.maximum(spectrum, least[:, None]).sqrt()
        trace_before = self.dim * self.rho.double() + self.eigenvalues.double().sum(-1)
        trace = eta / self.num_rows * self.squared_norm.double() + (1 - eta) * trace_before
        rho = (trace - roots.sum(-1)) / (self.dim - self.rank)
        floor = (smoothing.delta * roots.amax(-1)).clamp_min(smoothing.epsilon)
        dtype = self.factor.dtype
        self.eigenvalues = torch.maximum(roots - rho[:, None], floor[:, None]).to(dtype)
        self.rho = torch.maximum(rho, floor).to(dtype)
        weights = (self.beta(smoothing.alpha)[:, None] / self.eigenvalues + 1).rsqrt()
        left = (weights / roots)[..., None] * rotation.mT
        sizes = [len(member.product) for member in self.members]
        parts = zip(
            self.members,
            self.eigenvalues.split(sizes),
            self.rho.split(sizes),
            left.to(dtype).split(sizes),
            product.split(sizes),
            strict=True,
        )
        for member, eigenvalues, rho, left_of_member, own in parts:
            member.fisher.eigenvalues.copy_(eigenvalues)
            member.fisher.rho.copy_(rho)
            torch.bmm(left_of_member, own, out=member.fisher.factor)


def _repeated(values: Sequence[float], sizes: Sequence[int], like: Tensor) -> Tensor:
    """Return the values, each as often as its size says, without a copy from the host."""
    return torch.cat([like.new_full((size,), value) for value, size in zip(values, sizes, strict=True)])
