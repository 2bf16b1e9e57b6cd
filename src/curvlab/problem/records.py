"""Record the operations of a function of tensors, and replay them without the Python around them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from curvlab.described import described
from curvlab.problem.model_function import ModelFunction
from curvlab.problem.simplified import simplified

FlatFunction: TypeAlias = Callable[..., Sequence[Tensor]]
_CALLS_BEFORE = 50  # a record costs as much as about so many calls gain
_MOST_SHAPES = 8  # whoever calls with ever new shapes is not served
_MOST_COPIED = 2**20  # parameters of a network that is copied to be described
_TENSORS = ("_parameters", "_buffers")  # of a module
_DEEPEST = 6  # settings inside settings


@dataclass
class Records:
    """Calls of pure functions, recorded when one is called often with tensors of equal shapes.

    A step of a small network spends more time in Python (modules, `vmap`, the graph of the backward pass) than in
    PyTorch's kernels: of 2.3 ms for the gradients of 4 MLPs of 3,466 parameters on 256 examples each 0.9 are left.

    The record is what `make_fx` sees of one call. It is kept if it then returns what the call itself returned,
    number by number; else, and where a function cannot be recorded (it branches on values, say), calls go on as
    before. Tensors that the function reads beside its arguments are read again at each replay. Only the main
    thread records and replays: tracing patches modules for all threads.

    Attributes:
        calls_before: as many calls go to the function itself first.
    """

    calls_before: int = _CALLS_BEFORE
    _counts: dict[Hashable, int] = field(default_factory=dict)
    _found: dict[Hashable, FlatFunction | None] = field(default_factory=dict)
    _confirmed: dict[Hashable, FlatFunction | None] = field(default_factory=dict)

    @classmethod
    def of_network(cls, function: ModelFunction, *parts: Any) -> Records:
        """Return records that are shared, in this process, with all of an equal network, whatever its weights.

        So chains at each of a training's checkpoints record once. Each user compares another's record with its own
        function, number by number, before using it, and does without where they differ.

        Args:
            function: the parameters are arguments of what is recorded; all else of the model stays as it is.
            parts: what the recorded functions depend on beside the model and their arguments.
        """
        if function.num_parameters > _MOST_COPIED:
            return cls()
        bare = copy.deepcopy(function.model)
        for name in function.names:
            bare.get_parameter(name).data.zero_()
        try:
            counts, found = _shared(described([bare, parts]))
        except TypeError:  # nothing describes it
            return cls()
        return cls(_counts=counts, _found=found)

    def call(self, name: Hashable, function: FlatFunction, *arguments: Any) -> Sequence[Tensor]:
        """Return function(*arguments), a sequence of tensors that depends on the arguments' tensors alone.

        Args:
            name: of the function among those that are called through this object.
            function: of the arguments, nested as it likes.
            arguments: tensors, and None, in tuples, lists and dicts.
        """
        found = self.replay(name, function, *arguments)
        return function(*arguments) if found is None else found

    def replay(self, name: Hashable, function: FlatFunction, *arguments: Any) -> Sequence[Tensor] | None:
        """Return what `call` does; None where there is no record, and the caller has a way of its own."""
        leaves, nesting = tree_flatten(arguments)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = (name, len(leaves), *((t.shape, t.stride(), t.dtype, t.device) for t in tensors))
        if threading.current_thread() is not threading.main_thread() or torch.is_autocast_enabled():
            return None
        if key not in self._found:
            self._counts[key] = self._counts.get(key, 0) + 1
            if self._counts[key] > self.calls_before and len(self._found) < _MOST_SHAPES:
                record = _record(function, leaves, nesting)
                self._found[key] = self._confirmed[key] = _confirmed(record, function, arguments, tensors)
        elif key not in self._confirmed:
            self._confirmed[key] = _confirmed(self._found[key], function, arguments, tensors)
        replay = self._confirmed.get(key)
        return None if replay is None else replay(*tensors)


def module_state(model: nn.Module) -> tuple[Hashable, ...]:
    """Return what a record of a module's forward depends on beside values: part of the name of what may change.

    Modes, settings, hooks and which tensors are frozen or buffers; their values are read again by a replay. Not
    what forward reads outside of its modules, such as globals.
    """
    found: list[Hashable] = []
    for module in model.modules():
        for name, own in vars(module).items():
            if name in _TENSORS:
                found += [id(tensor) for tensor in own.values() if tensor is None or not tensor.requires_grad]
            elif name != "_modules":
                found.append(_setting(own))
    return tuple(found)


def _setting(own: Any, depth: int = 0) -> Hashable:
    """Return a setting, or the settings inside a container or an object, such as a config."""
    if own is None or isinstance(own, bool | int | float | str):
        return own
    inside: Sequence[Any] = ()
    if isinstance(own, list | tuple):
        inside = own
    elif not isinstance(own, Tensor | nn.Module | type | FunctionType):
        named = own if isinstance(own, dict) else getattr(own, "__dict__", {})
        inside = [*named.keys(), *named.values()]
    if depth > _DEEPEST or not inside:
        return id(own)
    return (id(own), *(_setting(each, depth + 1) for each in inside))


@lru_cache(maxsize=16)
def _shared(description: str) -> tuple[dict[Hashable, int], dict[Hashable, FlatFunction | None]]:
    return {}, {}


def _record(function: FlatFunction, leaves: list[Any], nesting: Any) -> FlatFunction | None:
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def of_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        return tuple(function(*tree_unflatten(given, nesting)))

    try:
        # One mode of shapes for all operations: else make_fx makes one for each, half of what a record costs.
        with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
            return simplified(make_fx(of_tensors)(*(leaves[place] for place in places)))
    except Exception:  # whatever tracing meets: the call itself works
        return None


def _confirmed(
    record: FlatFunction | None, function: FlatFunction, arguments: tuple[Any, ...], tensors: list[Tensor]
) -> FlatFunction | None:
    """Return the record if it gives what function(*arguments) does, number by number, else None."""
    if record is None:
        return None
    try:
        pairs = list(zip(function(*arguments), record(*tensors), strict=True))
        alike = all(a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
    except Exception:  # the function's own is raised again by the call itself
        return None
    return record if alike else None
