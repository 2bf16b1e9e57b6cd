"""One interface to tensors, data sets and loaders: iterate over batches, or draw single examples."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from curvlab.problem.batch import (
    Batch,
    Inputs,
    checked_batch,
    num_examples,
    shapes,
    stack,
    take,
    without_graph,
)
from curvlab.problem.data_sources import Examples, Pair, source_of
from curvlab.problem.hugging_face import OwnLabels
from curvlab.problem.model_function import ModelFunction

__all__ = ["Batch", "Batches", "Data", "Inputs", "num_examples"]

# Mappings are batches that hold their labels, {"input_ids": ..., "labels": ...}.
Data: TypeAlias = (
    Dataset[Any]
    | DataLoader[Any]
    | tuple[Inputs, Tensor]
    | Mapping[str, Tensor]
    | Iterable[Batch | Mapping[str, Any]]
)


class Batches:
    """Re-iterable batches of (inputs, targets) on one device, with access to single examples.

    Every pass has the same examples in the same order. A DataLoader that shuffles is read in the order of its data
    set; data that is another at each pass is refused, see `fixed_loader`.

    Args:
        data: a pair of tensors (inputs may be a mapping of tensors), a map-style dataset of pairs, or a
            re-iterable of batches of any sizes (a list, a tuple, a DataLoader, an IterableDataset); empty batches
            are skipped. One-shot iterators are refused. With a `model`, mappings that hold their labels may stand
            wherever a pair does: in data sets of Hugging Face, batches of their collators, or as the whole data.
        batch_size: examples per batch, for pairs and datasets.
        device: where batches are moved.
        dtype: what floating-point inputs and targets are cast to: the model's dtype. Integer targets become
            int64. Batches carry no autograd graph.
        model: says what the labels inside a mapping belong to (`OwnLabels`).
    """

    def __init__(
        self,
        data: Data,
        *,
        batch_size: int,
        device: torch.device,
        dtype: torch.dtype,
        model: ModelFunction | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.device = device
        self.dtype = dtype
        self.batch_size = batch_size
        self._replaced: list[Tensor] | None = None
        self._cache: list[Batch] | None = None
        self._source = source_of(
            data, batch_size=batch_size, read=checked_batch if model is None else OwnLabels(model)
        )
        if self.indexable and self.num_examples == 0:
            raise ValueError("data is empty: at least one example is needed")

    @classmethod
    def of(cls, model: ModelFunction, data: Data, *, batch_size: int) -> Self:
        """Return the data as the model takes it: on its device, in its dtype, with labels as it reads them."""
        if isinstance(data, cls):
            return data
        return cls(data, batch_size=batch_size, device=model.device, dtype=model.dtype, model=model)

    @property
    def indexable(self) -> bool:
        """Whether single examples can be read without a pass over the data."""
        return isinstance(self._source, Pair | Examples)

    @property
    def num_examples(self) -> int:
        """N; reads all batches once when the data is an iterable of batches."""
        if isinstance(self._source, Pair | Examples):
            return len(self._source)
        return sum(len(targets) for _, targets in self._cached())

    def __iter__(self) -> Iterator[Batch]:
        start = 0
        for inputs, targets in self._source:
            if len(targets) == 0:
                continue
            rows = slice(start, start + len(targets))
            start = rows.stop
            given = targets if self._replaced is None else torch.stack(self._replaced[rows])
            yield self._move((inputs, given))
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
        return self._replaced is not None or isinstance(self._source, Pair)

    def _known_targets(self) -> Tensor | None:
        if isinstance(self._source, Pair):
            return self._source.targets
        return self._source.known_targets() if isinstance(self._source, Examples) else None

    def select(self, indices: Tensor) -> list[Batch]:
        """Return the examples `indices` (repeats allowed) as batches, one for each shape of example."""
        if isinstance(self._source, Pair | Examples):
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
        """Return the same data, held in memory unless single examples can be read: a stream may be costly."""
        return self if self.indexable else self._in_memory()

    def with_targets(self, targets: Sequence[Tensor]) -> Batches:
        """Return the same inputs with other targets, one for each example, in the order of a pass."""
        # A collator pads single examples to other lengths than in their batch: targets would not fit them.
        padded = isinstance(self._source, Examples) and self._source.loader is not None
        other = self._in_memory() if padded else copy.copy(self)
        other._replaced = list(targets)
        return other

    def _in_memory(self) -> Batches:
        other = copy.copy(self)
        other._source = self._cached()
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
            self._cache = list(self._source)
        return self._cache

    def _cached_example(self, index: int) -> Batch:
        position = index
        for inputs, targets in self._cached():
            if position < len(targets):
                target = targets[position] if self._replaced is None else self._replaced[index]
                return take(inputs, position), target
            position -= len(targets)
        raise IndexError(f"example {index} of {self.num_examples}")
