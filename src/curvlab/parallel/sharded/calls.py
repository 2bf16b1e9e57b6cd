"""A unit's forward, with values or with derivatives, that keeps no whole parameter for the backward.

What stays between forward and backward are the unit's inputs; its parameters are gathered again and its forward is
run again when the backward comes to it. Gradients of parameters do not go through autograd: they are summed over
the ranks at once, and each rank adds its own part to the row of the vector that is being computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.func import jvp
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from curvlab.parallel.sharded.unit import Unit

Maybe = Tensor | None


@dataclass
class Recording:
    """What the calls of one forward share.

    Attributes:
        vector: (P_r,), along which derivatives are taken; None for values alone.
        row: (P_r,), to which the next backward adds.
        anchor: requires a gradient, so that the backward reaches units whose inputs require none.
    """

    vector: Tensor | None = None
    row: Tensor = field(default_factory=lambda: torch.empty(0))
    anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))


def call_along(unit: Unit, vector: Tensor, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """Return the outputs as dual numbers along a vector, within a dual level and without graph."""
    return unit.run(duals(unit, unit.parameters(), unit.tangents(vector)), arguments, keywords)


def call_recorded(unit: Unit, recording: Recording, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """Return the outputs, dual numbers where the recording has a vector, with a graph that gathers again."""
    leaves, spec = tree_flatten((tuple(arguments), dict(keywords)))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    call = _Call(unit, recording, [None if i in places else leaf for i, leaf in enumerate(leaves)], spec, places)
    with torch.no_grad():
        if recording.vector is None:
            found, outputs = tree_flatten(unit.run(unit.parameters(), arguments, keywords))
        else:
            found, outputs = tree_flatten(call_along(unit, recording.vector, arguments, keywords))
    kept = [i for i, leaf in enumerate(found) if isinstance(leaf, Tensor)]
    values: list[Maybe] = [leaves[place] for place in places]
    if recording.vector is None:
        call.found = [found[i].clone() for i in kept]
        results = list(_Gathered.apply(call, recording.anchor, *values))
    else:
        inputs = [forward_ad.unpack_dual(leaves[place]) for place in places]
        pairs = [forward_ad.unpack_dual(found[i]) for i in kept]
        zeros = [torch.zeros_like(p.primal) if p.tangent is None else p.tangent for p in pairs]
        call.found = [*(pair.primal.clone() for pair in pairs), *(zero.clone() for zero in zeros)]
        values = [*(pair.primal for pair in inputs), *(pair.tangent for pair in inputs)]
        results = list(_Gathered.apply(call, recording.anchor, *values))
        results = [
            forward_ad.make_dual(*pair) for pair in zip(results[: len(kept)], results[len(kept) :], strict=True)
        ]
    for place, result in zip(kept, results, strict=True):
        found[place] = result
    return tree_unflatten(found, outputs)


@dataclass
class _Call:
    """One call of a unit: all but the floating-point tensors among its arguments.

    Attributes:
        unit, recording: whose call, and what for.
        rest: the other arguments, flattened with None in the places of those tensors.
        spec: how the arguments were flattened.
        places: of the tensors.
        found: what the forward gave, until it is handed on.
    """

    unit: Unit
    recording: Recording
    rest: list[Any]
    spec: TreeSpec
    places: list[int]
    found: list[Tensor] = field(default_factory=list)

    def values(self, parameters: Sequence[Tensor], tensors: Sequence[Maybe]) -> list[Tensor]:
        """Return the tensors among the outputs for tensors in the arguments' places."""
        leaves = list(self.rest)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        arguments, keywords = tree_unflatten(leaves, self.spec)
        outputs, _ = tree_flatten(self.unit.run(parameters, arguments, keywords))
        return [leaf for leaf in outputs if isinstance(leaf, Tensor)]

    def evaluate(self, parameters: Sequence[Tensor], tensors: Sequence[Maybe]) -> list[Tensor]:
        """Return the outputs, followed by their derivatives where the recording has a vector."""
        if self.recording.vector is None:
            return self.values(parameters, tensors)
        half = len(self.places)
        inputs = [value for value in tensors[:half] if value is not None]
        along = [
            torch.zeros_like(value) if tangent is None else tangent
            for value, tangent in zip(inputs, tensors[half:], strict=True)
        ]

        def outputs(trained: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
            moved = list(parameters)
            for index, value in zip(self.unit.trained, trained, strict=True):
                moved[index] = value
            return self.values(moved, inputs)

        # Not by dual numbers: their rule for softmax works in place, and has no backward; that of torch.func has.
        trained = [parameters[index] for index in self.unit.trained]
        tangents = self.unit.tangents(self.recording.vector)
        values, derivatives = jvp(outputs, (trained, inputs), (tangents, along))[:2]
        return [*values, *derivatives]


class _Gathered(Function):
    """What a call has found, with a backward that gathers the parameters and evaluates it once more."""

    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *tensors: Maybe) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        found, call.found = call.found, []
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *cotangents: Maybe) -> tuple[Maybe, ...]:
        call: _Call = ctx.call
        needed = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            inputs = [
                tensor if tensor is None else tensor.detach().requires_grad_(wanted)
                for tensor, wanted in zip(ctx.saved_tensors, needed, strict=True)
            ]
            parameters = call.unit.parameters()
            trained = [parameters[i].requires_grad_() for i in call.unit.trained]
            outputs = call.evaluate(parameters, inputs)
        wanted_inputs = [
            tensor for tensor, wanted in zip(inputs, needed, strict=True) if wanted and tensor is not None
        ]
        reached = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if c is not None and o.requires_grad]
        found = torch.autograd.grad(
            [output for output, _ in reached],
            [*trained, *wanted_inputs],
            [cotangent for _, cotangent in reached],
            allow_unused=True,
        )
        call.unit.add_gradients(found[: len(trained)], call.recording.row)
        rest = iter(found[len(trained) :])
        return None, None, *(next(rest) if wanted else None for wanted in needed)


def duals(unit: Unit, parameters: Sequence[Tensor], tangents: Sequence[Tensor]) -> list[Tensor]:
    """Return a unit's parameters, the trained ones as dual numbers."""
    moved = list(parameters)
    for index, tangent in zip(unit.trained, tangents, strict=True):
        moved[index] = forward_ad.make_dual(parameters[index], tangent)
    return moved


@contextmanager
def dual_level(*, needed: bool) -> Iterator[None]:
    """Enter a level of dual numbers where one is needed."""
    if not needed:
        yield
        return
    with forward_ad.dual_level():
        yield
