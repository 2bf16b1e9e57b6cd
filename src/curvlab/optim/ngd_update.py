"""Kaldi's online Fisher estimates of many axes and their updates, those of equal dimension and rank together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from curvlab.optim.ngd_axis import AxisFisher, AxisLayout, Smoothing


@dataclass(frozen=True)
class Segment:
    """One axis of `count` tensors of one shape: the estimates that the same products serve."""

    layout: AxisLayout
    count: int


class Estimates:
    """The Fisher estimates of all axes of some tensors, in memory that operations on single numbers take at once.

    Small networks have many axes and few numbers in each: what an update takes there is the number of calls. So
    everything but the products with W is done on flat vectors of all axes: A estimates, E eigenvalues in all.

    Attributes:
        fishers: estimates of each segment, in the order given; views of what follows.
        eigenvalues: D of all, (E,), those of one rank behind each other.
        rho: ρ of all, (A,).
        norms: `AxisFisher.norm` of all, (A,).
        order: place among the segments' tensors, as given, of each of the A estimates.
    """

    def __init__(self, segments: Sequence[Segment], initial: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        """`initial`: W (rank, dim), D (rank,) and ρ () of each tensor of each segment."""
        first = list(accumulate((segment.count for segment in segments), initial=0))
        by_kind = sorted(range(len(segments)), key=lambda index: _kind(segments[index].layout))
        self.order = [place for index in by_kind for place in range(first[index], first[index + 1])]
        own = [initial[place] for place in self.order]
        self.eigenvalues = torch.cat([eigenvalues for _, eigenvalues, _ in own])
        self.rho = torch.stack([rho for *_, rho in own])
        self.norms = torch.zeros_like(self.rho)
        fishers: dict[int, AxisFisher] = {}
        axis = entry = 0
        for index in by_kind:
            layout, end = segments[index].layout, axis + segments[index].count
            last = entry + segments[index].count * layout.rank
            factor = torch.stack([W for W, *_ in own[axis:end]])
            eigenvalues = self.eigenvalues[entry:last].view(-1, layout.rank)
            views = (eigenvalues, self.rho[axis:end], self.norms[axis:end])
            fishers[index] = AxisFisher(layout, factor, torch.empty_like(factor), *views)
            axis, entry = end, last
        self.fishers = [fishers[index] for index in range(len(segments))]
        self._update = _Update([fishers[index] for index in by_kind], self.eigenvalues, self.rho)

    def update(self, squared_norms: Tensor, pending: Tensor, smoothing: Smoothing) -> None:
        """Bring √pending · X into the estimates, whose fishers hold J of X; ‖X‖² and pending (A,)."""
        self._update(squared_norms, pending, smoothing)


def update_one(fisher: AxisFisher, squared_norms: Tensor, pending: Tensor, smoothing: Smoothing) -> None:
    """Do for one axis what `Estimates.update` does for all; ‖X‖² and pending (B,)."""
    _Update([fisher], fisher.eigenvalues.view(-1), fisher.rho)(squared_norms, pending, smoothing)


class _Update:
    """One gradient into each estimate, in place: F <- (η/N) XᵀX + (1-η) F =: T, truncated to its rank.

    Y = RT, (rank, dim), with YYᵀ = UCUᵀ gives R' = C^-½ UᵀY, ρ' = (tr T - tr C^½)/(dim - rank) and D' = C^½ - ρ',
    both at least max(ε, δ max C^½). It is the recursion of Povey et al. (2015, Z = YYᵀ), a step of subspace
    iteration; formed from Y itself, it also restores orthonormal rows of R where rounding has lost them.

    YYᵀ squares the condition of Y, so it is formed and decomposed in double precision, all estimates of one rank
    at once. Values of C below (ρ(1-η))², which exact arithmetic never reaches, or below rounding are raised to it.
    The gradients must be finite: NGD has checked them.
    """

    def __init__(self, fishers: Sequence[AxisFisher], eigenvalues: Tensor, rho: Tensor) -> None:
        """`fishers`: sorted by rank, then dimension, in the order of `eigenvalues` and `rho`."""
        self.rho = rho
        self.kinds = [list(members) for _, members in groupby(fishers, key=lambda fisher: _kind(fisher.layout))]
        layouts = [fisher.layout for fisher in fishers for _ in range(len(fisher.rho))]
        ranks = [layout.rank for layout in layouts]
        self.dims = [layout.dim for layout in layouts]
        self.num_rows = rho.new_tensor([layout.num_rows for layout in layouts])
        self.num_entries = self.num_rows * rho.new_tensor(self.dims)
        self.few_rows = torch.tensor([layout.has_few_rows for layout in layouts], device=rho.device)
        self.any_few_rows = any(layout.has_few_rows for layout in layouts)
        self.wide_dims = rho.new_tensor(self.dims, dtype=torch.float64)
        self.num_left = self.wide_dims - self.wide_dims.new_tensor(ranks)
        self.rounding = self.wide_dims.new_tensor(ranks) * torch.finfo(torch.float64).eps
        axes = torch.arange(len(layouts), device=rho.device)
        self.axis_of_entry = axes.repeat_interleave(torch.tensor(ranks, device=rho.device))
        self.last_entry = torch.tensor(ranks, device=rho.device).cumsum(0) - 1  # of each axis; its D is ascending
        self.alpha_share: tuple[float, Tensor] = (float("nan"), rho)
        counts = [sum(len(fisher.rho) for fisher in members) for members in self.kinds]
        shapes = [(count, members[0].layout.rank) for count, members in zip(counts, self.kinds, strict=True)]
        of_rank = [list(members) for _, members in groupby(shapes, key=lambda shape: shape[1])]
        self.num_kinds = [len(members) for members in of_rank]  # of each rank
        self.pending = torch.empty_like(rho)
        self.pending_of_kinds = [own.view(-1, 1, 1) for own in self.pending.split(counts)]
        wide_eigenvalues = torch.empty_like(eigenvalues, dtype=torch.float64)
        self.after, self.wide = _Entries(eigenvalues, shapes), _Entries(wide_eigenvalues, shapes)
        self.before, self.new, self.old = (_Entries(torch.empty_like(eigenvalues), shapes) for _ in range(3))
        sizes = [
            count * rank * members[0].layout.dim for (count, rank), members in zip(shapes, self.kinds, strict=True)
        ]
        memory = self.wide_dims.new_empty(max(sizes))
        self.wide_products = [
            memory[:size].view(count, rank, -1) for size, (count, rank) in zip(sizes, shapes, strict=True)
        ]

    def __call__(self, squared_norms: Tensor, pending: Tensor, smoothing: Smoothing) -> None:
        eta = smoothing.eta
        squared_norms = torch.mul(pending, squared_norms)
        rho = self._start(squared_norms, smoothing)
        share = eta / self.num_rows
        products = self._moment_of_basis(rho, pending, share, smoothing)
        spectrum, rotations = self._decomposed(products)
        wide_rho = rho.double()
        least = ((1 - eta) * wide_rho).square().maximum(self.rounding * self._largest(spectrum))
        self.wide.flat.copy_(self.before.flat)
        trace_before = self.wide_dims * wide_rho + self.wide.sums()
        trace = share * squared_norms.double() + (1 - eta) * trace_before
        roots = torch.sqrt(spectrum.maximum(self._spread(least)), out=self.wide.flat)
        new_rho = (trace - self.wide.sums()) / self.num_left
        floor = (smoothing.delta * self._largest(roots)).clamp_min(smoothing.epsilon)
        self.after.flat.copy_((roots - self._spread(new_rho)).maximum(self._spread(floor)))
        self.rho.copy_(new_rho.maximum(floor))
        weights = (self._spread(self._beta(self.after, self.rho, smoothing.alpha)) / self.after.flat + 1).rsqrt()
        torch.div(weights, roots, out=self.wide.flat)
        for members, scale, rotation, product in zip(
            self.kinds, self.wide.of_kinds, rotations, products, strict=True
        ):
            _rotate(members, (scale * rotation.mT).to(rho.dtype), product)

    def _start(self, squared_norms: Tensor, smoothing: Smoothing) -> Tensor:
        """Return ρ, put D into `before`: ‖X‖²/(N d), the mean eigenvalue, where both still stand at their floor ε.

        With fewer rows than the rank, the first gradient leaves directions in which T is ε times the identity,
        1e-10 beside the gradient: the recursion would take them from rounding. W does not change: E is the same
        wherever ρ = D.
        """
        eigenvalues = self.after.flat
        if not self.any_few_rows:
            self.before.flat.copy_(eigenvalues)
            return self.rho
        floor = smoothing.epsilon * (1 + 1e-5)
        fresh = self.few_rows & (self.rho <= floor) & (self._largest(eigenvalues) <= floor)
        scale = (squared_norms / self.num_entries).clamp_min(smoothing.epsilon)
        torch.where(self._spread(fresh), self._spread(scale), eigenvalues, out=self.before.flat)
        return torch.where(fresh, scale, self.rho)

    def _moment_of_basis(self, rho: Tensor, pending: Tensor, share: Tensor, smoothing: Smoothing) -> list[Tensor]:
        """Return Y = RT = E^-½ [(η/N) J + (1-η)(D + ρ) W] of each kind, (B, rank, dim), perhaps where J stood."""
        eigenvalues = self.before.flat
        beta = self._beta(self.before, rho, smoothing.alpha)
        inverse_root = (self._spread(beta) / eigenvalues + 1).sqrt()
        torch.mul((1 - smoothing.eta) * (eigenvalues + self._spread(rho)), inverse_root, out=self.old.flat)
        torch.mul(self._spread(share), inverse_root, out=self.new.flat)
        self.pending.copy_(pending)
        products = []
        for members, scale, of_new, of_old in zip(
            self.kinds, self.pending_of_kinds, self.new.of_kinds, self.old.of_kinds, strict=True
        ):
            factor = _joined([fisher.factor for fisher in members])
            product = _joined([fisher.product for fisher in members])
            products.append(product.mul_(scale).mul_(of_new).addcmul_(of_old, factor))
        return products

    def _decomposed(self, products: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return C of all, (E,), and U of each kind, (B, rank, rank), of YYᵀ = UCUᵀ."""
        grams = []
        for product, wide in zip(products, self.wide_products, strict=True):
            wide.copy_(product)
            grams.append(torch.bmm(wide, wide.mT))
        spectra: list[Tensor] = []
        rotations: list[Tensor] = []
        first = 0
        for count in self.num_kinds:
            own = grams[first : first + count]
            spectrum, rotation = torch.linalg.eigh(_joined(own))
            spectra.append(spectrum.view(-1))
            rotations += rotation.split([len(gram) for gram in own]) if count > 1 else [rotation]
            first += count
        return torch.cat(spectra), rotations

    def _beta(self, eigenvalues: _Entries, rho: Tensor, alpha: float) -> Tensor:
        """Return β, (A,)."""
        if self.alpha_share[0] != alpha:
            self.alpha_share = (alpha, rho.new_tensor([alpha / dim for dim in self.dims]))
        return rho * (1 + alpha) + self.alpha_share[1] * eigenvalues.sums()

    def _spread(self, axes: Tensor) -> Tensor:
        """Return the value of its axis for each eigenvalue, (A,) -> (E,)."""
        return axes.index_select(0, self.axis_of_entry)

    def _largest(self, entries: Tensor) -> Tensor:
        """Return the last of each axis, which is the largest of ascending ones, (E,) -> (A,)."""
        return entries.index_select(0, self.last_entry)


