"""One interface to tensors, data sets and loaders: iterate over batches, or draw single examples."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from curvlab.curvature.batch import (
    Batch,
    Inputs,
    checked_batch,
    is_pair,
    num_examples,
    shapes,
    stack,
    take,
    without_graph,
)

__all__ = ["Batch", "Batches", "Data", "Inputs", "num_examples"]

Data: TypeAlias = Dataset[Any] | tuple[Inputs, Tensor] | Iterable[Batch]


class Batches:
    """Re-iterable batches of (inputs, targets) on one device, with access to single examples.

    Args:
        data: a pair of tensors (inputs may be a mapping of tensors), a map-style dataset of pairs, or a
            re-iterable of batches of any sizes (a list, a tuple, a DataLoader, an IterableDataset); empty batches
            are skipped. One-shot iterators are refused.
        batch_size: examples per batch, for pairs and datasets.
        device: where batches are moved.
        dtype: what floating-point inputs and targets are cast to: the model's dtype. Integer targets become
            int64. Batches carry no autograd graph.
    """

    def __init__(self, data: Data, *, batch_size: int, device: torch.device, dtype: torch.dtype) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.device = device
        self.dtype = dtype
        self._replaced: list[Tensor] | None = None
        self._cache: list[Batch] | None = None
        self._source = _source(data, batch_size)
        if self.indexable and self.num_examples == 0:
            raise ValueError("data is empty: at least one example is needed")

    @property
    def indexable(self) -> bool:
        """Whether single examples can be read without a pass over the data."""
        return isinstance(self._source, _Pair | _Examples)

    @property
    def num_examples(self) -> int:
        """N; reads all batches once when the data is an iterable of batches."""
        if isinstance(self._source, _Pair | _Examples):
            return len(self._source)
        return sum(len(targets) for _, targets in self._cached())

    def __iter__(self) -> Iterator[Batch]:
        start = 0
        for batch in self._source:
            inputs, targets = checked_batch(batch)
            if len(targets) == 0:
                continue
            if self._replaced is not None:
                targets = torch.stack(self._replaced[start : start + len(targets)])
            start += len(targets)
            yield self._move((inputs, targets))
        if start == 0:
            raise ValueError("data is empty: at least one batch with one example is needed")

    def targets(self) -> Iterator[Tensor]:
        """Yield the targets batch by batch, without reading the inputs where the data allows it."""
        if self._replaced is not None:
            yield from (target[None] for target in self._replaced)
        elif (known := self._known_targets()) is not None:
            yield known
        else:
            yield from (targets for _, targets in self)

    @property
    def knows_targets(self) -> bool:
        """Whether `targets` costs no pass over the data: those of a pair of tensors, and drawn ones."""
        return self._replaced is not None or isinstance(self._source, _Pair)

    def _known_targets(self) -> Tensor | None:
        if isinstance(self._source, _Pair):
            return self._source.targets
        return self._source.known_targets() if isinstance(self._source, _Examples) else None

    def select(self, indices: Tensor) -> list[Batch]:
        """Return the examples `indices` (repeats allowed) as batches, one for each shape of example."""
        if isinstance(self._source, _Pair | _Examples):
            inputs, targets = self._source.select(indices)
            if self._replaced is not None:
                targets = torch.stack([self._replaced[i] for i in indices.tolist()])
            return [self._move((inputs, targets))]
        groups: dict[Any, list[Batch]] = {}
        for index in indices.tolist():
            inputs, target = self._cached_example(index)
            groups.setdefault(shapes(inputs, target), []).append((inputs, target))
        return [
            self._move((stack([i for i, _ in group]), torch.stack([t for _, t in group])))
            for group in groups.values()
        ]

    def in_fixed_order(self) -> Batches:
        """Return the same data in one order for good: a DataLoader may shuffle anew at each pass."""
        if self.indexable:
            return self
        other = copy.copy(self)
        other._source = self._cached()
        return other

    def with_targets(self, targets: Sequence[Tensor]) -> Batches:
        """Return the same inputs with other targets, one for each example, in the order of `in_fixed_order`."""
        other = copy.copy(self)
        other._replaced = list(targets)
        return other

    def _move(self, batch: Batch) -> Batch:
        def move(tensor: Tensor) -> Tensor:
            return without_graph(tensor).to(self.device, self.dtype if tensor.is_floating_point() else None)

        inputs, targets = batch
        if isinstance(inputs, Mapping):
            return {name: move(value) for name, value in inputs.items()}, move(targets)
        return move(inputs), move(targets)

    def _cached(self) -> list[Batch]:
        if self._cache is None:
            self._cache = [checked_batch(batch) for batch in self._source]
        return self._cache

    def _cached_example(self, index: int) -> Batch:
        position = index
        for inputs, targets in self._cached():
            if position < len(targets):
                target = targets[position] if self._replaced is None else self._replaced[index]
                return take(inputs, position), target
            position -= len(targets)
        raise IndexError(f"example {index} of {self.num_examples}")


class _Pair:
    def __init__(self, pair: Batch, *, batch_size: int) -> None:
        self.inputs, self.targets = checked_batch(pair)
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


class _Examples:
    def __init__(self, dataset: Any, *, batch_size: int) -> None:
        self.dataset, self.batch_size = dataset, batch_size

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self), self.batch_size):
            yield self.select(torch.arange(start, min(start + self.batch_size, len(self))))

    def select(self, indices: Tensor) -> Batch:
        return checked_batch(default_collate([self.dataset[int(index)] for index in indices]))

    def known_targets(self) -> Tensor | None:
        """Return `dataset.targets` if that is what the dataset gives: it may transform them when they are read."""
        known = getattr(self.dataset, "targets", None)
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


def _source(data: Any, batch_size: int) -> _Pair | _Examples | Iterable[Batch]:
    what_to_pass = (
        "pass a pair of tensors (inputs, targets), a map-style dataset of such pairs, or a re-iterable of "
        "(inputs, targets) batches."
    )
    if isinstance(data, TensorDataset):
        if len(data.tensors) != 2:
            raise TypeError(f"the TensorDataset holds {len(data.tensors)} tensors: {what_to_pass}")
        data = data.tensors
    if is_pair(data):
        return _Pair(data, batch_size=batch_size)
    if isinstance(data, Iterator):
        raise TypeError(f"data is a one-shot iterator, a second pass over it would be empty: {what_to_pass}")
    if isinstance(data, list | tuple):
        return [checked_batch(batch) for batch in data]
    if isinstance(data, DataLoader | IterableDataset):
        return data
    if isinstance(data, Tensor | Mapping | str) or not (
        hasattr(data, "__getitem__") or isinstance(data, Iterable)
    ):
        raise TypeError(f"cannot read data from {type(data).__name__}: {what_to_pass}")
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return _Examples(data, batch_size=batch_size)
    return data
