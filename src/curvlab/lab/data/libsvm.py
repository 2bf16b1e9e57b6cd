"""Sparse tables in LIBSVM's text format, and a set of the same kind that needs no file.

These are problems of logistic regression: one logit, targets (1,) 0 or 1, inputs as they are in the file. They
have no standard split; as for scikit-learn's sets, the last 30 % of one fixed permutation are the test set.
"""

from __future__ import annotations

import urllib.request
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from curvlab.files import write_atomically
from curvlab.lab.data.download import download
from curvlab.lab.data.errors import damaged
from curvlab.lab.data.scikit_learn import TEST_FRACTION
from curvlab.lab.data.splits import DataSplits, checksum, fixed_permutation, leading

URL = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary"


def load_libsvm(
    root: str | Path, *, name: str, num_train: int | None = None, num_test: int | None = None
) -> DataSplits:
    """Two classes from `root/libsvm/<name>`, downloaded from LIBSVM's page when it is missing.

    For example mushrooms (UCI): 8124 examples of 112 zeros and ones, edible 1 and poisonous 2.

    Args:
        root: data root.
        name: the file's name. Of its two labels the smaller becomes 0, the larger 1.
        num_train: keep the leading ones only.
        num_test: likewise.
    """
    path = Path(root) / "libsvm" / name
    if not path.is_file():
        download(name, Path(root), lambda: _fetch(name, path), missing=path)
    features, labels = _read(path)
    classes = np.unique(labels)
    if len(classes) != 2:
        raise damaged(path, f"{len(classes)} different labels, not 2")
    target = (labels == classes[1]).astype(np.float32)
    names = tuple(f"{label:g}" for label in classes)
    return _splits(name, features, target, num_train=num_train, num_test=num_test, class_names=names)


def load_breast_cancer_one_hot(
    root: str | Path | None = None, *, num_train: int | None = None, num_test: int | None = None
) -> DataSplits:
    """Breast cancer Wisconsin as 120 zeros and ones: each of its 30 columns cut at its quartiles, one-hot.

    A stand-in for mushrooms, of its size and kind, that ships inside scikit-learn. The quartiles are those of the
    training part. `root` is ignored.
    """
    from sklearn.datasets import load_breast_cancer as read

    bunch = read()
    train, _ = _parts(len(bunch.target))
    columns = []
    for column in bunch.data.T:
        quartiles = np.quantile(column[train], [0.25, 0.5, 0.75])
        columns.append(np.eye(4)[np.searchsorted(quartiles, column)])
    features = np.concatenate(columns, axis=1).astype(np.float32)
    names = tuple(str(name) for name in bunch.target_names)
    return _splits(
        "breast_cancer_one_hot",
        features,
        bunch.target.astype(np.float32),
        num_train=num_train,
        num_test=num_test,
        class_names=names,
    )


def _fetch(name: str, path: Path) -> None:
    if path.is_file():  # another process was faster
        return
    with urllib.request.urlopen(f"{URL}/{name}") as response:
        write_atomically(path, response.read())


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_svmlight_file

    try:
        features, labels = load_svmlight_file(str(path), dtype=np.float32)
    except (ValueError, IndexError, OverflowError) as error:
        raise damaged(path, error) from error
    if not len(labels):
        raise damaged(path, "no rows")
    return features.toarray(), labels


def _parts(size: int) -> tuple[np.ndarray, np.ndarray]:
    train, test = np.split(fixed_permutation(size), [round(size * (1 - TEST_FRACTION))])
    return train, test


def _splits(
    name: str,
    features: np.ndarray,
    target: np.ndarray,
    *,
    num_train: int | None,
    num_test: int | None,
    class_names: tuple[str, ...],
) -> DataSplits:
    train, test = _parts(len(target))
    train = train[: leading(num_train, len(train), setting="num_train", name=name)]
    test = test[: leading(num_test, len(test), setting="num_test", name=name)]
    sets = [
        TensorDataset(torch.from_numpy(features[part]), torch.from_numpy(target[part][:, None]))
        for part in (train, test)
    ]
    size = features.shape[1]
    return DataSplits(
        name=name,
        train=sets[0],
        test=sets[1],
        input_shape=(size,),
        num_outputs=1,
        task="binary",
        class_names=class_names,
        checksum=checksum(features[train], target[train], features[test], target[test]),
        mean=(0.0,) * size,
        std=(1.0,) * size,
    )
