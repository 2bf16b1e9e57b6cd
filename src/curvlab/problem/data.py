"""Tensors, data sets and loaders as one thing: batches that are the same at every pass, and single examples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from curvlab.arguments import whole
from curvlab.described import fingerprint
from curvlab.problem.batch import (
    Batch,
    Inputs,
    checked_batch,
    different_shapes,
    is_pair,
    shapes,
    stacked,
    take,
    without_graph,
)
from curvlab.problem.hugging_face import LABELS, OwnLabels
from curvlab.problem.memory import free_memory
from curvlab.problem.model_function import ModelFunction
from curvlab.problem.repeatable import EACH_PASS, check_examples, check_passes, unchanged_random_state

# Mappings are batches that hold their labels, {"input_ids": ..., "labels": ...}.
Data: TypeAlias = (
    Dataset[Any]
    | DataLoader[Any]
    | tuple[Inputs, Tensor]
    | Mapping[str, Tensor]
    | Iterable[Batch | Mapping[str, Any]]
)
# Turns what the data gives into a checked pair: `checked_batch`, or `OwnLabels` where a model is known.
Read: TypeAlias = Callable[[Any], Batch]

_WHAT_TO_PASS = (
    "pass a pair of tensors (inputs, targets), a map-style dataset of such pairs, or a re-iterable of "
    "(inputs, targets) batches."
)
_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
# Batches are held, and read once, if they take no more than this share of what is free.
_HELD_SHARE = 0.1


class Batches:
    """Re-iterable batches of (inputs, targets) on one device, with access to single examples.

    Every pass has the same examples in the same order; data that is another at each pass is refused. What takes
    little memory is read and moved once, and held.

    Args:
        data: a pair of tensors (inputs may be a mapping of tensors), a map-style dataset or a list of single
            pairs, or a re-iterable of batches of any sizes (a list, a tuple, a DataLoader, an IterableDataset);
            empty batches are skipped. One-shot iterators and loaders that shuffle are refused. With a `model`,
            mappings that hold their labels may stand wherever a pair does: in data sets of Hugging Face, batches
            of their collators, or as the whole data.
        batch_size: examples per batch, for pairs and datasets.
        device: where batches are moved.
        dtype: what floating-point inputs and targets are cast to: the model's dtype. Integer targets become
            int64. Batches carry no autograd graph.
        model: says what the labels inside a mapping belong to (`OwnLabels`).
        name: of this data in error messages.
    """

    def __init__(
        self,
        data: Data,
        *,
        batch_size: int,
        device: torch.device,
        dtype: torch.dtype,
        model: ModelFunction | None = None,
        name: str = "data",
    ) -> None:
        self.name, self.device, self.dtype = name, device, dtype
        self.batch_size = batch_size = whole("batch_size", batch_size)
        self._drawn: Sequence[Tensor] | None = None  # in the place of the data's targets
        self._held: list[Batch] | None = None  # all batches, moved
        self._may_hold = _HELD_SHARE * (free_memory(device) or 0)
        self._source = _source_of(data, batch_size, checked_batch if model is None else OwnLabels(model))
        if isinstance(self._source, _Pair | _Examples) and len(self._source) == 0:
            raise ValueError(f"{name} is empty: at least one example is needed")

    @classmethod
    def of(cls, model: ModelFunction, data: Data, *, batch_size: int, name: str = "data") -> Self:
        """Return the data as the model takes it: on its device, in its dtype, with labels as it reads them."""
        if isinstance(data, cls):
            return data
        return cls(data, batch_size=batch_size, device=model.device, dtype=model.dtype, model=model, name=name)

    @property
    def num_examples(self) -> int:
        """N; reads and holds all batches when the data is an iterable of batches."""
        if isinstance(self._source, _Pair | _Examples):
            return len(self._source)
        return sum(len(targets) for _, targets in self._all())

    def __iter__(self) -> Iterator[Batch]:
        start = 0
        for inputs, targets in self._moved():
            rows = slice(start, start + len(targets))
            start = rows.stop
            yield inputs, targets if self._drawn is None else self._targets_drawn(range(rows.start, rows.stop))
        if start == 0:
            raise ValueError(f"{self.name} is empty: at least one batch with one example is needed")

    def targets(self) -> Iterator[Tensor]:
        """Yield the targets batch by batch, without reading the inputs where the data allows it."""
        known = None if self._drawn is not None else getattr(self._source, "known_targets", lambda: None)()
        if self._drawn is not None:
            yield from (target[None] for target in self._drawn)
        elif known is not None:
            yield known
        else:
            yield from (targets for _, targets in self)

    def select(self, indices: Tensor) -> list[Batch]:
        """Return the examples `indices` (repeats allowed) as batches, one for each shape of example."""
        return [batch for batch, _ in self.select_with_places(indices)]

    def select_with_places(self, indices: Tensor) -> list[tuple[Batch, Tensor]]:
        """Return what `select` does, and beside each batch its places: which of `indices` it holds."""
        outside = indices[(indices < 0) | (indices >= self.num_examples)]
        if len(outside):
            raise IndexError(
                f"example {int(outside[0])} does not exist: {self.name} has {self.num_examples}, numbered from 0"
            )
        if isinstance(self._source, _Pair | _Examples):
            inputs, targets = self._move(self._source.select(indices))
            if self._drawn is not None:
                targets = self._targets_drawn(indices.tolist())
            return [((inputs, targets), torch.arange(len(indices)))]
        groups: dict[Any, list[tuple[Inputs, Tensor, int]]] = {}
        for place, index in enumerate(indices.tolist()):
            inputs, target = self._example(index)
            groups.setdefault(shapes(inputs, target), []).append((inputs, target, place))
        found = []
        for group in groups.values():
            inputs_of, targets_of, places = zip(*group, strict=True)
            found.append(((stacked(inputs_of), torch.stack(targets_of)), torch.tensor(places)))
        return found

    def in_fixed_order(self) -> Batches:
        """Return the same data, held in memory unless single examples can be read: a stream may be costly."""
        if not isinstance(self._source, _Pair | _Examples):
            self._all()
        return self

    def in_dtype(self, dtype: torch.dtype) -> Batches:
        """Return the same data cast to another dtype."""
        other = copy.copy(self)
        if dtype != self.dtype:
            other.dtype, other._held = dtype, None  # read again from the data, which may have more digits
        return other

    def depends_on(self) -> Mapping[str, Any]:
        """Return what tells the data from other data (see `described`). Cost: a pass."""
        return {"examples": fingerprint(tensor for batch in self for tensor in _tensors(batch))}

    def with_targets(self, targets: Sequence[Tensor]) -> Batches:
        """Return the same inputs with other targets, one for each example, in the order of a pass."""
        other = copy.copy(self)
        # A collator pads single examples to other lengths than in their batch: targets would not fit them.
        if isinstance(self._source, _Examples) and self._source.loader is not None:
            other._source = other._held = list(self._moved())
        other._drawn = list(targets)
        return other

    def _moved(self) -> Iterator[Batch]:
        """Yield the batches on the device; the first whole pass holds them if they are small."""
        if self._held is not None:
            yield from self._held
            return
        held: list[Batch] | None = []
        size = 0
        for batch in self._source:
            if len(batch[1]) == 0:
                continue
            moved = self._move(batch)
            size += self._bytes_beside(moved, batch)
            if size > self._may_hold:
                held = None
            elif held is not None:
                held.append(moved)
            yield moved
        if held is not None:
            self._held = held

    def _bytes_beside(self, moved: Batch, given: Batch) -> int:
        """Return how many bytes a moved batch takes that the data does not hold already."""
        has_given = isinstance(self._source, _Pair | list)
        pairs = zip(_tensors(moved), _tensors(given), strict=True)
        return sum(new.nbytes for new, old in pairs if not has_given or new.data_ptr() != old.data_ptr())

    def _all(self) -> list[Batch]:
        """Return all batches, and hold them, whatever their size."""
        if self._held is None:
            self._held = list(self._moved())
        return self._held

    def _example(self, index: int) -> tuple[Inputs, Tensor]:
        position = index
        for inputs, targets in self._all():
            if position < len(targets):
                target = targets[position] if self._drawn is None else self._targets_drawn([index])[0]
                return take(inputs, position), target
            position -= len(targets)
        raise IndexError(f"example {index} does not exist")

    def _targets_drawn(self, indices: Iterable[int]) -> Tensor:
        drawn = self._drawn or ()
        return self._on_device(torch.stack([drawn[index] for index in indices]))

    def _move(self, batch: Batch) -> Batch:
        inputs, targets = batch
        if isinstance(inputs, Mapping):
            return {name: self._on_device(value) for name, value in inputs.items()}, self._on_device(targets)
        return self._on_device(inputs), self._on_device(targets)

    def _on_device(self, tensor: Tensor) -> Tensor:
        return without_graph(tensor).to(self.device, self.dtype if tensor.is_floating_point() else None)


def _tensors(batch: Batch) -> list[Tensor]:
    inputs, targets = batch
    return [inputs, targets] if isinstance(inputs, Tensor) else [*inputs.values(), targets]


# ---------------------------------------------------------------------------------- kinds of data
class _Pair:
    """Tensors that hold all examples."""

    def __init__(self, pair: Batch, batch_size: int) -> None:
        self.inputs, self.targets = pair
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.targets)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self), self.batch_size):
            rows = slice(start, start + self.batch_size)
            yield take(self.inputs, rows), self.targets[rows]

    def select(self, indices: Tensor) -> Batch:
        rows = indices.to(self.targets.device)
        return take(self.inputs, rows), self.targets[rows]

    def known_targets(self) -> Tensor:
        return self.targets


class _Examples:
    """A map-style data set, in batches of its own, or of a loader, whose collator then makes every batch."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        read: Read,
        loader: DataLoader[Any] | None = None,
        order: Sequence[int] | None = None,
    ) -> None:
        self.dataset, self.batch_size, self.loader, self._read = dataset, batch_size, loader, read
        self._order = range(len(dataset)) if order is None else order
        if len(self) > 0 and (loader is None or loader.num_workers == 0):
            check_examples(lambda index: self._collated([index]), self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Batch]:
        if self.loader is not None:
            yield from map(self._read, self.loader)
            return
        for start in range(0, len(self), self.batch_size):
            yield self.select(torch.arange(start, min(start + self.batch_size, len(self))))

    def select(self, indices: Tensor) -> Batch:
        return self._read(self._collated([self._order[index] for index in indices.tolist()]))

    def _collated(self, indices: list[int]) -> Any:
        together = getattr(self.dataset, "__getitems__", None)
        examples = together(indices) if callable(together) else [self.dataset[index] for index in indices]
        if self.loader is not None:
            return self.loader.collate_fn(examples)
        if isinstance(self._read, OwnLabels):
            examples = [self._read.columns(example) for example in examples]
        try:
            return default_collate(examples)
        except RuntimeError as error:
            if "equal size" not in str(error):
                raise
            raise different_shapes() from error

    def known_targets(self) -> Tensor | None:
        """Return `dataset.targets` if that is what the dataset gives: it may transform them when they are read."""
        known = getattr(self.dataset, "targets", None) if self.loader is None else None
        if known is None or len(known) != len(self) or getattr(self.dataset, "target_transform", None) is not None:
            return None
        try:
            known = torch.as_tensor(known)
        except (TypeError, ValueError, RuntimeError):
            return None
        for index in (0, len(self) - 1):
            target = self.select(torch.tensor([index]))[1][0]
            if target.shape != known.shape[1:] or not bool((target == known[index]).all()):
                return None
        return known if known.is_floating_point() else known.long()


