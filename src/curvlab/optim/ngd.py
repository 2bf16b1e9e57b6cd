"""Natural gradient descent with Kaldi's online Fisher estimate, one per tensor axis."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from curvlab.optim.ngd_axis import AxisFisher, AxisLayout, AxisUpdate, Smoothing, absorb, fitting_rank, start
from curvlab.optim.parameter_vector import Closure, evaluate

_START_UPDATES = 3  # on the first gradient, before its output is taken
_INITIAL_UPDATES = 10  # calls that all update, before update_period begins
_MAX_STACKED = 2**20  # elements: larger tensors gain nothing from being batched, and fall out of the cache


@dataclass
class _Bucket:
    """Parameters of one shape that have seen equally many gradients, and their estimates, stacked."""

    parameters: list[Tensor]
    order: list[int]  # axes of a parameter in the order in which the stack holds them
    fishers: list[AxisFisher]  # in the order of the axes, those of size 1 left out
    step: int

    def stacked_gradients(self) -> Tensor:
        """Return the gradients, (B, ...), copied, permuted and contiguous."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        lead = self.order[0] if len(self.order) > 2 else 0
        if gradients[0].device.type == "cpu" and lead > 0 and self.order[-1] == lead - 1 == 1:
            # The axes in front are the last ones: a transposition, which a product with the identity does exactly,
            # and four times faster than a strided copy.
            width = math.prod(gradients[0].shape[lead:])
            stacked = gradients[0].new_empty(len(gradients), *(gradients[0].shape[axis] for axis in self.order))
            identity = torch.eye(width, dtype=stacked.dtype)
            for gradient, own in zip(gradients, stacked.view(len(gradients), width, -1), strict=True):
                torch.mm(identity, gradient.reshape(-1, width).mT, out=own)
            return stacked
        return torch.stack([gradient.permute(self.order) for gradient in gradients])

    def move(self, displacement: Tensor, factors: Tensor) -> None:
        """Add displacement * factors, (B, ...) and (B,), to the parameters."""
        inverse = [self.order.index(axis) for axis in range(len(self.order))]
        for parameter, part, factor in zip(self.parameters, displacement, factors, strict=True):
            parameter.addcmul_(part.permute(inverse), factor)


