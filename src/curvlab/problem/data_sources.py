"""Where batches come from: tensors, data sets, loaders, streams; each the same at every pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from curvlab.problem.batch import Batch, is_pair, take
from curvlab.problem.hugging_face import OwnLabels
from curvlab.problem.repeatable import check_examples, check_stream, fetch, fixed_loader

# Turns what the data gives into a checked pair: `checked_batch`, or `OwnLabels` where a model is known.
Read: TypeAlias = Callable[[Any], Batch]


class Pair:
    """Tensors that hold all examples."""

    def __init__(self, pair: Batch, *, batch_size: int) -> None:
        self.inputs, self.targets = pair
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.targets)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self), self.batch_size):
            rows = slice(start, start + self.batch_size)
            yield take(self.inputs, rows), self.targets[rows]

    def select(self, indices: Tensor) -> Batch:
        """Return some examples as one batch."""
        rows = indices.to(self.targets.device)
        return take(self.inputs, rows), self.targets[rows]


class Examples:
    """A map-style data set, in batches of its own, or of a loader, whose collator then makes every batch."""

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        read: Read,
        loader: DataLoader[Any] | None = None,
        order: Sequence[int] | None = None,
    ) -> None:
        self.dataset, self.batch_size, self.loader, self._read = dataset, batch_size, loader, read
        self._order = range(len(dataset)) if order is None else order
        if loader is None and len(self) > 0:
            check_examples(self._collated, self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Batch]:
        if self.loader is not None:
            yield from map(self._read, self.loader)
            return
        for start in range(0, len(self), self.batch_size):
            yield self.select(torch.arange(start, min(start + self.batch_size, len(self))))

    def select(self, indices: Tensor) -> Batch:
        """Return some examples as one batch."""
        return self._read(self._collated([self._order[index] for index in indices.tolist()]))

    def _collated(self, indices: list[int]) -> Any:
        examples = fetch(self.dataset, indices)
        if self.loader is not None:
            return self.loader.collate_fn(examples)
        if isinstance(self._read, OwnLabels):
            examples = [self._read.columns(example) for example in examples]
        try:
            return default_collate(examples)
        except RuntimeError as error:
            if "equal size" not in str(error):
                raise
            raise ValueError(
                "examples of the data set differ in shape: pass a DataLoader with a collator that pads them, "
                "DataLoader(dataset, batch_size=..., collate_fn=DataCollatorWithPadding(tokenizer))."
            ) from error

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


class Stream:
    """Batches that are made anew at each pass."""

    def __init__(self, batches: Iterable[Any], read: Read) -> None:
        self._batches, self._read = batches, read

    def __iter__(self) -> Iterator[Batch]:
        return map(self._read, self._batches)


def source_of(data: Any, *, batch_size: int, read: Read) -> Pair | Examples | Iterable[Batch]:
    """Return batches that are the same at each pass; single examples can be read, except from streams."""
    what_to_pass = (
        "pass a pair of tensors (inputs, targets), a map-style dataset of such pairs, or a re-iterable of "
        "(inputs, targets) batches."
    )
    if isinstance(data, TensorDataset):
        if len(data.tensors) != 2:
            raise TypeError(f"the TensorDataset holds {len(data.tensors)} tensors: {what_to_pass}")
        data = data.tensors
    if isinstance(data, Mapping) and not any(isinstance(value, Tensor) for value in data.values()):
        raise TypeError(
            f"the data is a mapping of {sorted(map(str, data))} to no tensors: of several data sets choose one, "
            "e.g. data['train']."
        )
    if is_pair(data) or (isinstance(data, Mapping) and isinstance(read, OwnLabels)):
        return Pair(read(data), batch_size=batch_size)
    if isinstance(data, Iterator):
        raise TypeError(f"data is a one-shot iterator, a second pass over it would be empty: {what_to_pass}")
    if isinstance(data, list | tuple):
        return [read(batch) for batch in data]
    if isinstance(data, DataLoader):
        return _of_loader(data, read)
    if isinstance(data, Tensor | Mapping | str) or not (
        hasattr(data, "__getitem__") or isinstance(data, Iterable)
    ):
        raise TypeError(f"cannot read data from {type(data).__name__}: {what_to_pass}")
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset):
        return Examples(data, batch_size=batch_size, read=read)
    check_stream(data)
    return Stream(data, read)


def _of_loader(loader: DataLoader[Any], read: Read) -> Examples | Stream:
    fixed = fixed_loader(loader)
    if fixed.indices is None:
        return Stream(fixed.loader, read)
    return Examples(
        loader.dataset, batch_size=loader.batch_size or 1, read=read, loader=fixed.loader, order=fixed.indices
    )
