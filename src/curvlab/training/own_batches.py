"""Training data that holds its labels inside mappings, or comes through a collator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from curvlab.problem import Batches, Data, ModelFunction, Pairs, stack
from curvlab.problem.batch import Batch, is_pair
from curvlab.problem.data import holds_examples
from curvlab.training.steps import eval_mode


class OwnBatches:
    """Examples as `Batches` reads them: mappings with `labels` inside, loaders for their collators.

    Any examples may stand in one batch, chosen by index: a collator pads each batch that training draws.

    Args:
        model: says what the labels belong to (`curvlab.problem.hugging_face.OwnLabels`).
        data: as of the curvature operators; the batches of a loader are not its own, only its collator is used.
    """

    def __init__(self, model: nn.Module, data: Data, name: str = "data") -> None:
        self._model = model
        with eval_mode(model):
            function = ModelFunction(model)
            self._batches = Batches.of(function, data, batch_size=1, name=name).in_fixed_order()
        self._size = self._batches.num_examples

    def __len__(self) -> int:
        return self._size

    def select(self, indices: Tensor) -> Batch:
        """Return the examples `indices` (repeats allowed) as one batch, on the model's device."""
        # What the labels belong to is decided by the model's own loss on the first batch, without dropout.
        with eval_mode(self._model):
            groups = self._batches.select(indices)
        if len(groups) > 1:
            raise ValueError(
                "examples differ in shape: pass a DataLoader whose collator pads them, "
                "DataLoader(dataset, batch_size=..., collate_fn=DataCollatorWithPadding(tokenizer))."
            )
        return groups[0]

    def depends_on(self) -> Mapping[str, Any]:
        """Return what a checkpoint belongs to: inputs and targets of all examples."""
        with eval_mode(self._model):
            return self._batches.depends_on()


TrainingData: TypeAlias = Pairs | Data


def readable(model: nn.Module, data: TrainingData, name: str = "data") -> Pairs | OwnBatches:
    """Return pairs as they are, whatever they hold, and all else as `OwnBatches`; `name` is for error messages."""
    if not isinstance(data, OwnBatches) and _needs_reading(data):
        return OwnBatches(model, data, name)
    num_examples(data, name)  # type: ignore[arg-type]
    return data  # type: ignore[return-value]


def select(data: Pairs | OwnBatches, indices: Tensor, like: Tensor) -> Batch:
    """Return the examples `indices` (repeats allowed) as a batch, on the device and in the dtype of `like`."""
    if isinstance(data, OwnBatches):
        return data.select(indices)
    inputs, targets = (
        tensor.to(like.device, like.dtype if tensor.is_floating_point() else None)
        for tensor in stack(data, indices)
    )
    return inputs, targets


def num_examples(data: Pairs | OwnBatches, name: str = "data") -> int:
    """Return the number of examples, or raise a ValueError when there are none."""
    if isinstance(data, tuple):
        inputs, targets = data
        if len(inputs) != len(targets):
            raise ValueError(f"there are {len(inputs)} inputs and {len(targets)} targets: they must agree")
        size = len(inputs)
    else:
        size = len(data)  # type: ignore[arg-type]
    if size == 0:
        raise ValueError(f"{name} is empty: at least one example is needed")
    return size


def _needs_reading(data: Any) -> bool:
    """Return whether data is anything but pairs of a tensor and a target, which any batch can be made of."""
    tensors = data.tensors if isinstance(data, TensorDataset) else data
    if is_pair(tensors):
        return isinstance(tensors[0], Mapping)
    examples = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if not examples or isinstance(data, TensorDataset | DataLoader | IterableDataset | Mapping | Tensor | str):
        return True
    if isinstance(data, list | tuple):
        return not holds_examples(data) or not isinstance(data[0], tuple | list) or isinstance(data[0][0], Mapping)
    if len(data) == 0:
        return False
    with torch.random.fork_rng(devices=[]):  # augmentation may draw: the training's own numbers stay as they are
        first = data[0]
    return isinstance(first, Mapping) or (is_pair(first) and isinstance(first[0], Mapping))
