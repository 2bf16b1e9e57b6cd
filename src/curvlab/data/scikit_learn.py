"""Data that ships inside scikit-learn: no files, no download.

These sets have no standard split: the last 30 % of one fixed permutation (`fixed_permutation`) are the
test set, and `num_train`, `num_test` keep the leading examples of each part. Tables are standardised with
mean and standard deviation of the whole training part, so an example is the same for every `num_train`.
`root` is accepted, and ignored, so that every loader is called alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from curvlab.data.splits import DataSplits, Task, checksum, fixed_permutation, leading

TEST_FRACTION = 0.3


def load_digits(
    root: str | Path | None = None, *, num_train: int | None = None, num_test: int | None = None
) -> DataSplits:
    """Handwritten digits, 8 x 8 grey levels 0..16 divided by 16, 10 classes: 1258 for training, 539 for test.

    Inputs (1, 8, 8) in [0, 1].
    """
    from sklearn.datasets import load_digits as read

    bunch = read()
    images, labels = bunch.images[:, None], bunch.target
    kept_train, kept_test = _split("digits", len(labels), num_train, num_test)
    inputs = torch.from_numpy((images / 16.0).astype(np.float32))
    targets = torch.from_numpy(labels.astype(np.int64))
    return DataSplits(
        name="digits",
        train=TensorDataset(inputs[kept_train], targets[kept_train]),
        test=TensorDataset(inputs[kept_test], targets[kept_test]),
        input_shape=(1, 8, 8),
        num_outputs=10,
        task="classification",
        class_names=tuple(str(digit) for digit in range(10)),
        checksum=checksum(images[kept_train], labels[kept_train], images[kept_test], labels[kept_test]),
        mean=(0.0,),
        std=(1.0,),
    )


def load_breast_cancer(
    root: str | Path | None = None, *, num_train: int | None = None, num_test: int | None = None
) -> DataSplits:
    """Breast cancer Wisconsin (diagnostic), 30 features, 0 malignant / 1 benign: 398 and 171 examples.

    The "Cancer" of Bae et al. (2022). One logit, targets (1,) float32.
    """
    from sklearn.datasets import load_breast_cancer as read

    bunch = read()
    names = tuple(str(name) for name in bunch.target_names)
    return _table("breast_cancer", bunch, num_train, num_test, task="binary", class_names=names)


def load_diabetes(
    root: str | Path | None = None, *, num_train: int | None = None, num_test: int | None = None
) -> DataSplits:
    """Diabetes progression (Efron et al. 2004), regression, 10 features: 309 and 133 examples.

    Inputs and targets are standardised with the training part's statistics. This is not the Pima Indians
    table, a classification set that Bae et al. (2022) call "Diabetes".
    """
    from sklearn.datasets import load_diabetes as read

    return _table("diabetes", read(scaled=False), num_train, num_test, task="regression", class_names=None)


def _table(
    name: str,
    bunch: Any,
    num_train: int | None,
    num_test: int | None,
    *,
    task: Task,
    class_names: tuple[str, ...] | None,
) -> DataSplits:
    features, target = bunch.data.astype(np.float64), bunch.target.astype(np.float64)[:, None]
    all_train, _ = _split(name, len(target), None, None)
    kept_train, kept_test = _split(name, len(target), num_train, num_test)
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


def _split(name: str, size: int, num_train: int | None, num_test: int | None) -> tuple[np.ndarray, np.ndarray]:
    order = fixed_permutation(size)
    train, test = np.split(order, [round(size * (1 - TEST_FRACTION))])
    kept_train = leading(num_train, len(train), setting="num_train", name=name)
    kept_test = leading(num_test, len(test), setting="num_test", name=name)
    return train[:kept_train], test[:kept_test]


def _float32(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))
