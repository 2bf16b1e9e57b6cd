"""Images in memory: MNIST, FashionMNIST and CIFAR, reconstruction sets for autoencoders, random crops."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow.parquet
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional
from torch.utils.data import TensorDataset

from curvlab.lab.data.download import check_known, damaged, download, file_hash, not_found
from curvlab.lab.data.splits import Count, DataSplits, Root, checksum, leading
from curvlab.lab.data.tables import load_digits

Levels: TypeAlias = Sequence[float]  # a number for each channel
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class LabelledImages(NamedTuple):
    """Images (N, H, W, C) uint8 and their labels (N,) int64."""

    images: np.ndarray
    labels: np.ndarray


def image_splits(
    name: str,
    train: LabelledImages,
    test: LabelledImages,
    *,
    num_outputs: int,
    class_names: tuple[str, ...] | None,
    mean: Levels,
    std: Levels,
) -> DataSplits:
    """Return the splits with inputs (image / 255 - mean) / std, (C, H, W), mean and std by channel."""
    height, width, channels = train.images.shape[1:]
    means, stds = tuple(map(float, mean)), tuple(map(float, std))
    check_normalisation(means, stds, channels)
    return DataSplits(
        name=name,
        train=TensorDataset(_normalise(train.images, means, stds), torch.from_numpy(train.labels)),
        test=TensorDataset(_normalise(test.images, means, stds), torch.from_numpy(test.labels)),
        input_shape=(channels, height, width),
        num_outputs=num_outputs,
        task="classification",
        class_names=class_names,
        checksum=checksum(*train, *test),
        mean=means,
        std=stds,
    )


def check_normalisation(mean: Levels, std: Levels, channels: int) -> None:
    """Raise a ValueError unless there is one mean and one positive std for each channel."""
    if len(mean) != channels or len(std) != channels or min(std) <= 0:
        raise ValueError(
            f"the images have {channels} channels, so mean and std need {channels} numbers each, std "
            f"positive; got mean={list(mean)}, std={list(std)}"
        )


def _normalise(images: np.ndarray, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    inputs = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().float().div_(255.0)
    return inputs.sub_(torch.tensor(mean)[:, None, None]).div_(torch.tensor(std)[:, None, None])


# ---------------------------------------------------------------------------------- MNIST
_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_WEAR = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def load_mnist(
    root: Root,
    *,
    num_train: Count = None,
    num_test: Count = None,
    mean: Levels = (0.1307,),
    std: Levels = (0.3081,),
) -> DataSplits:
    """Handwritten digits (LeCun et al. 1998), (1, 28, 28), 10 classes, 60000 and 10000 in stored order.

    The files are `root/MNIST/raw/*-ubyte`, downloaded by torchvision when they are missing. Mean (0,) with std
    (1,) leaves the grey levels as they are.
    """
    train, test = _read_mnist("mnist", "MNIST", Path(root), num_train, num_test)
    return image_splits("mnist", train, test, num_outputs=10, class_names=_DIGITS, mean=mean, std=std)


def load_fashion_mnist(
    root: Root,
    *,
    num_train: Count = None,
    num_test: Count = None,
    mean: Levels = (0.2860,),
    std: Levels = (0.3530,),
) -> DataSplits:
    """Articles of clothing (Xiao et al. 2017), in all else like MNIST; files `root/FashionMNIST/raw/*`."""
    train, test = _read_mnist("fashion_mnist", "FashionMNIST", Path(root), num_train, num_test)
    return image_splits("fashion_mnist", train, test, num_outputs=10, class_names=_WEAR, mean=mean, std=std)


def _read_mnist(name: str, class_name: str, root: Path, num_train: Count, num_test: Count) -> list[LabelledImages]:
    """Return the leading training and test images; the files are checked, so that their headers need not be."""
    files = [f"{class_name}/raw/{part}-ubyte" for part in _PARTS]
    missing = next((root / file for file in files if not (root / file).is_file()), None)
    if missing is not None:
        from torchvision import datasets  # not at the top: it brings in torch._dynamo, which takes seconds

        source: Any = getattr(datasets, class_name)
        download(name, root, lambda: source(str(root), download=True), missing=missing)
    check_known(root, *files)
    images, labels, test_images, test_labels = [np.fromfile(root / file, dtype=np.uint8) for file in files]
    found = []
    for setting, wanted, pixels, classes in (
        ("num_train", num_train, images[16:], labels[8:]),
        ("num_test", num_test, test_images[16:], test_labels[8:]),
    ):
        count = leading(wanted, len(classes), setting=setting, name=name)
        found.append(LabelledImages(pixels.reshape(-1, 28, 28, 1)[:count], classes[:count].astype(np.int64)))
    return found


_PARTS = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


# ------------------------------------------------------------------------- variations of images
def load_reconstruction(
    root: Root, *, source: Literal["mnist", "digits"], num_train: Count = None, num_test: Count = None
) -> DataSplits:
    """Grey levels in [0, 1] as inputs and, flattened, as targets of one logit for each pixel.

    As in Martens & Grosse (2015), whose binary cross-entropy is summed over the pixels; nn.BCEWithLogitsLoss, the
    loss of "binary" sets, takes their mean. `source` names the images.
    """
    sizes = {"num_train": num_train, "num_test": num_test}
    if source not in ("mnist", "digits"):
        raise ValueError(f"unknown source '{source}' of images: choose mnist or digits")
    splits = (
        load_digits(root, **sizes) if source == "digits" else load_mnist(root, mean=(0.0,), std=(1.0,), **sizes)
    )
    images: list[Tensor] = [part.tensors[0] for part in (splits.train, splits.test)]  # type: ignore[attr-defined]
    train, test = (TensorDataset(inputs, inputs.flatten(1)) for inputs in images)
    return replace(
        splits,
        name=f"{source}_reconstruction",
        train=train,
        test=test,
        num_outputs=images[0][0].numel(),
        task="binary",
        class_names=None,
    )


def cropped_and_flipped(images: Tensor, *, padding: int, generator: torch.Generator) -> Tensor:
    """Return each image padded with zeros, cut to its size at a random place, and mirrored every second time.

    The augmentation of He et al. (2016) for CIFAR, with padding 4 for 32 x 32 pixels. Zeros are the mean colour of
    normalised images.

    Args:
        images: (B, C, H, W).
        padding: pixels on each side, at least 0.
        generator: on the CPU; 3 B numbers are drawn.

    Cost: one pass over the images.
    """
    if images.ndim != 4:
        raise ValueError(f"only images (B, C, H, W) can be cropped and flipped, got shape {tuple(images.shape)}")
    count, _, height, width = images.shape
    padded = functional.pad(images, (padding,) * 4)
    shifts = torch.randint(2 * padding + 1, (2, count, 1), generator=generator)
    mirrored = torch.randint(2, (count, 1), generator=generator).bool()
    rows = shifts[0] + torch.arange(height)
    columns = torch.arange(width).expand(count, width)
    columns = shifts[1] + torch.where(mirrored, columns.flip(1), columns)
    example = torch.arange(count)[:, None, None]
    places = (example, rows[:, :, None], columns[:, None, :])
    return padded.permute(0, 2, 3, 1)[tuple(place.to(images.device) for place in places)].permute(0, 3, 1, 2)


# ------------------------------------------------------------------------------------ CIFAR
# CIFAR-10 and CIFAR-100 from torchvision's files or from the parquet files of the Hugging Face hub.
def load_cifar10(
    root: Root,
    *,
    num_train: Count = None,
    num_test: Count = None,
    mean: Levels = IMAGENET_MEAN,
    std: Levels = IMAGENET_STD,
) -> DataSplits:
    """CIFAR-10 (Krizhevsky 2009), (3, 32, 32), 10 classes, in stored order.

    Read from `root/cifar-10-batches-py` (torchvision) when that is complete, else from
    `root/cifar10/data/{train,test}-*.parquet`, which may hold a subset, else downloaded by torchvision. Mean and
    std are ImageNet's unless given, which the pretrained ResNet-20 of `curvlab.lab.models` was trained with.
    """
    sizes = {"train": num_train, "test": num_test}
    return _load_cifar("CIFAR10", Path(root), sizes, label="label", num_classes=10, mean=mean, std=std)


def load_cifar100(
    root: Root,
    *,
    num_train: Count = None,
    num_test: Count = None,
    mean: Levels = IMAGENET_MEAN,
    std: Levels = IMAGENET_STD,
) -> DataSplits:
    """CIFAR-100 with its 100 fine labels; `root/cifar-100-python` or `root/cifar100/data`, like CIFAR-10."""
    sizes = {"train": num_train, "test": num_test}
    return _load_cifar("CIFAR100", Path(root), sizes, label="fine_label", num_classes=100, mean=mean, std=std)


def _load_cifar(
    kind: str,
    root: Path,
    sizes: Mapping[str, Count],
    *,
    label: str,
    num_classes: int,
    mean: Levels,
    std: Levels,
) -> DataSplits:
    """Read torchvision's files where all are there or no parquet file is, else the parquet files."""
    from torchvision import datasets  # not at the top: it brings in torch._dynamo, which takes seconds

    source: Any = getattr(datasets, kind)
    name = kind.lower()
    listed = [*source.train_list, *source.test_list, (source.meta["filename"], source.meta["md5"])]
    files = {root / source.base_folder / file: md5 for file, md5 in listed}
    missing = next((file for file in files if not file.is_file()), None)
    folder = root / name / "data"
    if missing is not None and any(folder.glob("*.parquet")):
        (train, names), (test, _) = (
            _read_parquet(folder, part, wanted, name=name, label=label, num_classes=num_classes)
            for part, wanted in sizes.items()
        )
    else:
        if missing is not None:
            download(name, root, lambda: source(str(root), download=True), missing=missing)
        for file, md5 in files.items():  # torchvision checks too, but does not say which file is damaged
            if file_hash(file, file.stat().st_mtime_ns, "md5") != md5:
                raise damaged(file, f"its md5 is not {md5}")
        parts = []
        for part, wanted in sizes.items():
            read = source(str(root), train=part == "train")
            count = leading(wanted, len(read), setting=f"num_{part}", name=name)
            parts.append(LabelledImages(read.data[:count], np.array(read.targets[:count], dtype=np.int64)))
        (train, test), names = parts, tuple(read.classes)
    return image_splits(name, train, test, num_outputs=num_classes, class_names=names, mean=mean, std=std)


