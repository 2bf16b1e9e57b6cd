"""Tables: those inside scikit-learn, UCI's as CSV files, LIBSVM's sparse text.

None has a standard split: the last 30 % (UCI: 10 %, as is usual in papers on regression) of one fixed permutation
are the test set. Inputs, and the targets of a regression, are standardised with mean and standard deviation of the
whole training part, so an example is the same for every `num_train`; zeros and ones stay as they are.
"""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from curvlab.files import write_atomically
from curvlab.lab.data.download import check_known, damaged, download, not_found
from curvlab.lab.data.splits import Count, DataSplits, Root, Task, checksum, fixed_permutation, leading

LIBSVM_URL = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary"
# Rows of UCI's tables, and `checksum` of their numbers, (N, 9) float64: the formats of files differ.
UCI = {
    "concrete": (1030, "6f013ecb84eb081208a93cec25fa1dadb383595273201a1c44031c061476e268"),
    "energy": (768, "07d14238dddcb44f2476e284e3355fd41399962923cf632bc92300f88a486ec7"),
    "pima_diabetes": (768, "200257034d5512ae2b547458cfa46047ea60045cd82718a9a334ef2cbce99785"),
}


def _table(
    name: str,
    features: np.ndarray,
    target: np.ndarray,
    num_train: Count,
    num_test: Count,
    *,
    task: Task = "binary",
    class_names: tuple[str, ...] | None = None,
    test_fraction: float = 0.3,
    standardised: bool = True,
) -> DataSplits:
    """Return the splits of features (N, F) and a target (N,) or (N, 1)."""
    whole, _ = _parts(name, len(target), None, None, test_fraction)
    train, test = _parts(name, len(target), num_train, num_test, test_fraction)
    size = features.shape[1]
    mean, std = (
        (features[whole].mean(0), features[whole].std(0)) if standardised else (np.zeros(size), np.ones(size))
    )
    scaled = (target - target[whole].mean()) / target[whole].std() if task == "regression" else target
    inputs, targets = _float32((features - mean) / std), _float32(scaled.reshape(-1, 1))
    return DataSplits(
        name=name,
        train=TensorDataset(inputs[train], targets[train]),
        test=TensorDataset(inputs[test], targets[test]),
        input_shape=(size,),
        num_outputs=1,
        task=task,
        class_names=class_names,
        checksum=checksum(features[train], target[train], features[test], target[test]),
        mean=tuple(mean.tolist()),
        std=tuple(std.tolist()),
    )