class NGD(torch.optim.Optimizer):
    """w <- w - lr · (F + κI)⁻¹ ∇L, F estimated per axis of each parameter tensor (Saghir et al. 2024, Eqs. 5-7).

    The paper cites no code for its NGD; that it is Kaldi's online natural gradient (Povey, Zhang & Khudanpur
    2015) is our reading of κ = α/d · tr(F). For an axis of size d the gradient's slices along the other axes are
    the rows of X, (N, d), and F = RᵀDR + ρI of rank r is a moving average of XᵀX/N. The gradient is multiplied
    by β(F + κI)⁻¹ = I - WᵀW, one axis after the other, each on the output of the one before; axes of size 1 are
    left alone. Every output is rescaled to the norm of the gradient, so only its direction differs from SGD's;
    with rescale=False it is β(F + κI)⁻¹X itself, which only shrinks, dominant directions most. For α -> ∞ both
    are SGD at this lr (the paper's Eq. 5 without β would be SGD at lr/κ).

    Each axis starts with three updates on its first gradient; then the first ten calls update F after taking
    their output, after that every update_period-th. Axes with fewer rows than the rank (biases: one row) start
    from the mean square of their first gradient that is not zero instead of from ε, which would leave
    directions to rounding.

    State of a parameter: "step", the calls so far, and for axis k "factor_k" (W, (r, d)), "eigenvalues_k"
    (D, (r,)), "rho_k" (ρ, ()). Parameters without a gradient are skipped.

    Args:
        params: float32 or float64; settings may differ between groups.
        lr: factor of the step.
        alpha: α, smoothing; Kaldi's 4 is strong, the paper uses 0.01 to 0.1; 0 is allowed.
        rank: r, at most d - 1 where an axis is shorter; None: min((d + 1) // 2, 80).
        update_period: calls between updates of F after the first ten.
        eta: η, weight of the newest gradient in F, between 0 and 1.
        epsilon: ε, floor of the eigenvalues of F (squared gradient).
        delta: δ, the same relative to the largest.
        rescale: rescale every output to the gradient's norm.

    Cost of a step: 4r flops an element and axis (2d where less), in an update about 1.5 times that and, once for
    each axis, an (r, r) eigendecomposition. Memory: r·d numbers an axis; the gradients of equal shape are
    copied, at most 2^20 numbers at once (more only for a tensor that is itself larger).
    Nothing waits for the device, but for the eigendecompositions of an update.

    Raises:
        ValueError: a setting out of range; in an update, gradients that are not finite.
        TypeError: parameters or gradients of another kind.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        alpha: float = 4.0,
        rank: int | None = None,
        update_period: int = 4,
        eta: float = 0.1,
        epsilon: float = 1e-10,
        delta: float = 5e-4,
        rescale: bool = True,
    ) -> None:
        self._buckets: dict[int, tuple[list[int], list[_Bucket]]] = {}
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "rank": rank,
            "update_period": update_period,
            "eta": eta,
            "epsilon": epsilon,
            "delta": delta,
            "rescale": rescale,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with settings of its own where it has any."""
        super().add_param_group(param_group)
        _check(self.param_groups[-1])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._buckets = {}  # built again from the state, which may have been loaded

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch types the closure's loss as float
        self, closure: Closure | None = None
    ) -> Tensor | float | None:
        """Take one step; return the closure's loss."""
        loss = evaluate(closure)
        for index, group in enumerate(self.param_groups):
            smoothing = Smoothing(group["alpha"], group["eta"], group["epsilon"], group["delta"])
            updates: list[AxisUpdate] = []
            for bucket in self._group_buckets(index, group, smoothing):
                updates += _step(bucket, group, smoothing)
                for parameter in bucket.parameters:
                    self.state[parameter]["step"] = bucket.step
            absorb(updates, smoothing)
        return loss

    def _group_buckets(self, index: int, group: dict[str, Any], smoothing: Smoothing) -> list[_Bucket]:
        """Return the buckets of the parameters that have gradients, built again when these have changed."""
        active = [parameter for parameter in group["params"] if parameter.grad is not None]
        known, buckets = self._buckets.get(index, ([], []))
        if known != [id(parameter) for parameter in active]:
            for parameter in active:
                self._initialise(parameter, group["rank"], smoothing)
            buckets = [self._bucket(members) for members in _alike(active, self.state)]
            self._buckets[index] = ([id(parameter) for parameter in active], buckets)
        return buckets

    def _initialise(self, parameter: Tensor, rank: int | None, smoothing: Smoothing) -> None:
        state = self.state[parameter]
        if state:
            return
        _check_gradient(parameter)
        state["step"] = 0
        for axis, layout in _layouts(parameter, {axis: fitting_rank(dim, rank) for axis, dim in _axes(parameter)}):
            names = (f"factor_{axis}", f"eigenvalues_{axis}", f"rho_{axis}")
            state.update(zip(names, start(layout, parameter, smoothing), strict=True))

    def _bucket(self, members: list[Tensor]) -> _Bucket:
        """Stack the states of parameters of one shape; the states become views of the stacks."""
        states = [self.state[parameter] for parameter in members]
        ranks = {axis: len(states[0][f"eigenvalues_{axis}"]) for axis, _ in _axes(members[0])}
        fishers = []
        for axis, layout in _layouts(members[0], ranks):
            stacks = []
            for name in (f"factor_{axis}", f"eigenvalues_{axis}", f"rho_{axis}"):
                stacks.append(torch.stack([state[name] for state in states]))
                for state, own in zip(states, stacks[-1], strict=True):
                    state[name] = own
            fishers.append(AxisFisher(layout, *stacks))
        return _Bucket(members, _order(members[0]), fishers, states[0]["step"])


def _step(bucket: _Bucket, group: dict[str, Any], smoothing: Smoothing) -> list[AxisUpdate]:
    """Move the parameters of a bucket; return what their gradients contribute to its estimates."""
    x = bucket.stacked_gradients()
    updating = bucket.step < _INITIAL_UPDATES or bucket.step % group["update_period"] == 0
    # Linear maps of different axes commute with factors, so the rescaling of all axes is done once, at the end;
    # until then an axis sees x times sqrt(pending).
    initial, updates = _squared_norms(x), []
    for fisher in bucket.fishers:
        if updating:
            squared_norm = _squared_norms(x)
            pending = _ratio(initial, squared_norm) if group["rescale"] else torch.ones_like(initial)
            for _ in range(_START_UPDATES if bucket.step == 0 else 0):
                _, product = fisher.apply_(x.clone(), with_product=True)
                absorb([_update(fisher, product, squared_norm, pending)], smoothing)
        x, product = fisher.apply_(x, with_product=updating)
        if updating:
            updates.append(_update(fisher, product, squared_norm, pending))
    factors = torch.full_like(initial, -float(group["lr"]))
    if group["rescale"] and bucket.fishers:
        factors = factors * _ratio(initial, _squared_norms(x)).sqrt()
    bucket.move(x, factors)
    bucket.step += 1
    return updates


