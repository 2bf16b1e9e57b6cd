"""Parameters that take NGD's steps together, and one step of theirs in few calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from curvlab.optim.ngd_axis import AxisProduct, Smoothing
from curvlab.optim.ngd_bucket import Bucket, KernelProduct, group_by_shape
from curvlab.optim.ngd_update import Estimates, Segment, update_one

_START_UPDATES = 3  # on the first gradient, before its output is taken
_INITIAL_UPDATES = 10  # calls that all update, before update_period begins
_MAX_WAVE = 2**16  # elements: with more, a wave falls out of the cache, and calls no longer matter
_ALIGNED = 16  # elements: where buckets begin in the buffers


class Cohort:
    """Parameters of one group, dtype and device that have taken equally many steps.

    Attributes:
        parameters: bucket by bucket.
        step: calls so far.
        buffer_size: numbers that each of the two buffers of `bind` must hold.
    """

    def __init__(self, parameters: list[Tensor], states: Mapping[Tensor, dict[str, Any]]) -> None:
        buckets = [Bucket.of(members, states) for members in group_by_shape(parameters, states)]
        self.parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
        self._states = [states[parameter] for parameter in self.parameters]
        self.step = int(self._states[0]["step"])
        segments = [Segment(layout, len(bucket.parameters)) for bucket in buckets for layout in bucket.layouts]
        self._estimates: Estimates | None = None
        if segments:
            self._estimates = Estimates(segments, [own for bucket in buckets for own in bucket.estimates(states)])
            fishers = iter(self._estimates.fishers)
            for bucket in buckets:
                bucket.keep([next(fishers) for _ in bucket.layouts], states)
            self._owner, self._is_first = self._owners(buckets, self._estimates.order)
        self._buckets = buckets
        self._waves: list[_Wave] = []
        self.buffer_size = max(sum(_aligned(bucket) for bucket in members) for members in _waves(buckets))

    def _owners(self, buckets: list[Bucket], order: list[int]) -> tuple[Tensor, Tensor]:
        """Return whose each estimate is, by place among the parameters, and whether of the first axis, (A,)."""
        ends = list(accumulate((len(bucket.parameters) for bucket in buckets), initial=0))
        found = [
            (place, index == 0)
            for bucket, (start, end) in zip(buckets, pairwise(ends), strict=True)
            for index in range(len(bucket.layouts))
            for place in range(start, end)
        ]
        places, firsts = zip(*(found[index] for index in order), strict=True)
        device = self.parameters[0].device
        return torch.tensor(places, device=device), torch.tensor(firsts, device=device)

    def bind(self, buffers: Tensor) -> None:
        """Work in these two buffers, (2, buffer_size or more), which others may use between the steps."""
        first = 0
        for members in _waves(self._buckets):
            last = first + sum(len(bucket.parameters) for bucket in members)
            self._waves.append(_Wave(members, slice(first, last), buffers))
            first = last

    def gradients(self, group: dict[str, Any]) -> list[Tensor]:
        """Return the gradients: p.grad, or ±p.grad + weight_decay · p as a copy."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if len(gradients) < len(self.parameters):
            raise RuntimeError("a parameter of this cohort has no gradient")
        if group["maximize"]:
            gradients = [-gradient for gradient in gradients]
        if group["weight_decay"]:
            pairs = zip(gradients, self.parameters, strict=True)
            gradients = [gradient.add(parameter, alpha=group["weight_decay"]) for gradient, parameter in pairs]
        return gradients

    def take_step(
        self, gradients: list[Tensor], squared_norms: Tensor, group: dict[str, Any], smoothing: Smoothing
    ) -> None:
        """Move the parameters, and bring the gradients into the estimates in calls that update them.

        `gradients` and their ‖·‖², (number of parameters,), in the order of `parameters`.
        """
        updates = self._estimates is not None and (
            self.step < _INITIAL_UPDATES or self.step % group["update_period"] == 0
        )
        for wave in self._waves:
            of_wave = squared_norms[wave.members]
            if updates:
                wave.multiply_and_observe(
                    gradients[wave.members], of_wave, self.step == 0, group["rescale"], smoothing
                )
            else:
                wave.multiply(gradients[wave.members])
            wave.move(of_wave, -float(group["lr"]), rescale=group["rescale"])
        self.step += 1
        for state in self._states:
            state["step"] = self.step
        if updates and self._estimates is not None:
            of_gradients = squared_norms.index_select(0, self._owner)
            of_stacks = torch.where(self._is_first, of_gradients, self._estimates.norms.square())
            pending = _pending(of_gradients, of_stacks, rescale=group["rescale"])
            self._estimates.update(of_stacks, pending, smoothing)


