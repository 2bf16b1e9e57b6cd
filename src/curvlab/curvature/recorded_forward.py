"""One forward, recorded for products with Jᵀ that leave their results where they belong."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import vjp

from curvlab.curvature.column_sums import ColumnSums, tangents_of
from curvlab.linalg import unflatten


class RecordedForward:
    """Outputs of a function of the parameters, their derivative along a vector, and the way back.

    Gradients are put into the sums as they arise. Kept until all are there, they are P numbers more, which are
    written to fresh memory and read again: measured 15 % of a product on a ResNet-18 with 16 images.

    The tangents are not recorded, though they are computed beside what is: `vjp` records on a level above the
    dual numbers. Recorded too, which plain autograd does, they cost 15 % of a product on a small OPT.

    Args:
        outputs_of: takes the parameters' values, returns tensors.
        parameters: without graph.
        vector: (P,), along which to differentiate; None for outputs alone.

    Attributes:
        outputs: without graph.
        tangents: J v, one an output; None where no parameter reaches it, or without a vector.
    """

    def __init__(
        self,
        outputs_of: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        parameters: Sequence[Tensor],
        vector: Tensor | None = None,
    ) -> None:
        self._parameters = parameters
        self._sums: ColumnSums | None = None
        self._places: list[Tensor] = []
        self._reached: set[int] = set()

        # The graph holds its hooks, and we hold the graph: were we held by the hooks, nothing would free the two,
        # as Python's collector does not see through the graph.
        this = weakref.ref(self)

        def recorded(*values: Tensor) -> tuple[Tensor, ...]:
            for index, value in enumerate(values):
                value.register_hook(_hook(this, index))
            return tuple(outputs_of(values))

        with forward_ad.dual_level():
            duals = parameters
            if vector is not None:
                tangents = tangents_of(vector, parameters)
                duals = [forward_ad.make_dual(p, t) for p, t in zip(parameters, tangents, strict=True)]
            outputs, self._vjp = vjp(recorded, *duals)[:2]
            pairs = [forward_ad.unpack_dual(output) for output in outputs]
        # Outside the dual level the tangents are gone: inside it, the backward would differentiate itself too.
        self.outputs = [pair[0] for pair in pairs]
        self.tangents = [pair[1] for pair in pairs]

    def pull_back(self, cotangents: Sequence[Tensor], sums: ColumnSums, *, keep: bool = False) -> None:
        """Add Jᵀu to the only column of `sums`, for one u an output. Cost: one backward.

        Args:
            cotangents: u.
            sums: of one column.
            keep: whether to keep what another call needs.
        """
        self._sums, self._places = sums, unflatten(sums.rows[0], self._parameters)
        self._reached.clear()
        with torch.no_grad():
            self._vjp(tuple(cotangents), retain_graph=keep)
        if sums.first:
            for index, place in enumerate(self._places):
                if index not in self._reached:
                    place.zero_()

    def _put(self, index: int, gradient: Tensor) -> Tensor:
        if self._sums is None:
            raise RuntimeError("a gradient arose before pull_back was called")
        self._reached.add(index)
        self._sums.put(self._places[index], gradient)
        return self._places[index]  # in the gradient's stead, which is freed


def _hook(this: weakref.ref[RecordedForward], index: int) -> Callable[[Tensor], Tensor]:
    def put(gradient: Tensor) -> Tensor:
        recorded = this()
        if recorded is None:
            raise RuntimeError("a gradient arose after its RecordedForward was gone")
        return recorded._put(index, gradient)

    return put
