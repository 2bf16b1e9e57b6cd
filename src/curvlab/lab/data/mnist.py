"""MNIST and FashionMNIST from torchvision's files, downloaded by torchvision when they are missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from curvlab.lab.data.download import download
from curvlab.lab.data.errors import damaged
from curvlab.lab.data.images import LabelledImages, image_splits
from curvlab.lab.data.splits import DataSplits, leading


def load_mnist(
    root: str | Path,
    *,
    num_train: int | None = None,
    num_test: int | None = None,
    mean: Sequence[float] = (0.1307,),
    std: Sequence[float] = (0.3081,),
) -> DataSplits:
    """Handwritten digits (LeCun et al. 1998), (1, 28, 28), 10 classes, 60000 and 10000 in stored order.

    Args:
        root: data root; the files are `root/MNIST/raw/*-ubyte`.
        num_train: keep the leading ones only.
        num_test: likewise.
        mean: of the grey levels in [0, 1], subtracted; (0,) with std (1,) for none.
        std: divided by.
    """
    return _load("mnist", "MNIST", Path(root), num_train=num_train, num_test=num_test, mean=mean, std=std)


def load_fashion_mnist(
    root: str | Path,
    *,
    num_train: int | None = None,
    num_test: int | None = None,
    mean: Sequence[float] = (0.2860,),
    std: Sequence[float] = (0.3530,),
) -> DataSplits:
    """Articles of clothing (Xiao et al. 2017), in all else like MNIST; files `root/FashionMNIST/raw/*`."""
    return _load(
        "fashion_mnist", "FashionMNIST", Path(root), num_train=num_train, num_test=num_test, mean=mean, std=std
    )


def _load(
    name: str,
    class_name: str,
    root: Path,
    *,
    num_train: int | None,
    num_test: int | None,
    mean: Sequence[float],
    std: Sequence[float],
) -> DataSplits:
    from torchvision import datasets  # not at the top: it brings in torch._dynamo, which takes seconds

    source: Any = getattr(datasets, class_name)
    folder = root / class_name / "raw"
    files = [folder / f"{part}-ubyte" for part in _PARTS]
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        download(name, root, lambda: source(str(root), download=True), missing=missing)
    train = _read(files[0], files[1], num_train, setting="num_train", name=name)
    test = _read(files[2], files[3], num_test, setting="num_test", name=name)
    names = tuple(str(label).removeprefix(f"{i} - ") for i, label in enumerate(source.classes))
    return image_splits(name, train, test, num_outputs=10, class_names=names, mean=mean, std=std)


_PARTS = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


def _read(images: Path, labels: Path, wanted: int | None, *, setting: str, name: str) -> LabelledImages:
    from torchvision.datasets.mnist import read_image_file, read_label_file

    pixels, classes = _read_idx(read_image_file, images), _read_idx(read_label_file, labels)
    if pixels.shape[1:] != (28, 28):
        raise damaged(images, f"images of shape {pixels.shape[1:]}, not (28, 28)")
    if len(classes) != len(pixels):
        raise damaged(labels, f"{len(classes)} labels for the {len(pixels)} images of {images.name}")
    if len(classes) == 0 or classes.min() < 0 or classes.max() > 9:
        raise damaged(labels, "labels outside 0..9, or none at all")
    count = leading(wanted, len(classes), setting=setting, name=name)
    return LabelledImages(pixels[:count, :, :, None], classes[:count].astype(np.int64))


def _read_idx(read: Any, path: Path) -> np.ndarray:
    try:
        return read(str(path)).numpy()
    # torchvision checks the header by assert; a cut file fails in one of many places.
    except (AssertionError, RuntimeError, ValueError, TypeError, KeyError, IndexError) as error:
        raise damaged(path, error) from error