class _Stream:
    """Batches that are made anew at each pass."""

    def __init__(self, batches: Iterable[Any], read: Read) -> None:
        self._batches, self._read = batches, read
        check_passes(batches)

    def __iter__(self) -> Iterator[Batch]:
        return map(self._read, self._batches)


def _source_of(data: Any, batch_size: int, read: Read) -> _Pair | _Examples | _Stream | list[Batch]:
    """Return batches that are the same at each pass; single examples can be read, except from streams."""
    data = data.tensors if isinstance(data, TensorDataset) else data
    if isinstance(data, tuple) and len(data) != 2 and data and all(isinstance(entry, Tensor) for entry in data):
        raise TypeError(
            f"the data are {len(data)} tensors: pass a pair of them, (inputs, targets). Several inputs go into a "
            "mapping by the names that the model's forward takes, ({'u': u, 'v': v}, targets)."
        )
    if isinstance(data, Mapping) and not any(isinstance(value, Tensor) for value in data.values()):
        raise TypeError(
            f"the data is a mapping of {sorted(map(str, data))} to no tensors: of several data sets choose one, "
            "e.g. data['train']."
        )
    if is_pair(data) or (isinstance(data, Mapping) and isinstance(read, OwnLabels)):
        return _Pair(read(data), batch_size)
    if isinstance(data, Iterator):
        raise TypeError(f"data is a one-shot iterator, a second pass over it would be empty: {_WHAT_TO_PASS}")
    if isinstance(data, list | tuple):
        return _Examples(data, batch_size, read) if holds_examples(data) else [read(batch) for batch in data]
    if isinstance(data, DataLoader):
        return _of_loader(data, read)
    if isinstance(data, Tensor | Mapping | str) or not (
        hasattr(data, "__getitem__") or isinstance(data, Iterable)
    ):
        raise TypeError(f"cannot read data from {type(data).__name__}: {_WHAT_TO_PASS}")
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset):
        return _Examples(data, batch_size, read)
    return _Stream(data, read)