def _parts(
    name: str, size: int, num_train: Count, num_test: Count, test_fraction: float = 0.3
) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of the training and of the test examples that are kept."""
    train, test = np.split(fixed_permutation(size), [round(size * (1 - test_fraction))])
    kept_train = leading(num_train, len(train), setting="num_train", name=name)
    return train[:kept_train], test[: leading(num_test, len(test), setting="num_test", name=name)]


def _float32(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


# ---------------------------------------------------------------------------------- scikit-learn
def load_digits(root: Root | None = None, *, num_train: Count = None, num_test: Count = None) -> DataSplits:
    """Handwritten digits, 8 x 8 grey levels 0..16 divided by 16, 10 classes: 1258 for training, 539 for test.

    Inputs (1, 8, 8) in [0, 1].
    """
    from sklearn.datasets import load_digits as read

    bunch = read()
    images, labels = bunch.images[:, None], bunch.target
    train, test = _parts("digits", len(labels), num_train, num_test)
    inputs, targets = _float32(images / 16.0), torch.from_numpy(labels.astype(np.int64))
    return DataSplits(
        name="digits",
        train=TensorDataset(inputs[train], targets[train]),
        test=TensorDataset(inputs[test], targets[test]),
        input_shape=(1, 8, 8),
        num_outputs=10,
        task="classification",
        class_names=tuple(str(digit) for digit in range(10)),
        checksum=checksum(images[train], labels[train], images[test], labels[test]),
        mean=(0.0,),
        std=(1.0,),
    )


def load_breast_cancer(root: Root | None = None, *, num_train: Count = None, num_test: Count = None) -> DataSplits:
    """Breast cancer Wisconsin (diagnostic), 30 features, 0 malignant / 1 benign: 398 and 171 examples.

    The "Cancer" of Bae et al. (2022). One logit, targets (1,) float32.
    """
    from sklearn.datasets import load_breast_cancer as read

    bunch = read()
    target = bunch.target[:, None].astype(np.float64)
    return _table("breast_cancer", bunch.data, target, num_train, num_test, class_names=_names(bunch))


def load_breast_cancer_one_hot(
    root: Root | None = None, *, num_train: Count = None, num_test: Count = None
) -> DataSplits:
    """Breast cancer Wisconsin as 120 zeros and ones: each of its 30 columns cut at its quartiles, one-hot.

    A stand-in for mushrooms, of its size and kind. The quartiles are those of the training part.
    """
    from sklearn.datasets import load_breast_cancer as read

    bunch = read()
    name, target = "breast_cancer_one_hot", bunch.target.astype(np.float32)
    whole, _ = _parts(name, len(target), None, None)
    quartiles = np.quantile(bunch.data[whole], [0.25, 0.5, 0.75], axis=0).T
    bins = [np.searchsorted(cuts, column) for cuts, column in zip(quartiles, bunch.data.T, strict=True)]
    features = np.concatenate([np.eye(4)[places] for places in bins], axis=1).astype(np.float32)
    return _table(name, features, target, num_train, num_test, class_names=_names(bunch), standardised=False)


def load_diabetes(root: Root | None = None, *, num_train: Count = None, num_test: Count = None) -> DataSplits:
    """Diabetes progression (Efron et al. 2004), regression, 10 features: 309 and 133 examples.

    This is not the Pima Indians table, a classification set that Bae et al. (2022) call "Diabetes".
    """
    from sklearn.datasets import load_diabetes as read

    bunch = read(scaled=False)
    return _table("diabetes", bunch.data, bunch.target[:, None], num_train, num_test, task="regression")


def load_diabetes_progression(
    root: Root | None = None, *, num_train: Count = None, num_test: Count = None
) -> DataSplits:
    """The same examples as a classification: progression above its median or not.

    A stand-in for the Pima table.
    """
    from sklearn.datasets import load_diabetes as read

    bunch = read(scaled=False)
    target = (bunch.target > np.median(bunch.target)).astype(np.float64)[:, None]
    names = ("lower", "higher")
    return _table("diabetes_progression", bunch.data, target, num_train, num_test, class_names=names)


def _names(bunch: Any) -> tuple[str, ...]:
    return tuple(str(name) for name in bunch.target_names)


# ---------------------------------------------------------------------------------- UCI
def load_concrete(root: Root, *, num_train: Count = None, num_test: Count = None) -> DataSplits:
    """Concrete compressive strength (Yeh 1998), 8 features, regression: 927 and 103 examples."""
    return _load_uci("concrete", root, num_train, num_test, "regression")


def load_energy(root: Root, *, num_train: Count = None, num_test: Count = None) -> DataSplits:
    """Energy efficiency (Tsanas & Xifara 2012), 8 features, heating load, regression: 691 and 77 examples."""
    return _load_uci("energy", root, num_train, num_test, "regression")


def load_pima_diabetes(root: Root, *, num_train: Count = None, num_test: Count = None) -> DataSplits:
    """Pima Indians diabetes, 8 features, two classes: 691 and 77 examples; the "Diabetes" of Bae et al. (2022).

    Targets (1,) float32, 0 or 1. Zeros that stand for missing measurements are left as they are.
    """
    return _load_uci("pima_diabetes", root, num_train, num_test, "binary")


def _load_uci(name: str, root: Root, num_train: Count, num_test: Count, task: Task) -> DataSplits:
    """Read a comma-separated file with a header, whose last column is the target."""
    path = Path(root) / "uci" / f"{name}.csv"
    if not path.is_file():
        raise not_found(name, path, reason="It is not downloaded: export the UCI table with the target last")
    try:
        table = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)
    except (ValueError, UnicodeDecodeError) as error:
        raise damaged(path, error) from error
    num_rows, numbers = UCI[name]
    if table.shape != (num_rows, 9):
        raise damaged(path, f"{num_rows} rows of 9 numbers are needed, got shape {table.shape}")
    if checksum(table) != numbers:
        raise damaged(path, "its numbers, or their order, are not those of UCI's table")
    names = ("negative", "positive") if task == "binary" else None
    features, target = table[:, :-1], table[:, -1:]
    return _table(name, features, target, num_train, num_test, task=task, class_names=names, test_fraction=0.1)


# ---------------------------------------------------------------------------------- LIBSVM
def load_libsvm(root: Root, *, name: str, num_train: Count = None, num_test: Count = None) -> DataSplits:
    """Two classes from `root/libsvm/<name>`, downloaded from LIBSVM's page when it is missing.

    For example mushrooms (UCI): 8124 examples of 112 zeros and ones, edible 1 and poisonous 2. One logit, targets
    (1,) 0 or 1, inputs as they are in the file. Of the two labels in the file `name` the smaller becomes 0.
    """
    from sklearn.datasets import load_svmlight_file

    path = Path(root) / "libsvm" / name
    if not path.is_file():
        download(name, Path(root), lambda: _fetch(name, path), missing=path)
    check_known(Path(root), f"libsvm/{name}")
    try:
        sparse, labels = load_svmlight_file(str(path), dtype=np.float32)
    except (ValueError, IndexError, OverflowError) as error:
        raise damaged(path, error) from error
    classes = np.unique(labels)
    if len(classes) != 2:
        raise damaged(path, f"{len(classes)} different labels, not 2")
    target = (labels == classes[1]).astype(np.float32)
    names = tuple(f"{label:g}" for label in classes)
    return _table(name, sparse.toarray(), target, num_train, num_test, class_names=names, standardised=False)


def _fetch(name: str, path: Path) -> None:
    if path.is_file():  # another process was faster
        return
    with urllib.request.urlopen(f"{LIBSVM_URL}/{name}") as response:
        write_atomically(path, response.read())