class _Wave:
    """Buckets that are multiplied one after another and moved at once.

    Attributes:
        members: which of the cohort's parameters.
    """

    def __init__(self, buckets: list[Bucket], members: slice, buffers: Tensor) -> None:
        self.members = members
        self._parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
        ends = list(accumulate((_aligned(bucket) for bucket in buckets), initial=0))
        stacks = [
            (
                buffers[0, start : start + bucket.size].view(bucket.shape),
                buffers[1, start : start + bucket.size].view(bucket.shape),
            )
            for bucket, start in zip(buckets, ends[:-1], strict=True)
        ]
        pairs = list(zip(buckets, stacks, strict=True))
        self._norms = buffers.new_empty(len(self._parameters))
        self._slots = [slot for bucket, (x, _) in pairs for slot in bucket.in_layout_of_parameters(x)]
        self._observing = _Products.of(pairs, self._norms, with_kernels=True)
        self._plain = _Products.of(pairs, self._norms, with_kernels=False)
        self._copied = [
            index
            for index, bucket in enumerate(bucket for bucket in buckets for _ in bucket.parameters)
            if not bucket.num_kernel_axes
        ]
        first = list(accumulate((len(bucket.parameters) for bucket in buckets), initial=0))
        self._places = [slice(*ends) for ends in pairwise(first)]
        self._kernels = [
            (KernelProduct(bucket, x), place)
            for (bucket, (x, _)), place in zip(pairs, self._places, strict=True)
            if bucket.num_kernel_axes
        ]
        self._has_axes = torch.tensor(
            [bool(bucket.layouts) for bucket in buckets for _ in bucket.parameters], device=buffers.device
        )
        self._all_have_axes = all(bucket.layouts for bucket in buckets)
        self._done = self._plain

    def multiply(self, gradients: list[Tensor]) -> None:
        """Multiply the gradients along all axes; between updates, nothing but the result matters.

        Products along different axes commute, so those of a kernel come first, together.
        """
        if self._kernels:
            for kernel, place in self._kernels:
                kernel.multiply(gradients[place])
            slots, gradients = [self._slots[i] for i in self._copied], [gradients[i] for i in self._copied]
        else:
            slots = self._slots
        if slots:
            torch._foreach_copy_(slots, gradients)
        for product in self._plain.in_turn:
            product.multiply(observe=False)
        self._done = self._plain

    def multiply_and_observe(
        self, gradients: list[Tensor], squared_norms: Tensor, start: bool, rescale: bool, smoothing: Smoothing
    ) -> None:
        """Multiply the gradients along axis after axis, and note for each what F has to learn from its X.

        The products are linear, so the rescaling of all axes is done once, at the end. Until then the X of an axis
        is what stands in the buffer times sqrt(pending).
        """
        torch._foreach_copy_(self._slots, gradients)
        for products, place in zip(self._observing.of_buckets, self._places, strict=True):
            for index, product in enumerate(products):
                fisher = product.fisher
                if index:
                    torch.linalg.vector_norm(product.flat, dim=1, out=fisher.norm)
                if start:
                    own = fisher.norm.square() if index else squared_norms[place]
                    pending = _pending(squared_norms[place], own, rescale=rescale)
                    for _ in range(_START_UPDATES):
                        product.observe()
                        update_one(fisher, own, pending, smoothing)
                product.multiply(observe=True)
        self._done = self._observing

    def move(self, squared_norms: Tensor, factor: float, *, rescale: bool) -> None:
        """Add factor times the products to the parameters, rescaled to the gradients' norms if asked for."""
        if rescale:
            for flat, norm in self._done.norms:
                torch.linalg.vector_norm(flat, dim=1, out=norm)
            factors = factor * _ratio(squared_norms, self._norms.square()).sqrt()
            if not self._all_have_axes:
                factors = torch.where(self._has_axes, factors, factor)
        else:
            factors = torch.full_like(squared_norms, factor)
        torch._foreach_addcmul_(self._parameters, self._done.results, factors.unbind())


@dataclass(frozen=True)
class _Products:
    """The products of a wave, laid out in its buffers.

    Attributes:
        of_buckets: those of each bucket.
        in_turn: all of them.
        results: the last one's results in the layout of the parameters.
        norms: the results of each bucket, (B, numbers of a tensor), and where their norms are kept, (B,).
    """

    of_buckets: list[list[AxisProduct]]
    in_turn: list[AxisProduct]
    results: list[Tensor]
    norms: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(
        cls, pairs: Sequence[tuple[Bucket, tuple[Tensor, Tensor]]], norms: Tensor, *, with_kernels: bool
    ) -> _Products:
        of_buckets, results, places, first = [], [], [], 0
        for bucket, buffers in pairs:
            x, scratch = buffers
            products = []
            left_out = 0 if with_kernels else bucket.num_kernel_axes
            for fisher in bucket.fishers[: len(bucket.fishers) - left_out]:
                products.append(AxisProduct(fisher, x, scratch))
                x, scratch = products[-1].result, products[-1].free
            of_buckets.append(products)
            results += bucket.in_layout_of_parameters(x)
            last = first + len(x)
            places.append((x.view(len(x), -1), norms[first:last]))
            first = last
        return cls(of_buckets, [product for products in of_buckets for product in products], results, places)


def _waves(buckets: list[Bucket]) -> list[list[Bucket]]:
    """Return consecutive buckets of at most _MAX_WAVE elements, or single ones."""
    waves: list[list[Bucket]] = [[]]
    for bucket in buckets:
        if waves[-1] and sum(map(_aligned, waves[-1])) + _aligned(bucket) > _MAX_WAVE:
            waves.append([])
        waves[-1].append(bucket)
    return waves


def _aligned(bucket: Bucket) -> int:
    return -(-bucket.size // _ALIGNED) * _ALIGNED


def _pending(gradients: Tensor, stacks: Tensor, *, rescale: bool) -> Tensor:
    """Return what ‖X‖² of a stack must be multiplied by: that of the gradient over its own."""
    return _ratio(gradients, stacks) if rescale else torch.ones_like(stacks)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return numerator / denominator.clamp_min(torch.finfo(denominator.dtype).tiny)


def cohorts(parameters: list[Tensor], states: Mapping[Tensor, dict[str, Any]]) -> list[Cohort]:
    """Return the cohorts of parameters that have a state and a gradient."""

    def kind(parameter: Tensor) -> tuple[str, str, int]:
        return str(parameter.dtype), str(parameter.device), int(states[parameter]["step"])

    return [Cohort(list(members), states) for _, members in groupby(sorted(parameters, key=kind), key=kind)]
