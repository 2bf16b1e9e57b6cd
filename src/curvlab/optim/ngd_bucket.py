"""Parameters of one shape and their Fisher estimates, stacked, so that one operation serves all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvlab.optim.ngd_axis import AxisFisher, AxisLayout, Smoothing, fitting_rank, initial_estimate, kronecker

_MIN_CHANNELS = 16  # input channels: a convolution's kernel is then laid out in front of its channels
_MAX_KERNEL = 128  # elements: the axes of a kernel are then multiplied together
_MAX_STACKED = 2**20  # elements: larger tensors gain nothing from being batched, and fall out of the cache


@dataclass
class Bucket:
    """Parameters of one shape that have taken equally many steps, and the stack of their Fisher estimates.

    `_order` says how the stack is laid out.
    """

    parameters: list[Tensor]
    order: list[int]  # axes of a parameter in the order in which the stack holds them
    shape: tuple[int, ...]  # of the stack
    fishers: list[AxisFisher]  # in the order of the axes, those of size 1 left out; the kernel's are the last
    num_kernel_fishers: int
    step: int

    @classmethod
    def of(cls, parameters: list[Tensor], states: Mapping[Tensor, dict[str, Any]]) -> Bucket:
        """Stack the states of parameters of one shape; the states become views of the stacks."""
        like, own = parameters[0], [states[parameter] for parameter in parameters]
        ranks = {axis: len(own[0][f"eigenvalues_{axis}"]) for axis, _ in _axes(like)}
        fishers = []
        for axis, layout in _layouts(like, ranks):
            stacks = []
            for name in _names(axis):
                stacks.append(torch.stack([state[name] for state in own]))
                for state, view in zip(own, stacks[-1], strict=True):
                    state[name] = view
            fishers.append(AxisFisher(layout, *stacks))
        order = _order(like)
        shape = (len(parameters), *(like.shape[axis] for axis in order))
        num_kernel_fishers = sum(axis >= like.ndim - _num_kernel_axes(like) for axis in ranks)
        return cls(parameters, order, shape, fishers, num_kernel_fishers, own[0]["step"])

    def gradients(self, *, maximize: bool, weight_decay: float) -> list[Tensor]:
        """Return the gradients in the parameters' own layout: p.grad, or ±p.grad + weight_decay · p as a copy."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if len(gradients) < len(self.parameters):
            raise RuntimeError("a parameter of this bucket has no gradient")
        if maximize:
            gradients = [-gradient for gradient in gradients]
        if weight_decay:
            pairs = zip(gradients, self.parameters, strict=True)
            gradients = [gradient.add(parameter, alpha=weight_decay) for gradient, parameter in pairs]
        return gradients

    def stack(self, gradients: list[Tensor], *, out: Tensor) -> None:
        """Copy gradients into `out`, of `shape`: (B, ...)."""
        torch.stack([gradient.permute(self.order) for gradient in gradients], out=out)

    def stack_multiplied(self, gradients: list[Tensor], *, out: Tensor) -> None:
        """Write gradients into `out`, of `shape`, multiplied along their kernel axes by β(F + κI)⁻¹.

        One small product does that and the copy.
        """
        if not self.num_kernel_fishers:
            return self.stack(gradients, out=out)
        inverse = kronecker([fisher.scaled_inverse() for fisher in self.fishers[-self.num_kernel_fishers :]])
        size = inverse.shape[-1]
        for gradient, own, matrix in zip(gradients, out.view(len(out), size, -1), inverse, strict=True):
            torch.mm(matrix, gradient.reshape(-1, size).mT, out=own)
        return None

    def move(self, displacement: Tensor, factors: Tensor) -> None:
        """Add displacement * factors, (B, ...) and (B,), to the parameters."""
        inverse = [self.order.index(axis) for axis in range(len(self.order))]
        for parameter, part, factor in zip(self.parameters, displacement, factors, strict=True):
            parameter.addcmul_(part.permute(inverse), factor)


class Workspace:
    """Two buffers that all buckets use in turn.

    Memory that is allocated anew in each step costs more, in page faults, than the arithmetic on it.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def views(self, like: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return two uninitialised tensors of the kind of `like`, valid until the next call."""
        size, key = math.prod(shape), (like.dtype, like.device)
        if key not in self._buffers or self._buffers[key].shape[1] < size:
            self._buffers[key] = like.new_empty(2, size)
        first, second = self._buffers[key][:, :size]
        return first.view(shape), second.view(shape)


def initial_state(parameter: Tensor, rank: int | None, smoothing: Smoothing) -> dict[str, Any]:
    """Return the state of a parameter before its first gradient."""
    state: dict[str, Any] = {"step": 0}
    for axis, layout in _layouts(parameter, {axis: fitting_rank(dim, rank) for axis, dim in _axes(parameter)}):
        state.update(zip(_names(axis), initial_estimate(layout, parameter, smoothing), strict=True))
    return state


def squared_norms(stack: Tensor) -> Tensor:
    """Return ‖x‖² of each tensor in a stack, (B, ...) -> (B,)."""
    return torch.linalg.vector_norm(stack.view(len(stack), -1), dim=1).square()


def group_by_shape(parameters: list[Tensor], states: Mapping[Tensor, dict[str, Any]]) -> list[list[Tensor]]:
    """Return groups of one shape and number of steps, each of one parameter or at most _MAX_STACKED elements."""
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


def _names(axis: int) -> tuple[str, str, str]:
    return f"factor_{axis}", f"eigenvalues_{axis}", f"rho_{axis}"


def _axes(parameter: Tensor) -> list[tuple[int, int]]:
    return [(axis, dim) for axis, dim in enumerate(parameter.shape) if dim > 1]


def _order(parameter: Tensor) -> list[int]:
    """Return the axes, a convolution's kernel in front: behind it, its channels make few, large matrix products.

    Few input channels would make many, thin ones: then the order stays, and the kernel is part of what is long.
    """
    axes = list(range(parameter.ndim))
    return axes[2:] + axes[:2] if parameter.ndim > 2 and parameter.shape[1] >= _MIN_CHANNELS else axes


def _num_kernel_axes(parameter: Tensor) -> int:
    """Return how many axes in front of `_order` are few enough numbers to be multiplied by one matrix."""
    moved, size = _order(parameter)[0] > 0, math.prod(parameter.shape[2:])
    return parameter.ndim - 2 if moved and size <= _MAX_KERNEL else 0


def _layouts(parameter: Tensor, ranks: dict[int, int]) -> Iterator[tuple[int, AxisLayout]]:
    order = _order(parameter)
    sizes = [parameter.shape[axis] for axis in order]
    for axis, dim in _axes(parameter):
        place = order.index(axis)
        yield axis, AxisLayout(math.prod(sizes[:place]), dim, math.prod(sizes[place + 1 :]), ranks[axis])
