"""Folders of image files, one sub-folder a class (ImageNet's layout), read when they are asked for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from curvlab.lab.data.download import damaged, not_found
from curvlab.lab.data.images import IMAGENET_MEAN, IMAGENET_STD, Levels, check_normalisation
from curvlab.lab.data.splits import Count, DataSplits, Root, fixed_permutation, leading

TEST_FRACTION = 0.3


class ImageFiles(Dataset[tuple[Tensor, Tensor]]):
    """Lazy (input, target) pairs: shorter side resized to 256, centre 224 x 224 cut out, normalised.

    Attributes:
        files: one path an example.
        targets: (N,) int64.
    """

    def __init__(self, files: Sequence[Path], targets: Tensor, *, mean: Levels, std: Levels) -> None:
        from torchvision import transforms  # not at the top: it brings in torch._dynamo, which takes seconds

        self.files = tuple(files)
        self.targets = targets
        self._transform = transforms.Compose(
            [
                transforms.Resize(256),
                transforms.CenterCrop(224),
                transforms.ToTensor(),
                transforms.Normalize(list(mean), list(std)),
            ]
        )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        file = self.files[index]
        try:
            with Image.open(file) as image:
                pixels = image.convert("RGB")
        except (OSError, SyntaxError) as error:
            raise damaged(file, error) from error
        return self._transform(pixels), self.targets[index]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return several, by threads: decoders run side by side. A worker process of a loader reads one by one."""
        if get_worker_info() is not None or len(indices) < 2:
            return [self[index] for index in indices]
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            return list(threads.map(self.__getitem__, indices))


def load_image_folder(
    root: Root,
    *,
    name: str = "imagenet",
    train_folder: str = "imagenet/train",
    test_folder: str = "imagenet/val",
    class_stride: int = 1,
    num_train: Count = None,
    num_test: Count = None,
    mean: Levels = IMAGENET_MEAN,
    std: Levels = IMAGENET_STD,
) -> DataSplits:
    """Images below `root/train_folder/<class>/` and `root/test_folder/<class>/`, (3, 224, 224).

    Files are sorted by class, so the leading ones would be one class: `num_train` and `num_test` keep
    the leading ones of one fixed permutation. When both folders are the same, the last 30 % of that
    permutation are the test set.

    Args:
        root: data root.
        name: name of the set in errors and results.
        train_folder: relative to the root.
        test_folder: likewise; must hold the same classes.
        class_stride: class index of the i-th folder is `class_stride * i`: 10 for a sample of every tenth
            ImageNet class, so that targets fit a network for all 1000.
        num_train: how many to keep.
        num_test: likewise.
        mean: by channel, of values in [0, 1].
        std: likewise.
    """
    check_normalisation(mean, std, 3)
    train_samples, classes = _list(name, Path(root) / train_folder)
    if test_folder == train_folder:
        cut = round(len(train_samples) * (1 - TEST_FRACTION))
        train_samples, test_samples = train_samples[:cut], train_samples[cut:]
    else:
        test_samples, test_classes = _list(name, Path(root) / test_folder)
        if test_classes != classes:
            raise ValueError(
                f"'{Path(root) / train_folder}' has {len(classes)} classes and '{Path(root) / test_folder}' "
                f"{len(test_classes)}, or others: both need the same sub-folders, or indices would not agree"
            )
    train_samples = train_samples[: leading(num_train, len(train_samples), setting="num_train", name=name)]
    test_samples = test_samples[: leading(num_test, len(test_samples), setting="num_test", name=name)]

    def dataset(samples: list[tuple[Path, int]]) -> ImageFiles:
        targets = torch.tensor([class_stride * label for _, label in samples])
        return ImageFiles([file for file, _ in samples], targets, mean=mean, std=std)

    return DataSplits(
        name=name,
        train=dataset(train_samples),
        test=dataset(test_samples),
        input_shape=(3, 224, 224),
        num_outputs=class_stride * len(classes),
        task="classification",
        class_names=tuple(classes) if class_stride == 1 else None,
        checksum=_checksum(train_samples, test_samples),
        mean=tuple(map(float, mean)),
        std=tuple(map(float, std)),
    )


def _list(name: str, folder: Path) -> tuple[list[tuple[Path, int]], list[str]]:
    """Return (file, class) pairs in the fixed permuted order, and the classes."""
    from torchvision.datasets import ImageFolder

    if not folder.is_dir():
        raise not_found(name, folder, reason="These images are not downloaded automatically")
    try:
        listing: Any = ImageFolder(str(folder))
    except FileNotFoundError as error:  # no class folders, or a class folder without images
        raise not_found(name, folder, reason=str(error)) from None
    samples = [(Path(file), label) for file, label in listing.samples]
    return [samples[index] for index in fixed_permutation(len(samples))], listing.classes


def _checksum(*parts: list[tuple[Path, int]]) -> str:
    digest = hashlib.sha256()
    for samples in parts:
        for file, label in samples:
            digest.update(f"{file.parent.name}/{file.name} {file.stat().st_size} {label}\n".encode())
        digest.update(b"\n")
    return digest.hexdigest()
