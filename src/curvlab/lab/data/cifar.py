"""CIFAR-10 and CIFAR-100 from torchvision's files or from the parquet files of the Hugging Face hub."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image

from curvlab.lab.data.download import damaged, download, file_hash, not_found
from curvlab.lab.data.images import IMAGENET_MEAN, IMAGENET_STD, LabelledImages, image_splits
from curvlab.lab.data.splits import DataSplits, leading


def load_cifar10(
    root: str | Path,
    *,
    num_train: int | None = None,
    num_test: int | None = None,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> DataSplits:
    """CIFAR-10 (Krizhevsky 2009), (3, 32, 32), 10 classes, in stored order.

    Read from `root/cifar-10-batches-py` (torchvision) when that is complete, else from
    `root/cifar10/data/{train,test}-*.parquet`, which may hold a subset, else downloaded by torchvision.

    Args:
        root: data root.
        num_train: keep the leading ones only.
        num_test: likewise.
        mean: by channel, of values in [0, 1]; the default is ImageNet's, which the pretrained ResNet-20 of
            `curvlab.lab.models` was trained with.
        std: likewise.
    """
    source = _Source("cifar10", "CIFAR10", "label", 10)
    return _load(source, Path(root), num_train=num_train, num_test=num_test, mean=mean, std=std)


def load_cifar100(
    root: str | Path,
    *,
    num_train: int | None = None,
    num_test: int | None = None,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> DataSplits:
    """CIFAR-100 with its 100 fine labels; `root/cifar-100-python` or `root/cifar100/data`, like CIFAR-10."""
    source = _Source("cifar100", "CIFAR100", "fine_label", 100)
    return _load(source, Path(root), num_train=num_train, num_test=num_test, mean=mean, std=std)


@dataclass(frozen=True)
class _Source:
    name: str
    class_name: str
    label_column: str
    num_classes: int

    @property
    def torchvision_class(self) -> Any:
        """The class that knows the original files."""
        from torchvision import datasets  # not at the top: it brings in torch._dynamo, which takes seconds

        return getattr(datasets, self.class_name)


def _load(
    source: _Source,
    root: Path,
    *,
    num_train: int | None,
    num_test: int | None,
    mean: Sequence[float],
    std: Sequence[float],
) -> DataSplits:
    parquet = root / source.name / "data"
    if not _torchvision_files_complete(source, root) and any(parquet.glob("*.parquet")):
        read = _read_parquet
    else:
        read = _read_torchvision
    train, names = read(source, root, "train", num_train)
    test, _ = read(source, root, "test", num_test)
    return image_splits(
        source.name, train, test, num_outputs=source.num_classes, class_names=names, mean=mean, std=std
    )


# ---------------------------------------------------------------------------------- torchvision's files
def _torchvision_files(source: _Source, root: Path) -> dict[Path, str]:
    kind = source.torchvision_class
    md5 = dict([*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])])
    return {root / kind.base_folder / file: expected for file, expected in md5.items()}


def _torchvision_files_complete(source: _Source, root: Path) -> bool:
    return all(file.is_file() for file in _torchvision_files(source, root))


def _read_torchvision(
    source: _Source, root: Path, split: str, wanted: int | None
) -> tuple[LabelledImages, tuple[str, ...] | None]:
    kind, files = source.torchvision_class, _torchvision_files(source, root)
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        download(source.name, root, lambda: kind(str(root), download=True), missing=missing)
    for file, md5 in files.items():  # torchvision checks too, but does not say which file is damaged
        if file_hash(file, file.stat().st_mtime_ns, "md5") != md5:
            raise damaged(file, f"its md5 is not {md5}")
    dataset = kind(str(root), train=split == "train")
    count = leading(wanted, len(dataset), setting=f"num_{split}", name=source.name)
    labels = np.array(dataset.targets[:count], dtype=np.int64)
    return LabelledImages(dataset.data[:count], labels), tuple(dataset.classes)


# ----------------------------------------------------------------------------------------- parquet files
def _read_parquet(
    source: _Source, root: Path, split: str, wanted: int | None
) -> tuple[LabelledImages, tuple[str, ...] | None]:
    """Read columns `img` {bytes, path} and the label of all shards, sorted by name; decode what is kept."""
    folder = root / source.name / "data"
    shards = sorted(folder.glob(f"{split}-*.parquet"))
    if not shards:
        raise not_found(source.name, folder / f"{split}-00000-of-00001.parquet")
    tables = [_read_shard(shard, source.label_column) for shard in shards]
    total = sum(table.num_rows for table in tables)
    count = leading(wanted, total, setting=f"num_{split}", name=source.name)
    images: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    for shard, table in zip(shards, tables, strict=True):
        kept = table.slice(0, count - len(images))
        images.extend(_decode(shard, kept["img"].to_pylist()))
        labels.append(kept[source.label_column].to_numpy())
    classes = np.concatenate(labels).astype(np.int64)
    if classes.min() < 0 or classes.max() >= source.num_classes:
        raise damaged(shards[0], f"labels outside 0..{source.num_classes - 1}")
    return LabelledImages(np.stack(images), classes), _class_names(tables[0], source.label_column)


def _read_shard(shard: Path, label_column: str) -> Any:
    try:
        table = pyarrow.parquet.read_table(shard)
        return table.select(["img", label_column])
    except (pyarrow.ArrowException, OSError, KeyError) as error:
        raise damaged(shard, error) from error


def _decode(shard: Path, records: list[dict[str, Any]]) -> list[np.ndarray]:
    images = []
    for row, record in enumerate(records):
        try:
            image = np.array(Image.open(io.BytesIO(record["bytes"])).convert("RGB"))
        except (OSError, KeyError, TypeError, SyntaxError) as error:
            raise damaged(shard, f"image in row {row}: {error}") from error
        if image.shape != (32, 32, 3):
            raise damaged(shard, f"image in row {row} has shape {image.shape}, not (32, 32, 3)")
        images.append(image)
    return images


def _class_names(table: Any, label_column: str) -> tuple[str, ...] | None:
    """Return the names that the `datasets` library keeps in the schema, None without them."""
    metadata = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    names = metadata.get("info", {}).get("features", {}).get(label_column, {}).get("names")
    return tuple(names) if names else None
