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
from torch.utils.data import TensorDataset

from curvlab.lab.data.splits import DataSplits, Task, checksum
from curvlab.lab.data.tables import split_indices, table_splits

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
    kept_train, kept_test = split_indices("digits", len(labels), num_train, num_test, TEST_FRACTION)
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


def load_diabetes_progression(
    root: str | Path | None = None, *, num_train: int | None = None, num_test: int | None = None
) -> DataSplits:
    """The same examples as a classification: progression above its median or not, 10 features.

    A stand-in, that ships inside scikit-learn, for the Pima table.
    """
    from sklearn.datasets import load_diabetes as read

    bunch = read(scaled=False)
    bunch.target = (bunch.target > np.median(bunch.target)).astype(np.float64)
    return _table(
        "diabetes_progression", bunch, num_train, num_test, task="binary", class_names=("lower", "higher")
    )


def _table(
    name: str,
    bunch: Any,
    num_train: int | None,
    num_test: int | None,
    *,
    task: Task,
    class_names: tuple[str, ...] | None,
) -> DataSplits:
    return table_splits(
        name,
        bunch.data,
        bunch.target[:, None],
        num_train=num_train,
        num_test=num_test,
        test_fraction=TEST_FRACTION,
        task=task,
        class_names=class_names,
    )