class _Entries:
    """A number for each eigenvalue, (E,), sorted by rank, then dimension; its views are made once.

    Attributes:
        flat: the numbers.
        of_kinds: those of each dimension, (B, rank, 1).
    """

    def __init__(self, flat: Tensor, shapes: list[tuple[int, int]]) -> None:
        """`shapes`: (B, rank) of each dimension."""
        self.flat = flat
        parts = flat.split([count * rank for count, rank in shapes])
        self.of_kinds = [part.view(*shape, 1) for part, shape in zip(parts, shapes, strict=True)]
        of_rank = [list(members) for _, members in groupby(shapes, key=lambda shape: shape[1])]
        counts = [sum(count for count, _ in members) for members in of_rank]
        parts = flat.split([count * members[0][1] for count, members in zip(counts, of_rank, strict=True)])
        self._of_ranks = [part.view(count, -1) for part, count in zip(parts, counts, strict=True)]
        self._sums = flat.new_empty(sum(counts))
        self._sums_of_ranks = self._sums.split(counts)

    def sums(self) -> Tensor:
        """Return the sum of each axis, (A,), until the next call."""
        for part, total in zip(self._of_ranks, self._sums_of_ranks, strict=True):
            torch.sum(part, -1, out=total)
        return self._sums


def _rotate(fishers: list[AxisFisher], left: Tensor, product: Tensor) -> None:
    """Write W' = left Y into the estimates of one dimension; both (B, ...)."""
    first = 0
    for fisher in fishers:
        last = first + len(fisher.rho)
        parts = (left, product) if len(fishers) == 1 else (left[first:last], product[first:last])
        torch.bmm(*parts, out=fisher.factor)
        fisher.forget()
        first = last


def _joined(stacks: list[Tensor]) -> Tensor:
    return stacks[0] if len(stacks) == 1 else torch.cat(stacks)


def _kind(layout: AxisLayout) -> tuple[int, int]:
    return layout.rank, layout.dim