def holds_examples(data: Sequence[Any]) -> bool:
    """Return whether a list is one of single examples, not of batches: its first target is a number, or ids a row.

    Or the first inputs and targets differ in length, as those of one batch cannot.
    """
    if not data:
        return False
    inputs: Any
    target: Any
    if isinstance(data[0], Mapping):
        inputs, target = data[0], next((data[0][name] for name in LABELS if name in data[0]), None)
    elif isinstance(data[0], tuple | list) and len(data[0]) == 2:
        inputs, target = data[0]
    else:
        return False
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    if isinstance(target, Number) or getattr(target, "ndim", 1) == 0 or getattr(ids, "ndim", 2) == 1:
        return True
    of_pair = isinstance(inputs, Tensor) and isinstance(target, Tensor) and inputs.ndim == target.ndim == 1
    return of_pair and len(inputs) != len(target)


def _of_loader(loader: DataLoader[Any], read: Read) -> _Examples | _Stream:
    """Return a loader's batches, in the order of its samplers; one that shuffles is refused."""
    sampler: Any = loader.batch_sampler
    order: list[int] | None = None
    shuffles = isinstance(getattr(sampler, "sampler", loader.sampler), _SHUFFLING)
    if not shuffles and sampler is not None and not isinstance(loader.dataset, IterableDataset):
        with unchanged_random_state():
            order, again = ([int(index) for batch in sampler for index in batch] for _ in range(2))
        shuffles = order != again
    if shuffles:
        raise ValueError(
            f"the loader shuffles: it gives other batches at {EACH_PASS}. Pass its data set, a loader with "
            "shuffle=False, or batches that are drawn once, list(loader)."
        )
    if order is None:
        return _Stream(loader, read)
    if loader.num_workers > 0:
        check_passes(loader)
    return _Examples(loader.dataset, loader.batch_size or 1, read, loader, order)