def _update(fisher: AxisFisher, product: Tensor | None, squared_norm: Tensor, pending: Tensor) -> AxisUpdate:
    if product is None:
        raise TypeError("an update needs the product J")
    return AxisUpdate(fisher, pending[:, None, None] * product, pending * squared_norm)


def _squared_norms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.view(len(x), -1), dim=1).square()


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return numerator / denominator.clamp_min(torch.finfo(denominator.dtype).tiny)


def _axes(parameter: Tensor) -> list[tuple[int, int]]:
    return [(axis, dim) for axis, dim in enumerate(parameter.shape) if dim > 1]


def _order(parameter: Tensor) -> list[int]:
    """Return the axes with the two longest at the end: behind short ones they make few, large matrix products."""
    axes = list(range(parameter.ndim))
    longest = sorted(axes, key=lambda axis: parameter.shape[axis])[-2:] if parameter.ndim > 2 else axes
    return [axis for axis in axes if axis not in longest] + sorted(longest)


def _layouts(parameter: Tensor, ranks: dict[int, int]) -> Iterator[tuple[int, AxisLayout]]:
    order = _order(parameter)
    sizes = [parameter.shape[axis] for axis in order]
    for axis, dim in _axes(parameter):
        place = order.index(axis)
        yield axis, AxisLayout(math.prod(sizes[:place]), dim, math.prod(sizes[place + 1 :]), ranks[axis])


def _alike(parameters: list[Tensor], states: dict[Tensor, Any]) -> list[list[Tensor]]:
    """Return groups of parameters of one shape and number of steps, of at most _MAX_STACKED elements."""
    groups: dict[Any, list[list[Tensor]]] = {}
    for parameter in parameters:
        own = states[parameter]
        ranks = tuple(len(own[f"eigenvalues_{axis}"]) for axis, _ in _axes(parameter))
        key = (parameter.shape, parameter.dtype, parameter.device, own["step"], ranks)
        chunks = groups.setdefault(key, [[]])
        if chunks[-1] and (len(chunks[-1]) + 1) * parameter.numel() > _MAX_STACKED:
            chunks.append([])
        chunks[-1].append(parameter)
    return [chunk for chunks in groups.values() for chunk in chunks]


def _check_gradient(parameter: Tensor) -> None:
    gradient = parameter.grad
    if parameter.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"NGD needs float32 or float64 parameters, got {parameter.dtype}: keep master weights in float32 and "
            "use torch.autocast for the forward pass."
        )
    if gradient is not None and gradient.layout != torch.strided:
        raise TypeError("NGD needs dense gradients, got sparse ones: use nn.Embedding(sparse=False).")


def _check(group: dict[str, Any]) -> None:
    if not group["lr"] >= 0:
        raise ValueError(f"lr must not be negative, got {group['lr']}")
    if not group["alpha"] >= 0:
        raise ValueError(f"alpha must not be negative, got {group['alpha']}; the paper uses 0.01 to 0.1, Kaldi 4")
    if not 0 < group["eta"] < 1:
        raise ValueError(f"eta is the weight of the newest gradient and lies between 0 and 1, got {group['eta']}")
    if not group["epsilon"] > 0 or not 0 < group["delta"] < 1:
        raise ValueError(
            f"epsilon must be positive and delta between 0 and 1, got {group['epsilon']} and {group['delta']}: "
            "they keep the eigenvalues of F away from zero"
        )
    if group["update_period"] < 1 or (group["rank"] is not None and group["rank"] < 1):
        raise ValueError(
            f"update_period and rank must be at least 1, got {group['update_period']} and {group['rank']}; "
            "rank=None chooses min((d + 1) // 2, 80) for each axis"
        )
