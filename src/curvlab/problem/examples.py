"""Single examples of a data set, put together to a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

Pairs: TypeAlias = Dataset[Any] | tuple[Tensor, Tensor]


def stack(dataset: Pairs | DataLoader[Any], indices: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
    """Return the examples `indices` (repeats allowed) as (inputs, targets), (B, ...) each.

    In-memory sets (TensorDataset, pair of tensors) are indexed at once, others example by example; of a DataLoader
    the examples of its data set.
    """
    if isinstance(dataset, DataLoader):
        dataset = dataset.dataset
    chosen = torch.as_tensor(indices, dtype=torch.long)
    tensors = dataset.tensors if isinstance(dataset, TensorDataset) else dataset
    if isinstance(tensors, tuple):
        if len(tensors) != 2:
            raise ValueError(f"the data set holds {len(tensors)} tensors, but two are needed: inputs, targets")
        inputs, targets = tensors
        return inputs[chosen], targets[chosen]
    inputs, targets = default_collate([dataset[index] for index in chosen.tolist()])
    return inputs, targets
