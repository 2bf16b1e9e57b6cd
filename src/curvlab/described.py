"""Texts that tell one piece of work from another: losses, closures, schedules, data sets, operators.

Every layer may import this module.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

_NUM_EXAMPLES = 2000  # of a data set that are read: it may be larger than memory
_LONGEST_TEXT = 100  # characters; a longer description is replaced by its hash
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_NAMED = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    np.ufunc,
)


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the tensors' types, shapes and values."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def described(part: Any) -> str:
    """Return a text that is the same in every process, and differs where a result would differ.

    Tensors and arrays count with all their values. Modules: class, parameters, buffers and attributes, such as
    class weights and label smoothing, and the methods that a class of the user's own defines. Functions: code,
    defaults, closures and the globals of their own module; partials with their arguments, bound methods with their
    object. Map-style data sets: type, length and up to 2,000 examples, read with seeded random states. Other
    objects: what their method depends_on() returns, or all of their attributes; where they are called like a
    function, their methods, too.

    Raises:
        TypeError: nothing distinguishes the part (a lock, a running generator, an object without attributes).

    >>> described(torch.nn.CrossEntropyLoss()) == described(torch.nn.CrossEntropyLoss(label_smoothing=0.1))
    False
    """
    text = _Describer().text(part)
    return text if len(text) <= _LONGEST_TEXT else hashlib.sha256(text.encode()).hexdigest()


class _Describer:
    """One description; it knows the objects that it is inside of, which may refer to one another."""

    def __init__(self) -> None:
        self._inside: list[Any] = []

    def text(self, part: Any) -> str:
        if part is None or isinstance(part, bool | int | float | complex | str | bytes | PurePath | enum.Enum):
            return repr(part)
        if isinstance(part, torch.dtype | torch.device | torch.Size | range | slice):
            return repr(part)
        if isinstance(part, _NAMED):
            return _name(part)
        if isinstance(part, Tensor):
            return f"tensor {fingerprint([part])}"
        if isinstance(part, torch.Generator):
            return f"generator {fingerprint([part.get_state()])}"
        for depth, outer in enumerate(self._inside):
            if outer is part:
                return f"again {depth}"
        self._inside.append(part)
        try:
            return self._of_object(part)
        finally:
            self._inside.pop()

    def _of_object(self, part: Any) -> str:
        ways: tuple[tuple[Any, Callable[[Any], str]], ...] = (
            (Mapping, lambda part: _name(type(part)) + self._pairs(part.items())),
            (Set, lambda part: f"set {sorted(map(self.text, part))}"),
            ((list, tuple), lambda part: f"{_name(type(part))}({', '.join(map(self.text, part))})"),
            (functools.partial, lambda part: f"partial{self.text([part.func, part.args, part.keywords])}"),
            (types.MethodType, lambda part: f"method{self.text([part.__func__, part.__self__])}"),
            (types.FunctionType, self._of_function),
            (nn.Module, self._of_module),
            ((TensorDataset, Subset, DataLoader), self._of_torch_data),
        )
        for kinds, describe in ways:
            if isinstance(part, kinds):
                return describe(part)
        if callable(getattr(part, "depends_on", None)):
            return f"{_name(type(part))} {self.text(part.depends_on())}"
        if callable(getattr(part, "probe", None)):  # a linear operator
            return f"{_name(type(part))} {fingerprint([part.probe()])}"
        if hasattr(part, "__array_interface__") or hasattr(part, "__array__"):
            return self._of_array(np.asarray(part))
        if hasattr(part, "__len__") and hasattr(part, "__getitem__"):
            return self._of_examples(part)
        return self._of_attributes(part)

    def _pairs(self, pairs: Iterable[tuple[Any, Any]]) -> str:
        return "{" + ", ".join(f"{self.text(key)}: {self.text(value)}" for key, value in pairs) + "}"

    def _of_array(self, array: np.ndarray) -> str:
        if array.dtype.hasobject:
            return f"array{array.shape} {self.text(array.tolist())}"
        content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        return f"array{array.shape} {array.dtype} {content}"

    def _of_function(self, function: types.FunctionType) -> str:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        closure = {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
        parts = [function.__defaults__, function.__kwdefaults__, closure]
        known = function.__globals__
        used = {n: self._of_global(known[n], function.__module__) for n in _names(function.__code__) if n in known}
        return f"{_name(function)} {_code(function.__code__)} {[self.text(part) for part in parts]} {used}"

    def _of_global(self, part: Any, module: str) -> str:
        # What comes from other modules is theirs, and a log or a lock changes no number: their names are enough.
        if callable(part) and getattr(part, "__module__", None) != module:
            return _name(part)
        try:
            return self.text(part)
        except TypeError:
            return _name(type(part))

    def _of_module(self, module: nn.Module) -> str:
        tensors = [*module.parameters(), *module.buffers()]
        parts = []
        for name, each in module.named_modules():
            own = {k: v for k, v in vars(each).items() if k not in _OF_EVERY_MODULE}
            parts.append(f"{name} {_name(type(each))} {self._pairs(own.items())} {self._of_methods(type(each))}")
        return f"module {parts} {fingerprint(tensors)}"

    def _of_methods(self, kind: type) -> dict[str, str]:
        """Return what the methods of a class do, those of its bases included; of installed packages nothing."""
        found = {}
        for base in kind.__mro__:
            for name, part in () if _is_installed(base) else vars(base).items():
                function = getattr(part, "fget", getattr(part, "__func__", part))  # property, static, class method
                if isinstance(function, types.FunctionType):
                    found[f"{base.__qualname__}.{name}"] = self.text(function)
        return found

    def _of_torch_data(self, data: TensorDataset | Subset | DataLoader) -> str:
        if isinstance(data, TensorDataset):
            return f"data {self.text(data.tensors)}"
        if isinstance(data, Subset):
            return f"subset {self.text(data.dataset)} {fingerprint([torch.as_tensor(data.indices)])}"
        settings = (data.batch_size, data.drop_last, type(data.sampler), data.collate_fn)
        return f"loader {self.text(settings)} {self.text(data.dataset)}"

    def _of_examples(self, data: Any) -> str:
        with seeded_reading():
            places = torch.linspace(0, len(data) - 1, min(len(data), _NUM_EXAMPLES)).round().long().tolist()
            examples = [self.text(data[place]) for place in places]
        return f"data {_name(type(data))} {len(data)} {examples}"

    def _of_attributes(self, part: Any) -> str:
        if not hasattr(part, "__dict__") and not getattr(part, "__slots__", ()):
            raise TypeError(
                f"nothing tells this {_name(type(part))} from another, so a checkpoint would not know whether it "
                "belongs to the same work: pass an object with attributes, or leave the checkpoint out"
            )
        slots = getattr(part, "__slots__", ())
        own = {name: getattr(part, name) for name in slots if hasattr(part, name)} | getattr(part, "__dict__", {})
        methods = self._of_methods(type(part)) if callable(part) else {}
        return f"{_name(type(part))} {self._pairs(own.items())} {methods}"


def _is_installed(kind: type) -> bool:
    """Return whether a class is of Python or of a package: its code has a version, and no user edits it."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    known = kind.__module__.partition(".")[0] in ("builtins", "torch", __package__)
    # The file of __main__ may be a package's that runs the user's code: a notebook's kernel.
    return known or (kind.__module__ != "__main__" and ("site-packages" in file or "dist-packages" in file))


def _name(part: Any) -> str:
    """Return the full name of a class, function or module, which holds no address."""
    name = getattr(part, "__qualname__", None) or getattr(part, "__name__", None) or type(part).__qualname__
    return f"{getattr(part, '__module__', '')}.{name}"


def _code(code: types.CodeType) -> str:
    """Return what a function does: its instructions and constants, those of inner functions included."""
    constants = [
        _code(c)
        if isinstance(c, types.CodeType)
        else repr(sorted(map(repr, c)) if isinstance(c, frozenset) else c)
        for c in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a function, those of inner functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


@contextmanager
def seeded_reading() -> Iterator[None]:
    """Seed all global random states of the CPU, and put them back: transforms of examples may draw from them."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            random.seed(0)
            np.random.seed(0)  # noqa: NPY002
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
