"""Parameters of one shape and their Fisher estimates, stacked, so that one operation serves all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from curvlab.optim.ngd_axis import AxisFisher, AxisLayout, Smoothing, fitting_rank, initial_estimate, kronecker

_MIN_CHANNELS = 16  # input channels: a convolution's kernel is then laid out in front of its channels
_MAX_KERNEL = 128  # elements: the axes of a kernel are then multiplied together
_MAX_STACKED = 2**20  # elements: larger tensors gain nothing from being batched, and fall out of the cache


@dataclass
class Bucket:
    """Parameters of one shape that have taken equally many steps, with the Fisher estimates of their axes.

    Attributes:
        parameters: of one shape.
        order: axes of a parameter in the order in which the stack holds them.
        shape: of the stack.
        layouts: axes longer than 1, as the stack holds them, in the parameter's order; the kernel's are last.
        num_kernel_axes: how many of `layouts` are multiplied by one matrix between updates.
        fishers: estimates of `layouts`.
    """

    parameters: list[Tensor]
    order: list[int]
    shape: tuple[int, ...]
    layouts: list[AxisLayout]
    num_kernel_axes: int
    fishers: list[AxisFisher] = field(default_factory=list)

    @classmethod
    def of(cls, parameters: list[Tensor], states: Mapping[Tensor, dict[str, Any]]) -> Bucket:
        """Return the bucket of parameters of one shape, without its estimates."""
        like, order = parameters[0], _order(parameters[0])
        shape = (len(parameters), *(like.shape[axis] for axis in order))
        ranks = {axis: len(states[like][f"eigenvalues_{axis}"]) for axis, _ in _axes(like)}
        num_kernel_axes = sum(axis >= like.ndim - _num_kernel_axes(like) for axis in ranks)
        return cls(parameters, order, shape, [layout for _, layout in _layouts(like, ranks)], num_kernel_axes)

    @property
    def size(self) -> int:
        """Numbers in the stack."""
        return math.prod(self.shape)

    def estimates(self, states: Mapping[Tensor, dict[str, Any]]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield W, D and ρ from the states, axis by axis and for each axis parameter by parameter."""
        for axis, _ in _axes(self.parameters[0]):
            for parameter in self.parameters:
                W, D, rho = (states[parameter][name] for name in _names(axis))
                yield W, D, rho

    def keep(self, fishers: list[AxisFisher], states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Take the estimates; the states become views of them."""
        self.fishers = fishers
        for (axis, _), fisher in zip(_axes(self.parameters[0]), fishers, strict=True):
            stacks = (fisher.factor, fisher.eigenvalues, fisher.rho)
            for name, stack in zip(_names(axis), stacks, strict=True):
                for parameter, view in zip(self.parameters, stack, strict=True):
                    states[parameter][name] = view

    def in_layout_of_parameters(self, stack: Tensor) -> list[Tensor]:
        """Return views of a stack of `shape` that are shaped as the parameters."""
        inverse = [self.order.index(axis) for axis in range(len(self.order))]
        return [own.permute(inverse) for own in stack]


class KernelProduct:
    """The product of gradients with β(F + κI)⁻¹ along all axes of a convolution's kernel, between updates.

    One small product does that and the copy into the stack.
    """

    def __init__(self, bucket: Bucket, x: Tensor) -> None:
        self._fishers = bucket.fishers[-bucket.num_kernel_axes :]
        size = math.prod(fisher.layout.dim for fisher in self._fishers)
        self._targets = list(x.view(len(x), size, -1))
        self._inverses: list[Tensor] = []
        self._factors: list[Tensor] = []

    def multiply(self, gradients: Sequence[Tensor]) -> None:
        """Write the products into the stack, (B, ...)."""
        factors = [fisher.scaled_inverse() for fisher in self._fishers]
        if [id(factor) for factor in factors] != [id(factor) for factor in self._factors]:
            self._factors, self._inverses = factors, list(kronecker(factors))
        for gradient, target, inverse in zip(gradients, self._targets, self._inverses, strict=True):
            torch.mm(inverse, gradient.reshape(-1, len(inverse)).mT, out=target)


def initial_state(parameter: Tensor, rank: int | None, smoothing: Smoothing) -> dict[str, Any]:
    """Return the state of a parameter before its first gradient."""
    state: dict[str, Any] = {"step": 0}
    for axis, layout in _layouts(parameter, {axis: fitting_rank(dim, rank) for axis, dim in _axes(parameter)}):
        state.update(zip(_names(axis), initial_estimate(layout, parameter, smoothing), strict=True))
    return state


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