def _read_parquet(
    folder: Path, part: str, wanted: Count, *, name: str, label: str, num_classes: int
) -> tuple[LabelledImages, tuple[str, ...] | None]:
    """Read columns `img` {bytes, path} and the label of all shards, sorted by name, and decode what is kept.

    Names of classes are those that the `datasets` library keeps in the schema; None without them.
    """
    shards = sorted(folder.glob(f"{part}-*.parquet"))
    if not shards:
        raise not_found(name, folder / f"{part}-00000-of-00001.parquet")
    records: list[tuple[Path, int, dict[str, Any]]] = []
    labels: list[int] = []
    for shard in shards:
        try:
            table = pyarrow.parquet.read_table(shard)
            records += [(shard, row, record) for row, record in enumerate(table["img"].to_pylist())]
            labels += map(int, table[label].to_pylist())
        except (pyarrow.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            raise damaged(shard, error) from error
    count = leading(wanted, len(labels), setting=f"num_{part}", name=name)
    classes = np.array(labels[:count], dtype=np.int64)
    images = np.stack([_decode(*record) for record in records[:count]])
    if classes.min() < 0 or classes.max() >= num_classes:
        raise damaged(shards[0], f"labels outside 0..{num_classes - 1}")
    about = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    names = about.get("info", {}).get("features", {}).get(label, {}).get("names")
    return LabelledImages(images, classes), tuple(names) if names else None


def _decode(shard: Path, row: int, record: Mapping[str, Any]) -> np.ndarray:
    try:
        image = np.array(Image.open(io.BytesIO(record["bytes"])).convert("RGB"))
    except (OSError, KeyError, TypeError, SyntaxError) as error:
        raise damaged(shard, f"image in row {row}: {error}") from error
    if image.shape != (32, 32, 3):
        raise damaged(shard, f"image in row {row} has shape {image.shape}, not (32, 32, 3)")
    return image
