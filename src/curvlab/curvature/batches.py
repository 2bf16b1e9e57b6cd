"""One view of all the forms in which data may be given: iterate over batches, or draw single examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

Inputs: TypeAlias = Tensor | Mapping[str, Tensor]
Batch: TypeAlias = tuple[Inputs, Tensor]
Data: TypeAlias = Dataset[Any] | tuple[Inputs, Tensor] | Iterable[Batch]


class Batches:
    """Re-iterable batches of (inputs, targets) on one device, with access to single examples.

    Args:
        data: a pair of tensors (inputs may be a mapping of tensors), a map-style dataset of pairs, or a
            re-iterable of batches of any sizes (a list, a DataLoader). One-shot iterators are refused.
        batch_size: examples per batch, for pairs and datasets.
        device: where batches are moved.
        dtype: what floating-point inputs and targets are cast to: the model's dtype.
    """

    def __init__(self, data: Data, *, batch_size: int, device: torch.device, dtype: torch.dtype) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.device = device
        self.dtype = dtype
        self._replaced: list[Tensor] | None = None
        self._cache: list[Batch] | None = None
        source = data.tensors if isinstance(data, TensorDataset) else data
        if _is_pair(source):
            self._source: _Pair | _Examples | Iterable[Batch] = _Pair(*source, batch_size=batch_size)  # type: ignore[misc]
        elif isinstance(source, Iterator):
            raise TypeError(
                "data is a one-shot iterator: a second pass over it would be empty. Pass a list of batches, "
                "a DataLoader, a dataset or a pair of tensors."
            )
        elif isinstance(source, list | DataLoader):
            self._source = source
        elif hasattr(source, "__getitem__") and hasattr(source, "__len__"):
            self._source = _Examples(source, batch_size=batch_size)
        elif isinstance(source, Iterable):
            self._source = source
        else:
            raise TypeError(
                f"cannot read data from {type(data).__name__}: pass a pair of tensors (inputs, targets), a "
                "map-style dataset, or a re-iterable of (inputs, targets) batches."
            )
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
        batches = self._source if self._replaced is None or self.indexable else self._cached()
        for batch in batches:
            inputs, targets = _checked(batch)
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
        elif isinstance(self._source, _Pair):
            yield self._source.targets
        elif isinstance(self._source, _Examples) and hasattr(self._source.dataset, "targets"):
            yield torch.as_tensor(self._source.dataset.targets)
        else:
            yield from (targets for _, targets in self)

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
            groups.setdefault(_shape(inputs, target), []).append((inputs, target))
        return [
            self._move((_stack([i for i, _ in group]), torch.stack([t for _, t in group])))
            for group in groups.values()
        ]

    def with_targets(self, targets: Sequence[Tensor]) -> Batches:
        """Return the same inputs with other targets, one tensor an example in the order of iteration."""
        other = object.__new__(Batches)
        other.__dict__.update(self.__dict__)
        other._replaced = list(targets)
        return other

    def _move(self, batch: Batch) -> Batch:
        def move(tensor: Tensor) -> Tensor:
            return tensor.to(self.device, self.dtype if tensor.is_floating_point() else None)

        inputs, targets = batch
        if isinstance(inputs, Mapping):
            return {name: move(value) for name, value in inputs.items()}, move(targets)
        return move(inputs), move(targets)

    def _cached(self) -> list[Batch]:
        if self._cache is None:
            self._cache = [_checked(batch) for batch in self._source]
        return self._cache

    def _cached_example(self, index: int) -> Batch:
        position = index
        for inputs, targets in self._cached():
            if position < len(targets):
                target = targets[position] if self._replaced is None else self._replaced[index]
                return _take(inputs, position), target
            position -= len(targets)
        raise IndexError(f"example {index} of {self.num_examples}")


class _Pair:
    def __init__(self, inputs: Inputs, targets: Tensor, *, batch_size: int) -> None:
        lengths = {len(value) for value in inputs.values()} if isinstance(inputs, Mapping) else {len(inputs)}
        if lengths != {len(targets)}:
            raise ValueError(f"inputs have {sorted(lengths)} examples and targets {len(targets)}: they must agree")
        self.inputs, self.targets, self.batch_size = inputs, targets, batch_size

    def __len__(self) -> int:
        return len(self.targets)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self), self.batch_size):
            rows = slice(start, start + self.batch_size)
            yield _take(self.inputs, rows), self.targets[rows]

    def select(self, indices: Tensor) -> Batch:
        rows = indices.to(self.targets.device)
        return _take(self.inputs, rows), self.targets[rows]


class _Examples:
    def __init__(self, dataset: Any, *, batch_size: int) -> None:
        self.dataset, self.batch_size = dataset, batch_size

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self), self.batch_size):
            yield self.select(torch.arange(start, min(start + self.batch_size, len(self))))

    def select(self, indices: Tensor) -> Batch:
        return _checked(default_collate([self.dataset[int(index)] for index in indices]))


def num_examples(inputs: Inputs) -> int:
    """Return how many examples a batch holds."""
    return len(inputs) if isinstance(inputs, Tensor) else len(next(iter(inputs.values())))


def _is_pair(data: Any) -> bool:
    return (
        isinstance(data, tuple | list)
        and len(data) == 2
        and isinstance(data[0], Tensor | Mapping)
        and isinstance(data[1], Tensor)
    )


def _checked(batch: Any) -> Batch:
    if not (isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[1], Tensor)):
        raise TypeError(
            f"each batch must be a pair (inputs, targets) of tensors, got {type(batch).__name__}. For a "
            "Hugging Face model, inputs may be a mapping such as {'input_ids': ..., 'attention_mask': ...}."
        )
    return batch[0], batch[1]


def _take(inputs: Inputs, rows: Any) -> Inputs:
    if isinstance(inputs, Mapping):
        return {name: value[rows] for name, value in inputs.items()}
    return inputs[rows]


def _stack(inputs: Sequence[Inputs]) -> Inputs:
    first = inputs[0]
    if isinstance(first, Mapping):
        mappings = cast("Sequence[Mapping[str, Tensor]]", inputs)
        return {name: torch.stack([example[name] for example in mappings]) for name in first}
    return torch.stack(cast("list[Tensor]", list(inputs)))


def _shape(inputs: Inputs, target: Tensor) -> Any:
    values = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    return tuple(tuple(value.shape) for value in [*values, target])
