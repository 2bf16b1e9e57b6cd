"""Kaldi's online estimate of the Fisher matrix of tensor axes: products with its smoothed inverse, and updates."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

_MAX_DEFAULT_RANK = 80
_SHORT = 16  # axes up to here take one product with a (dim, dim) matrix instead of two thin ones


@dataclass
class AxisFisher:
    """One axis of B tensors of one shape, (before, dim, after) in memory, and F = RᵀDR + ρI of each of the B.

    Kept as W = E^½R with E = (β/D + 1)⁻¹, so that β(F + κI)⁻¹ = I - WᵀW; β = ρ(1+α) + α tr(D)/d, that is
    κ = α/d tr(F) (Saghir et al. 2024, Eq. 7), up to the rank's share of ρ.

    `factor` W and `product` J = WXᵀX, both (B, rank, dim); `eigenvalues` D, (B, rank); `rho` ρ and `norm`, the
    norm of the X that was observed last, both (B,): views of what the cohort keeps for many axes.
    """

    count: int
    before: int
    dim: int
    after: int
    rank: int
    is_first: bool  # of the tensor's axes longer than 1
    factor: Tensor = field(init=False)
    product: Tensor = field(init=False)
    eigenvalues: Tensor = field(init=False)
    rho: Tensor = field(init=False)
    norm: Tensor = field(init=False)
    inverse: Tensor | None = None  # I - WᵀW, kept until the next update
    _repeated_inverse: Tensor | None = None
    _identity: Tensor | None = None

    def bind(self, x: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
        """Expect X in `x`, contiguous (B, ...); return the buffer that will hold the result, and the other one.

        All views are made here, once: on small tensors they would take longer than the arithmetic.
        """
        self.flat = x.view(self.count, -1)
        self._is_short = self.dim <= min(_SHORT, 2 * self.rank)
        self._in_rows = self.after == 1
        self._repeats = 1 if self._in_rows else self.before  # matrices of columns in a tensor
        shape, hidden = (self.count * self.before, self.dim, self.after), (self.rank, self.after)
        if self._in_rows:
            shape, hidden = (self.count, self.before, self.dim), (self.before, self.rank)
        self._x, self._out = x.view(shape), scratch.view(shape)
        size = shape[0] * math.prod(hidden)
        self._hidden = scratch.view(-1)[:size].view(shape[0], *hidden)  # rank < dim, so it fits
        self._x_mT, self._hidden_mT, self._factor_mT = self._x.mT, self._hidden.mT, self.factor.mT
        return (scratch, x) if self._is_short else (x, scratch)

    def multiply(self, *, observe: bool) -> None:
        """Write X - XWᵀW to the result's buffer; with `observe`, also J = WXᵀX to `product`.

        Cost: 4 · rank flops for each element, or 2 · dim where the axis is short; at most as much again for J.
        """
        if self._is_short:
            if observe:
                self.observe()
            if self._repeated_inverse is None:
                self._repeated_inverse = self._repeated(self.scaled_inverse())
            inverse = self._repeated_inverse
            torch.bmm(*((self._x, inverse) if self._in_rows else (inverse, self._x)), out=self._out)
            return
        factor_mT = self._project()
        if observe:
            self._observe_hidden()
        pair = (self._hidden, self.factor) if self._in_rows else (factor_mT, self._hidden)
        self._x.baddbmm_(*pair, alpha=-1)

    def observe(self) -> None:
        """Write J = WXᵀX to `product`."""
        if self._is_short:
            x, x_mT = self._x, self._x_mT
            moment = torch.bmm(x_mT, x) if self._in_rows else self._summed(torch.bmm(x, x_mT))
            torch.bmm(self.factor, moment, out=self.product)
        else:
            self._project()
            self._observe_hidden()

    def scaled_inverse(self) -> Tensor:
        """Return β(F + κI)⁻¹ = I - WᵀW, (B, dim, dim), kept until `forget`."""
        if self.inverse is None:
            if self._identity is None:
                self._identity = torch.eye(self.dim, dtype=self.factor.dtype, device=self.factor.device)
            self.inverse = torch.baddbmm(self._identity, self.factor.mT, self.factor, alpha=-1)
        return self.inverse

    def forget(self) -> None:
        """Drop what was computed from the W before."""
        self.inverse = self._repeated_inverse = None

    def _project(self) -> Tensor:
        """Write XWᵀ to `_hidden`; return Wᵀ for each matrix in `_x`."""
        if self._in_rows:
            torch.bmm(self._x, self._factor_mT, out=self._hidden)
            return self._factor_mT
        factor = self._repeated(self.factor)
        torch.bmm(factor, self._x, out=self._hidden)
        return self._factor_mT if self._repeats == 1 else factor.mT

    def _observe_hidden(self) -> None:
        if self._in_rows:
            torch.bmm(self._hidden_mT, self._x, out=self.product)
        elif self._repeats == 1:
            torch.bmm(self._hidden, self._x_mT, out=self.product)
        else:
            self.product.copy_(self._summed(torch.bmm(self._hidden, self._x_mT)))

    def _repeated(self, matrices: Tensor) -> Tensor:
        if self._repeats == 1:
            return matrices
        return matrices[:, None].expand(-1, self._repeats, -1, -1).flatten(0, 1)

    def _summed(self, products: Tensor) -> Tensor:
        return products if self._repeats == 1 else products.unflatten(0, (-1, self._repeats)).sum(1)


class FisherUpdate:
    """One gradient into each estimate, in place: F <- (η/N) XᵀX + (1-η) F =: T, truncated to its rank.

    Y = RT, (rank, dim), with YYᵀ = UCUᵀ gives R' = C^-½ UᵀY, ρ' = (tr T - tr C^½)/(dim - rank) and D' = C^½ - ρ',
    both at least max(ε, δ max C^½): a step of subspace iteration. Everything but the products with W is done on
    flat vectors of all axes: A estimates, E eigenvalues in all. Gradients must be finite, as NGD checks.
    """

    def __init__(self, axes: list[AxisFisher], eigenvalues: Tensor, rho: Tensor) -> None:
        """`axes`: sorted by `rank_and_dim`, in the order of D, `eigenvalues` (E,), and ρ, `rho` (A,)."""
        every = [axis for axis in axes for _ in range(axis.count)]
        ranks = [axis.rank for axis in every]
        device = rho.device
        self.rho, self.dims = rho, [axis.dim for axis in every]
        self.kinds = [list(members) for _, members in groupby(axes, key=rank_and_dim)]
        self.num_rows = rho.new_tensor([axis.before * axis.after for axis in every])
        self.num_entries = self.num_rows * rho.new_tensor(self.dims)
        few_rows = [axis.before * axis.after < axis.rank for axis in every]  # one gradient cannot fill the rank
        self.few_rows = torch.tensor(few_rows, device=device) if any(few_rows) else None
        self.wide_dims = rho.new_tensor(self.dims, dtype=torch.float64)
        self.num_left = self.wide_dims - self.wide_dims.new_tensor(ranks)
        self.rounding = self.wide_dims.new_tensor(ranks) * torch.finfo(torch.float64).eps
        of_axes = torch.tensor(ranks, device=device)
        self.axis_of_entry = torch.arange(len(every), device=device).repeat_interleave(of_axes)
        self.last_entry = of_axes.cumsum(0) - 1  # of each axis, its largest: D is ascending
        self.alpha_share: tuple[float, Tensor] = (math.nan, rho)
        counts = [sum(axis.count for axis in members) for members in self.kinds]
        shapes = [(count, members[0].rank) for count, members in zip(counts, self.kinds, strict=True)]
        self.kinds_of_rank = [len(list(members)) for _, members in groupby(shapes, key=itemgetter(1))]
        self.pending = torch.empty_like(rho)
        self.pending_of_kinds = [own.view(-1, 1, 1) for own in self.pending.split(counts)]
        wide = torch.empty_like(eigenvalues, dtype=torch.float64)
        self.after, self.wide = _Entries(eigenvalues, shapes), _Entries(wide, shapes)
        self.before, self.new, self.old = (_Entries(torch.empty_like(eigenvalues), shapes) for _ in range(3))
        sizes = [count * rank * members[0].dim for (count, rank), members in zip(shapes, self.kinds, strict=True)]
        memory = self.wide_dims.new_empty(max(sizes))
        self.wide_products = [
            memory[:size].view(count, rank, -1) for size, (count, rank) in zip(sizes, shapes, strict=True)
        ]

    # Differs from Kaldi's OnlineNaturalGradient in:
    # 1. The rows of X are slices of the batch's mean gradient; Kaldi's are derivatives of single frames.
    # 2. Kaldi forms Z = YYᵀ from K and L of J and H, and repairs the rows of R when they are not orthonormal. We
    #    form it from Y itself, which restores orthonormal rows in each update.
    # 3. YYᵀ squares the condition of Y, so it is formed and decomposed in double precision. Values of C below
    #    (ρ(1-η))², which exact arithmetic never reaches, are raised to it, as in Kaldi, and those below rounding.
    # 4. An axis with fewer rows than the rank starts at the mean square of its first gradient (`_start`).
    def __call__(self, squared_norms: Tensor, pending: Tensor, settings: dict[str, Any]) -> None:
        """Bring √pending · X into the estimates, whose axes hold J of X; ‖X‖² and pending (A,)."""
        eta, alpha = settings["eta"], settings["alpha"]
        squared_norms = torch.mul(pending, squared_norms)
        rho = self._start(squared_norms, settings["epsilon"])
        share = eta / self.num_rows
        # Y = RT = E^-½ [(η/N) J + (1-η)(D + ρ) W] of each kind, (B, rank, dim), perhaps where J stood.
        eigenvalues = self.before.flat
        inverse_root = (self._spread(self._beta(self.before, rho, alpha)) / eigenvalues + 1).sqrt()
        torch.mul((1 - eta) * (eigenvalues + self._spread(rho)), inverse_root, out=self.old.flat)
        torch.mul(self._spread(share), inverse_root, out=self.new.flat)
        self.pending.copy_(pending)
        products = []
        of_kinds = zip(self.kinds, self.pending_of_kinds, self.new.of_kinds, self.old.of_kinds, strict=True)
        for members, scale, of_new, of_old in of_kinds:
            factor, product = (
                _joined([getattr(axis, name) for axis in members]) for name in ("factor", "product")
            )
            products.append(product.mul_(scale).mul_(of_new).addcmul_(of_old, factor))
        spectrum, rotations = self._decomposed(products)
        wide_rho = rho.double()
        least = ((1 - eta) * wide_rho).square().maximum(self.rounding * self._largest(spectrum))
        self.wide.flat.copy_(eigenvalues)
        trace_before = self.wide_dims * wide_rho + self.wide.sums()
        trace = share * squared_norms.double() + (1 - eta) * trace_before
        roots = torch.sqrt(spectrum.maximum(self._spread(least)), out=self.wide.flat)
        new_rho = (trace - self.wide.sums()) / self.num_left
        floor = (settings["delta"] * self._largest(roots)).clamp_min(settings["epsilon"])
        self.after.flat.copy_((roots - self._spread(new_rho)).maximum(self._spread(floor)))
        self.rho.copy_(new_rho.maximum(floor))
        weights = (self._spread(self._beta(self.after, self.rho, alpha)) / self.after.flat + 1).rsqrt()
        torch.div(weights, roots, out=self.wide.flat)
        # W' = E'^½ C^-½ Uᵀ Y of each axis.
        for members, scale, rotation, product in zip(
            self.kinds, self.wide.of_kinds, rotations, products, strict=True
        ):
            left = (scale * rotation.mT).to(rho.dtype)
            counts = [axis.count for axis in members]
            parts = [(left, product)]
            if len(members) > 1:
                parts = list(zip(left.split(counts), product.split(counts), strict=True))
            for axis, part in zip(members, parts, strict=True):
                torch.bmm(*part, out=axis.factor)
                axis.forget()

    def _start(self, squared_norms: Tensor, epsilon: float) -> Tensor:
        """Return ρ, put D into `before`: ‖X‖²/(N d), the mean eigenvalue, where both still stand at their floor ε.

        With fewer rows than the rank, the first gradient leaves directions in which T is ε times the identity,
        1e-10 beside the gradient: the recursion would take them from rounding. W does not change: E is the same
        wherever ρ = D.
        """
        eigenvalues = self.after.flat
        if self.few_rows is None:
            self.before.flat.copy_(eigenvalues)
            return self.rho
        floor = epsilon * (1 + 1e-5)
        fresh = self.few_rows & (self.rho <= floor) & (self._largest(eigenvalues) <= floor)
        scale = (squared_norms / self.num_entries).clamp_min(epsilon)
        torch.where(self._spread(fresh), self._spread(scale), eigenvalues, out=self.before.flat)
        return torch.where(fresh, scale, self.rho)

    def _decomposed(self, products: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return C of all, (E,), and U of each kind, (B, rank, rank), of YYᵀ = UCUᵀ; one call for each rank."""
        grams = []
        for product, wide in zip(products, self.wide_products, strict=True):
            wide.copy_(product)
            grams.append(torch.bmm(wide, wide.mT))
        spectra: list[Tensor] = []
        rotations: list[Tensor] = []
        for count in self.kinds_of_rank:
            own, grams = grams[:count], grams[count:]
            spectrum, rotation = torch.linalg.eigh(_joined(own))
            spectra.append(spectrum.view(-1))
            rotations += rotation.split([len(gram) for gram in own]) if count > 1 else [rotation]
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
    """A number for each eigenvalue, `flat` (E,), sorted by rank, then dimension; its views are made once.

    `of_kinds`: those of each dimension, (B, rank, 1), with `shapes` (B, rank).
    """

    def __init__(self, flat: Tensor, shapes: list[tuple[int, int]]) -> None:
        self.flat = flat
        parts = flat.split([count * rank for count, rank in shapes])
        self.of_kinds = [part.view(*shape, 1) for part, shape in zip(parts, shapes, strict=True)]
        of_rank = {rank: sum(count for count, own in shapes if own == rank) for _, rank in shapes}
        parts = flat.split([count * rank for rank, count in of_rank.items()])
        self._of_ranks = [part.view(-1, rank) for part, rank in zip(parts, of_rank, strict=True)]
        self._sums = flat.new_empty(sum(of_rank.values()))
        self._sums_of_ranks = self._sums.split(list(of_rank.values()))

    def sums(self) -> Tensor:
        """Return the sum of each axis, (A,), until the next call."""
        for part, total in zip(self._of_ranks, self._sums_of_ranks, strict=True):
            torch.sum(part, -1, out=total)
        return self._sums


