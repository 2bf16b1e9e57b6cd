"""From a table of numbers to standardised training and test sets."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from curvlab.lab.data.splits import DataSplits, Task, checksum, fixed_permutation, leading


def table_splits(
    name: str,
    features: np.ndarray,
    target: np.ndarray,
    *,
    num_train: int | None,
    num_test: int | None,
    test_fraction: float,
    task: Task,
    class_names: tuple[str, ...] | None,
) -> DataSplits:
    """Return the splits of a table without a standard split.

    Args:
        name: of the data set.
        features: (N, F).
        target: (N, 1); standardised too for "regression".
        num_train: leading training examples that are kept; None: all.
        num_test: likewise.
        test_fraction: of the examples, the last of `fixed_permutation`.
        task: "binary" or "regression".
        class_names: of "binary".
    """
    features, target = features.astype(np.float64), target.astype(np.float64)
    all_train, _ = split_indices(name, len(target), None, None, test_fraction)
    kept_train, kept_test = split_indices(name, len(target), num_train, num_test, test_fraction)
    mean, std = features[all_train].mean(0), features[all_train].std(0)
    inputs = _float32((features - mean) / std)
    scaled = target
    if task == "regression":
        scaled = (target - target[all_train].mean()) / target[all_train].std()
    targets = _float32(scaled)
    return DataSplits(
        name=name,
        train=TensorDataset(inputs[kept_train], targets[kept_train]),
        test=TensorDataset(inputs[kept_test], targets[kept_test]),
        input_shape=(features.shape[1],),
        num_outputs=1,
        task=task,
        class_names=class_names,
        checksum=checksum(features[kept_train], target[kept_train], features[kept_test], target[kept_test]),
        mean=tuple(mean.tolist()),
        std=tuple(std.tolist()),
    )


def split_indices(
    name: str, size: int, num_train: int | None, num_test: int | None, test_fraction: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of the training and of the test examples that are kept."""
    order = fixed_permutation(size)
    train, test = np.split(order, [round(size * (1 - test_fraction))])
    kept_train = leading(num_train, len(train), setting="num_train", name=name)
    kept_test = leading(num_test, len(test), setting="num_test", name=name)
    return train[:kept_train], test[:kept_test]


def _float32(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))
