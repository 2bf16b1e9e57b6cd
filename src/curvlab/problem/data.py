"""Tensors, data sets and loaders as one thing: batches that are the same at every pass, and single examples."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from curvlab.arguments import whole
from curvlab.described import fingerprint
from curvlab.problem.batch import (
    Batch,
    Inputs,
    checked_batch,
    different_shapes,
    shapes,
    stacked,
    take,
    tensors_in,
)
from curvlab.problem.hugging_face import PairFromMapping
from curvlab.problem.memory import free_memory
from curvlab.problem.model_function import ModelFunction, without_graph
from curvlab.problem.sources import Examples, Pair, source_of

# Mappings are batches that hold their labels, {"input_ids": ..., "labels": ...}.
Data: TypeAlias = (
    Dataset[Any]
    | DataLoader[Any]
    | tuple[Inputs, Tensor]
    | Mapping[str, Tensor]
    | Iterable[Batch | Mapping[str, Any]]
)
# Batches are held, and read once, if they take no more than this share of what is free.
_HELD_SHARE = 0.1
_READ_AT_ONCE = 2**24  # bytes


class Batches:
    """Re-iterable batches of (inputs, targets) on one device, with access to single examples.

    Every pass has the same examples in the same order; data that is another at each pass is refused, and so are
    tensors that are changed in place. What takes little memory is read and moved once, and held: a data set that
    changes later is not read again.

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
        model: says what the labels inside a mapping belong to (`PairFromMapping`).
        name: of this data in error messages.
        repeatable: single examples have to be the same at each reading; False: they are read as they come, for
            training, which may augment them.
    """

    def __init__(
        self,
        data: Data,
        *,
        batch_size: int,
        device: torch.device,
        dtype: torch.dtype,
        model: nn.Module | None = None,
        name: str = "data",
        repeatable: bool = True,
    ) -> None:
        self.name, self.device, self.dtype, self._repeatable = name, device, dtype, repeatable
        self.batch_size = batch_size = whole("batch_size", batch_size)
        self._drawn: Sequence[Tensor] | None = None  # in the place of the data's targets
        self._held: list[Batch] | None = None  # all batches, moved
        self._source = source_of(data, batch_size, checked_batch if model is None else PairFromMapping(model))
        if isinstance(self._source, Pair | Examples) and len(self._source) == 0:
            raise self._empty()
        if repeatable and isinstance(self._source, Examples):
            self._source.check()
        tensors = self._source.tensors if repeatable and isinstance(self._source, Pair) else []
        self._versions = [(tensor, id(tensor), tensor._version) for tensor in tensors if not tensor.is_inference()]

    @classmethod
    def of(
        cls,
        model: ModelFunction | nn.Module,
        data: Data,
        *,
        batch_size: int,
        name: str = "data",
        repeatable: bool = True,
    ) -> Self:
        """Return the data as the model takes it: on its device, in its dtype, with labels as it reads them."""
        if isinstance(data, cls):
            return data
        module = model.model if isinstance(model, ModelFunction) else model
        found = sorted(module.parameters(), key=lambda parameter: not parameter.requires_grad)
        like = next(iter(found), torch.zeros(()))  # trained ones first
        place: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
        return cls(data, batch_size=batch_size, **place, model=module, name=name, repeatable=repeatable)

    @property
    def num_examples(self) -> int:
        """N; reads and holds all batches when the data is an iterable of batches."""
        if isinstance(self._source, Pair | Examples):
            return len(self._source)
        return sum(len(targets) for _, targets in self._all())

    def _empty(self) -> ValueError:
        return ValueError(f"{self.name} is empty: at least one example is needed")

    @property
    def reads_single(self) -> bool:
        """Whether single examples can be read without holding all the data, as those of a stream cannot."""
        return isinstance(self._source, Pair | Examples | list)

    def __iter__(self) -> Iterator[Batch]:
        self._unchanged()
        batches = self._moved() if self._held is None else self._held
        return iter(batches) if self._drawn is None else self._with_drawn(batches)

    def _with_drawn(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        start = 0
        for inputs, targets in batches:
            stop = start + len(targets)
            yield inputs, self._targets_drawn(range(start, stop))
            start = stop

    def targets(self) -> Iterator[Tensor]:
        """Yield the targets batch by batch, without reading the inputs where the data allows it."""
        self._unchanged()
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
            number, size = int(outside[0]), self.num_examples
            raise IndexError(f"example {number} does not exist: {self.name} has {size}, numbered from 0")
        self._unchanged()
        if isinstance(self._source, Pair | Examples):
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

    def together(self, indices: Tensor) -> Batch:
        """Return the examples `indices` (repeats allowed) as one batch, or raise where they fit into none."""
        self._unchanged()
        if isinstance(self._source, Pair | Examples) and self._drawn is None:  # at every step of a training
            batch = self._source.select(indices)
            return batch if self._source.is_moved else self._move(batch)
        groups = self.select(indices)
        if len(groups) > 1:
            raise different_shapes()
        return groups[0]

    def in_turn(self, size: int) -> Iterator[Batch]:
        """Yield all examples in order, `size` at once; of tensors views, where `together` copies."""
        self._unchanged()
        if isinstance(self._source, Pair) and self._drawn is None:
            pieces = Pair((self._source.inputs, self._source.targets), size)
            yield from pieces if self._source.is_moved else map(self._move, pieces)
            return
        yield from map(self.together, torch.arange(self.num_examples).split(size))

    def in_fixed_order(self) -> Batches:
        """Return the same data, held in memory unless single examples can be read: a stream may be costly."""
        if not isinstance(self._source, Pair | Examples):
            self._all()
        return self

    def on_device(self, batch_size: int) -> Batches:
        """Return the same data; tensors are moved as a whole, so that batches of any examples cost little."""
        other = copy.copy(self)
        if isinstance(self._source, Pair):
            moved = self._move((self._source.inputs, self._source.targets))
            other._source, other._held = Pair(moved, batch_size, is_moved=True), None
            other.batch_size = batch_size
        return other

    def in_dtype(self, dtype: torch.dtype) -> Batches:
        """Return the same data cast to another dtype."""
        other = copy.copy(self)
        if dtype != self.dtype:
            other.dtype, other._held = dtype, None  # read again from the data, which may have more digits
        return other

    def depends_on(self) -> Mapping[str, Any]:
        """Return what tells the data from other data (see `described`). Cost: a pass."""
        # Examples that may be others at each reading are described with seeded random states.
        if not self._repeatable and isinstance(self._source, Examples):
            return {"examples": self._source.loader or self._source.dataset}
        batches: Iterable[Batch] = self
        if isinstance(self._source, Pair) and self._drawn is None:  # in few pieces: batches may be single examples
            num_bytes = sum(tensor.nbytes for tensor in self._source.tensors)
            batches = self.in_turn(max(1, _READ_AT_ONCE * self.num_examples // max(1, num_bytes)))
        found = fingerprint(tensor for batch in batches for tensor in tensors_in(batch))
        return {"examples": found, "batch_size": self.batch_size}

    def with_targets(self, targets: Sequence[Tensor]) -> Batches:
        """Return the same inputs with other targets, one for each example, in the order of a pass."""
        other = copy.copy(self)
        # A collator pads single examples to other lengths than in their batch: targets would not fit them.
        if isinstance(self._source, Examples) and self._source.loader is not None:
            other._source = other._held = list(self)
        other._drawn = list(targets)
        return other

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        known = {id(tensor): version for tensor, identity, version in self._versions if id(tensor) == identity}
        # A tensor that was copied too, by deepcopy or pickle, counts its changes anew.
        tensors = [tensor for tensor, *_ in self._versions if not tensor.is_inference()]
        self._versions = [(tensor, id(tensor), known.get(id(tensor), tensor._version)) for tensor in tensors]

    def _unchanged(self) -> None:
        """Raise a ValueError where a tensor was changed in place: counts and moved copies would be of the old."""
        for tensor, _, version in self._versions:
            if tensor._version != version:
                raise ValueError(
                    "the data was changed in place after it was opened: open it anew (Problem.of, the operator), "
                    "or pass a clone of what is to change"
                )

    def _moved(self) -> Iterator[Batch]:
        """Read the data and yield batches on the device; the first whole pass holds them if they are small."""
        held: list[Batch] | None = []
        num_read, size, may_hold = 0, 0, _HELD_SHARE * (free_memory(self.device) or 0)
        for batch in self._source:
            if len(batch[1]) == 0:
                continue
            moved = self._move(batch)
            num_read += len(batch[1])
            size += self._bytes_beside(moved, batch)
            if size > may_hold:
                held = None
            elif held is not None:
                held.append(moved)
            yield moved
        if num_read == 0:
            raise self._empty()
        self._held = held

    def _bytes_beside(self, moved: Batch, given: Batch) -> int:
        """Return how many bytes a moved batch takes that the data does not hold already."""
        has_given = isinstance(self._source, Pair | list)
        pairs = zip(tensors_in(moved), tensors_in(given), strict=True)
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
