"""Examples of a task that lie in files: stacked where they are few, else read by worker processes at each pass."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from curvlab.lab.data import DataSplits
from curvlab.lab.data.image_folder import ImageFiles
from curvlab.lab.runs.over_ranks import launched
from curvlab.problem import stack
from curvlab.problem.memory import share_of_free

SHARE = 0.1  # of the memory that may be used: what is stacked stays there beside vectors and activations
EXAMPLES_OF_A_WORKER = 64  # at a time; two such batches of each worker wait


def chosen_examples(splits: DataSplits, indices: Tensor, settings: DictConfig | None) -> Any:
    """Return the training examples `indices`: a data set, a pair of tensors, or a DataLoader in their order.

    Sets in memory are indexed. Of images in files, at most `memory_budget` bytes are stacked; what has more,
    and all of them where all are asked for, comes through a DataLoader.

    Args:
        splits: the data.
        indices: ascending.
        settings: `memory_budget` (null: a tenth of 80 % of what is free), `num_workers` (null: one for each core,
            8 at most), `batch_size` of the loader; None: as null.
    """
    everything = len(indices) == len(splits.train)  # type: ignore[arg-type]  # map-style
    few = not isinstance(splits.train, ImageFiles) or len(indices) * _bytes(splits) <= _budget(settings)
    if not everything and few:
        return stack(splits.train, indices)
    dataset = splits.train if everything else Subset(splits.train, indices.tolist())
    # Under torchrun each rank reads its own share: a loader cannot be cut into shares.
    return _loader(dataset, settings) if isinstance(splits.train, ImageFiles) and not launched() else dataset


def held_out_examples(splits: DataSplits, settings: DictConfig | None) -> Any:
    """Return the test set, through a DataLoader where it is read from files."""
    return _loader(splits.test, settings) if isinstance(splits.test, ImageFiles) else splits.test


def with_label_noise(splits: DataSplits, share: float, generator: torch.Generator) -> DataSplits:
    """Return the splits with a share of the training labels drawn anew, uniformly over the other classes.

    A network that has converged on them keeps a training loss of about the labels' entropy.
    """
    if not 0 <= share < 1:
        raise ValueError(f"label_noise is a share of the labels, from 0 to below 1, got {share}")
    inputs, targets = stack(splits.train, torch.arange(len(splits.train)))  # type: ignore[arg-type]  # map-style
    chosen = torch.randperm(len(targets), generator=generator)[: round(share * len(targets))]
    shifts = torch.randint(1, splits.num_outputs, (len(chosen),), generator=generator)
    noisy = targets.clone()
    noisy[chosen] = (noisy[chosen] + shifts) % splits.num_outputs
    return replace(splits, train=TensorDataset(inputs, noisy))


def _loader(dataset: Any, settings: DictConfig | None) -> DataLoader[Any]:
    own: Mapping[Any, Any] = {} if settings is None else settings
    workers = own.get("num_workers")
    workers = min(8, os.cpu_count() or 1) if workers is None else workers
    return DataLoader(dataset, batch_size=own.get("batch_size") or EXAMPLES_OF_A_WORKER, num_workers=workers)


def _bytes(splits: DataSplits) -> int:
    return math.prod(splits.input_shape) * torch.float32.itemsize


def _budget(settings: DictConfig | None) -> float:
    given = None if settings is None else settings.get("memory_budget")
    return SHARE * share_of_free(torch.device("cpu")) if given is None else float(given)
