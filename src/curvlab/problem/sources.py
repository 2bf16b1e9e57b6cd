"""Kinds of data: tensors, map-style data sets, loaders, streams; each as batches that come again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from numbers import Number
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from curvlab.problem.batch import Batch, collating, is_pair, take, tensors_in
from curvlab.problem.hugging_face import LABELS, PairFromMapping
from curvlab.problem.repeatable import EACH_PASS, check_examples, check_passes, unchanged_random_state

# Turns what the data gives into a checked pair: `checked_batch`, or `PairFromMapping` where a model is known.
Read: TypeAlias = Callable[[Any], Batch]

_WHAT_TO_PASS = (
    "pass a pair of tensors (inputs, targets), a map-style dataset of such pairs, or a re-iterable of "
    "(inputs, targets) batches."
)
_SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class Pair:
    """Tensors that hold all examples."""

    def __init__(self, pair: Batch, batch_size: int, *, is_moved: bool = False) -> None:
        self.inputs, self.targets = pair
        self.tensors = tensors_in(pair)
        self.batch_size, self.is_moved = batch_size, is_moved

    def __len__(self) -> int:
        return len(self.targets)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self), self.batch_size):
            rows = slice(start, start + self.batch_size)
            yield take(self.inputs, rows), self.targets[rows]

    def select(self, indices: Tensor) -> Batch:
        """Return some examples, repeats allowed."""
        rows = indices.to(self.targets.device)
        if isinstance(self.inputs, Tensor):  # a third of the time that indexing takes
            return self.inputs.index_select(0, rows), self.targets.index_select(0, rows)
        return take(self.inputs, rows), self.targets[rows]

    def known_targets(self) -> Tensor:
        """Return all targets."""
        return self.targets


class Examples:
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
        self.is_moved = False
        self._order = range(len(dataset)) if order is None else order

    def check(self) -> None:
        """Raise a ValueError where an example is another at each reading."""
        if self.loader is not None and self.loader.num_workers > 0:
            with collating():
                check_passes(self.loader)
        else:
            check_examples(lambda index: self._collated([index]), self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Batch]:
        if self.loader is not None:
            with collating():
                yield from map(self._read, self.loader)
            return
        for start in range(0, len(self), self.batch_size):
            yield self.select(torch.arange(start, min(start + self.batch_size, len(self))))

    def select(self, indices: Tensor) -> Batch:
        """Return some examples, repeats allowed."""
        return self._read(self._collated([self._order[index] for index in indices.tolist()]))

    def _collated(self, indices: list[int]) -> Any:
        together = getattr(self.dataset, "__getitems__", None)
        examples = together(indices) if callable(together) else [self.dataset[index] for index in indices]
        if self.loader is None and isinstance(self._read, PairFromMapping) and isinstance(examples[0], Mapping):
            examples = [self._read.columns(example) for example in examples]
        with collating():
            return (default_collate if self.loader is None else self.loader.collate_fn)(examples)

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
        check_passes(batches)

    def __iter__(self) -> Iterator[Batch]:
        return map(self._read, self._batches)


def source_of(data: Any, batch_size: int, read: Read) -> Pair | Examples | Stream | list[Batch]:
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
    if is_pair(data) or (isinstance(data, Mapping) and isinstance(read, PairFromMapping)):
        return Pair(read(data), batch_size)
    if isinstance(data, Iterator):
        raise TypeError(f"data is a one-shot iterator, a second pass over it would be empty: {_WHAT_TO_PASS}")
    if isinstance(data, list | tuple):
        return Examples(data, batch_size, read) if holds_examples(data) else [read(batch) for batch in data]
    if isinstance(data, DataLoader):
        return _of_loader(data, read)
    if isinstance(data, Tensor | Mapping | str) or not (
        hasattr(data, "__getitem__") or isinstance(data, Iterable)
    ):
        raise TypeError(f"cannot read data from {type(data).__name__}: {_WHAT_TO_PASS}")
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset):
        return Examples(data, batch_size, read)
    if isinstance(data, IterableDataset) and holds_examples([*islice(data, 1)]):
        return _of_loader(DataLoader(data, batch_size), read)
    return Stream(data, read)


def holds_examples(data: Sequence[Any]) -> bool:
    """Return whether a list is one of single examples, not of batches: its first target is a number, or ids a row.

    Or the first inputs and targets differ in length, as those of one batch cannot. Two vectors of the same length
    are refused where the inputs are no class indices: they may be either.
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
    if of_pair and len(inputs) == len(target) and inputs.is_floating_point():
        raise ValueError(
            f"inputs and targets of shape ({len(inputs)},) can be one example or a batch of {len(inputs)}: pass "
            "two tensors with one row for each example, (torch.stack(inputs), torch.stack(targets))"
        )
    return of_pair and len(inputs) != len(target)


def _of_loader(loader: DataLoader[Any], read: Read) -> Examples | Stream:
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
        return Stream(loader, read)
    return Examples(loader.dataset, loader.batch_size or 1, read, loader, order)