def fitting_rank(dim: int, rank: int | None) -> int:
    """Return the rank used for an axis: at most dim - 1; None: half the axis, at most 80."""
    wanted = min((dim + 1) // 2, _MAX_DEFAULT_RANK) if rank is None else rank
    return min(wanted, dim - 1)


def long_axes(parameter: Tensor) -> list[tuple[int, int]]:
    """Return the axes longer than 1, which have estimates, with their sizes."""
    return [(axis, dim) for axis, dim in enumerate(parameter.shape) if dim > 1]


def initial_state(parameter: Tensor, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter before any gradient: for each axis ρ = D = ε and a fixed R.

    Row i of R is non-zero in columns i, i + rank, i + 2 rank, ..., the first of them 1.1 times the others.
    """
    state: dict[str, Any] = {"step": 0}
    for axis, dim in long_axes(parameter):
        rank = fitting_rank(dim, settings["rank"])
        columns = torch.arange(dim, device=parameter.device)
        own = torch.arange(rank, device=parameter.device)[:, None]
        basis = (columns % rank == own).to(parameter.dtype) + 0.1 * (columns == own).to(parameter.dtype)
        basis = basis / torch.linalg.vector_norm(basis, dim=1, keepdim=True)
        weight = 1 / (2 + settings["alpha"] * (dim + rank) / dim)  # E where ρ = D
        D, rho = basis.new_full((rank,), settings["epsilon"]), basis.new_full((), settings["epsilon"])
        state |= _named(axis, weight**0.5 * basis, D, rho)
    return state


def gathered(owned: list[tuple[AxisFisher, int, list[dict[str, Any]]]]) -> tuple[FisherUpdate, Tensor]:
    """Give the axes what their parameters' states hold, and return the update of all, and their norms, (A,).

    `owned`, sorted by `rank_and_dim`: an axis of B tensors, its number in the parameters, and the B states. D and
    ρ of all axes are gathered in flat vectors, W and J axis by axis; the states become views of them. Small
    networks have many axes and few numbers in each: what an update takes there is the number of calls.
    """
    states = [(state, axis) for _, axis, states in owned for state in states]
    eigenvalues = torch.cat([state[f"eigenvalues_{axis}"] for state, axis in states])
    rho = torch.stack([state[f"rho_{axis}"] for state, axis in states])
    norms = torch.zeros_like(rho)
    row = entry = 0
    for own, axis, of_axis in owned:
        rows, entries = slice(row, row + own.count), slice(entry, entry + own.count * own.rank)
        own.factor = torch.stack([state[f"factor_{axis}"] for state in of_axis])
        own.product = torch.empty_like(own.factor)
        own.eigenvalues = eigenvalues[entries].view(-1, own.rank)
        own.rho, own.norm = rho[rows], norms[rows]
        for state, *estimate in zip(of_axis, own.factor, own.eigenvalues, own.rho, strict=True):
            state.update(_named(axis, *estimate))
        row, entry = rows.stop, entries.stop
    return FisherUpdate([own for own, *_ in owned], eigenvalues, rho), norms


def _named(axis: int, W: Tensor, D: Tensor, rho: Tensor) -> dict[str, Tensor]:
    return {f"factor_{axis}": W, f"eigenvalues_{axis}": D, f"rho_{axis}": rho}


def rank_and_dim(axis: AxisFisher) -> tuple[int, int]:
    """Return what axes are sorted by for `FisherUpdate`: those of equal rank and dimension are updated at once."""
    return axis.rank, axis.dim


def _joined(stacks: list[Tensor]) -> Tensor:
    return stacks[0] if len(stacks) == 1 else torch.cat(stacks)
