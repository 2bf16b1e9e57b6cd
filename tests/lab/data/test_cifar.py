from __future__ import annotations

import hashlib
import io
import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10

from curvlab.lab.data import DamagedDataError, DataNotFoundError, load_cifar10, load_cifar100

NAMES = [f"class{i}" for i in range(10)]


def pixels(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="png")
    return buffer.getvalue()


def write_shard(path: Path, encoded: list[bytes], labels: list[int], label_column: str = "label") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [{"bytes": b, "path": f"{i}.png"} for i, b in enumerate(encoded)]
    features = {label_column: {"names": NAMES, "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pyarrow.table({"img": records, label_column: labels}).replace_schema_metadata(metadata)
    pyarrow.parquet.write_table(table, path)


@pytest.fixture
def parquet_root(tmp_path: Path) -> Path:
    """CIFAR-10 as parquet: 3 + 2 training images in two shards, 2 test images."""
    folder = tmp_path / "cifar10" / "data"
    images = pixels(5, seed=0)
    write_shard(folder / "train-00000-of-00002.parquet", [png(i) for i in images[:3]], [7, 1, 2])
    write_shard(folder / "train-00001-of-00002.parquet", [png(i) for i in images[3:]], [3, 4])
    write_shard(folder / "test-00000-of-00001.parquet", [png(i) for i in pixels(2, seed=1)], [9, 0])
    return tmp_path


def test_parquet_shards_in_order_with_imagenet_normalisation(parquet_root: Path) -> None:
    splits = load_cifar10(parquet_root)
    inputs, targets = splits.train.tensors
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = ((pixels(5, seed=0) / 255 - mean) / std).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(inputs, expected, atol=1e-5)
    assert targets.tolist() == [7, 1, 2, 3, 4]
    assert splits.test.tensors[1].tolist() == [9, 0]
    assert splits.class_names == tuple(NAMES)
    np.testing.assert_allclose(splits.to_image(inputs[4]), pixels(5, seed=0)[4] / 255, atol=1e-6)


def test_leading_examples_across_shards(parquet_root: Path) -> None:
    for count in (1, 3, 4):
        assert load_cifar10(parquet_root, num_train=count).train.tensors[1].tolist() == [7, 1, 2, 3, 4][:count]
    with pytest.raises(ValueError, match="num_train=6, but data=cifar10 has 5 examples there"):
        load_cifar10(parquet_root, num_train=6)
    with pytest.raises(ValueError, match="num_test=3, but data=cifar10 has 2 examples there"):
        load_cifar10(parquet_root, num_test=3)


def test_damaged_shards_are_named(parquet_root: Path) -> None:
    shard = parquet_root / "cifar10" / "data" / "train-00001-of-00002.parquet"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DamagedDataError, match=r"train-00001-of-00002.parquet' is damaged"):
        load_cifar10(parquet_root)
    good = png(pixels(1, seed=2)[0])
    for bad in (good[: len(good) // 2], b"no image"):
        write_shard(shard, [good, bad], [3, 4])
        with pytest.raises(DamagedDataError, match=r"train-00001-of-00002.parquet' .*image in row 1"):
            load_cifar10(parquet_root)
    write_shard(shard, [good, png(pixels(1, seed=2)[0][:16])], [3, 4])
    with pytest.raises(DamagedDataError, match=r"image in row 1 has shape \(16, 32, 3\)"):
        load_cifar10(parquet_root)
    write_shard(shard, [good], [3], label_column="other")
    with pytest.raises(DamagedDataError, match=r"train-00001-of-00002.parquet' is damaged"):
        load_cifar10(parquet_root)
    write_shard(shard, [good, good], [3, 10])
    with pytest.raises(DamagedDataError, match=r"labels outside 0..9"):
        load_cifar10(parquet_root)


def test_a_missing_split_is_named(parquet_root: Path) -> None:
    (parquet_root / "cifar10" / "data" / "test-00000-of-00001.parquet").unlink()
    with pytest.raises(DataNotFoundError, match=r"looked for '.*test-00000-of-00001.parquet'"):
        load_cifar10(parquet_root)


@pytest.fixture
def torchvision_root(parquet_root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same root with torchvision's pickles beside the parquet files: 4 + 3 images."""
    folder = parquet_root / CIFAR10.base_folder
    folder.mkdir()

    def write(name: str, content: object) -> str:
        (folder / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    def batch(images: np.ndarray, labels: list[int]) -> dict[str, object]:
        return {"data": images.transpose(0, 3, 1, 2).reshape(len(images), -1), "labels": labels}

    train = write("data_batch_1", batch(pixels(4, seed=5), [0, 1, 2, 3]))
    test = write("test_batch", batch(pixels(3, seed=6), [4, 5, 6]))
    meta = write("batches.meta", {"label_names": NAMES[::-1]})
    monkeypatch.setattr(CIFAR10, "train_list", [["data_batch_1", train]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", test]])
    monkeypatch.setattr(CIFAR10, "meta", {"filename": "batches.meta", "key": "label_names", "md5": meta})
    return parquet_root


def test_torchvision_files_come_first(torchvision_root: Path) -> None:
    splits = load_cifar10(torchvision_root, num_test=2, mean=[0, 0, 0], std=[1, 1, 1])
    inputs, targets = splits.train.tensors
    np.testing.assert_allclose(inputs, pixels(4, seed=5).transpose(0, 3, 1, 2) / 255, atol=1e-6)
    assert targets.tolist() == [0, 1, 2, 3]
    assert splits.test.tensors[1].tolist() == [4, 5]
    assert splits.class_names == tuple(NAMES[::-1])
    with pytest.raises(ValueError, match="num_train=5, but data=cifar10 has 4 examples there"):
        load_cifar10(torchvision_root, num_train=5)


def test_an_incomplete_torchvision_folder_gives_way_to_parquet(torchvision_root: Path) -> None:
    (torchvision_root / CIFAR10.base_folder / "test_batch").unlink()
    assert load_cifar10(torchvision_root).train.tensors[1].tolist() == [7, 1, 2, 3, 4]


def test_a_damaged_torchvision_file_is_named(torchvision_root: Path) -> None:
    file = torchvision_root / CIFAR10.base_folder / "data_batch_1"
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(DamagedDataError, match=r"data_batch_1' is damaged \(its md5 is not"):
        load_cifar10(torchvision_root)


@pytest.mark.data
def test_real_cifar10(data_root) -> None:
    splits = load_cifar10(data_root("cifar10/data"), num_train=100, mean=[0] * 3, std=[1] * 3)
    inputs, targets = splits.train.tensors
    assert inputs.shape == (100, 3, 32, 32)
    assert [splits.class_names[i] for i in targets[:5]] == ["frog", "truck", "truck", "deer", "automobile"]
    assert [splits.class_names[i] for i in splits.test.tensors[1][:4]] == ["cat", "ship", "ship", "airplane"]
    mean = splits.test.tensors[0].mean((0, 2, 3))  # of the whole test set: .4942 .4851 .4504
    torch.testing.assert_close(mean, torch.tensor([0.4942, 0.4851, 0.4504]), atol=0.02, rtol=0)


@pytest.mark.data
def test_real_cifar100_has_fine_labels(data_root) -> None:
    splits = load_cifar100(data_root("cifar100/data"), num_train=50, num_test=1000)
    assert [splits.class_names[i] for i in splits.train.tensors[1][:3]] == ["cattle", "dinosaur", "apple"]
    assert splits.num_outputs == 100
    assert len(splits.test.tensors[1].unique()) == 100
