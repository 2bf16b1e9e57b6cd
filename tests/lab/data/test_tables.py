"""Tables of numbers, and CIFAR: loaders, their files, their messages."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import sklearn.datasets
import torch
from PIL import Image
from torchvision.datasets import CIFAR10

from curvlab.lab.data import (
    DamagedDataError,
    DataNotFoundError,
    DataSplits,
    load_breast_cancer,
    load_breast_cancer_one_hot,
    load_cifar10,
    load_cifar100,
    load_concrete,
    load_diabetes,
    load_diabetes_progression,
    load_digits,
    load_energy,
    load_libsvm,
    load_pima_diabetes,
    tables,
)
from curvlab.lab.data.splits import checksum
from curvlab.lab.models.unread import shapes
from tests.refusals import refuses

missing, is_damaged = partial(refuses, error=DataNotFoundError), partial(refuses, error=DamagedDataError)


def whole(splits: DataSplits) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all inputs and targets, the training part first."""
    return tuple(torch.cat(pair) for pair in zip(splits.train.tensors, splits.test.tensors, strict=True))


def test_digits_are_all_there_once_unchanged() -> None:
    splits = load_digits()
    images, labels = whole(splits)
    assert (images.shape, images.dtype, labels.dtype) == ((1797, 1, 8, 8), torch.float32, torch.int64)
    bunch = sklearn.datasets.load_digits()
    order = np.random.RandomState(0).permutation(1797)
    np.testing.assert_array_equal(images[:, 0], (bunch.images / 16)[order].astype(np.float32))
    np.testing.assert_array_equal(labels, bunch.target[order])
    assert len(splits.test) == 539


def test_breast_cancer_is_standardised_by_its_training_part() -> None:
    splits = load_breast_cancer()
    inputs, targets = splits.train.tensors
    assert (len(splits.train), len(splits.test)) == (398, 171)
    np.testing.assert_allclose(inputs.double().mean(0), np.zeros(30), atol=1e-6)
    np.testing.assert_allclose(inputs.double().std(0, correction=0), np.ones(30), atol=1e-6)
    assert splits.test.tensors[0].double().mean(0).abs().max() > 1e-3
    assert (targets.shape, targets.dtype) == ((398, 1), torch.float32)
    assert set(targets.flatten().tolist()) == {0.0, 1.0}
    assert (splits.task, splits.num_outputs, splits.class_names) == ("binary", 1, ("malignant", "benign"))
    features = whole(splits)[0].double().numpy() * np.array(splits.std) + np.array(splits.mean)
    expected = sklearn.datasets.load_breast_cancer().data
    np.testing.assert_allclose(np.sort(features, axis=0), np.sort(expected, axis=0), rtol=1e-4, atol=1e-5)


def test_diabetes_is_the_regression_set_with_standardised_targets_and_its_stand_in_balanced() -> None:
    splits = load_diabetes()
    inputs, targets = splits.train.tensors
    assert (inputs.shape, targets.shape) == ((309, 10), (309, 1))
    assert len(torch.unique(targets)) > 100
    assert abs(targets.double().mean().item()) < 1e-6
    assert targets.double().std(correction=0).item() == pytest.approx(1.0, abs=1e-6)
    assert (splits.task, splits.class_names) == ("regression", None)
    stand_in = load_diabetes_progression()
    assert (stand_in.task, stand_in.name) == ("binary", "diabetes_progression")
    assert 0.45 < float(stand_in.train.tensors[1].mean()) < 0.55


@pytest.mark.parametrize("load", [load_digits, load_breast_cancer, load_diabetes, load_breast_cancer_one_hot])
def test_leading_examples_do_not_depend_on_how_many(load) -> None:
    full, small = load("ignored"), load(num_train=20, num_test=10)
    assert (len(small.train), len(small.test)) == (20, 10)
    for kept, all_of_it in ((small.train, full.train), (small.test, full.test)):
        for ours, theirs in zip(kept.tensors, all_of_it.tensors, strict=True):
            assert torch.equal(ours, theirs[: len(ours)])
    assert small.checksum != full.checksum
    assert load().checksum == full.checksum
    refuses(f"num_train=5000, but data=.* has {len(full.train)} examples", load, num_train=5000)


def test_breast_cancer_is_cut_at_its_quartiles() -> None:
    splits = load_breast_cancer_one_hot()
    inputs = splits.train.tensors[0]
    assert inputs.shape == (398, 120)
    assert torch.equal(inputs.reshape(398, 30, 4).sum(2), torch.ones(398, 30))
    counts = inputs.reshape(398, 30, 4).sum(0)
    assert 95 <= counts.min() <= counts.max() <= 104  # ties only
    # Bins are ordered: the mean of the original column grows with the bin.
    data, target = sklearn.datasets.load_breast_cancer(return_X_y=True)
    order = np.random.RandomState(0).permutation(569)
    bins = whole(splits)[0].reshape(569, 30, 4).argmax(2).numpy()
    for column in range(30):
        values = data[order, column]
        tops = [values[bins[:, column] == k].max() for k in range(4)]
        bottoms = [values[bins[:, column] == k].min() for k in range(4)]
        assert all(top <= bottom for top, bottom in zip(tops, bottoms[1:], strict=False))
    assert np.array_equal(whole(splits)[1].flatten().numpy(), target[order])


# ------------------------------------------------------------------------------------ UCI
def write(root: Path, name: str, table: np.ndarray) -> None:
    (root / "uci").mkdir(exist_ok=True)
    np.savetxt(root / "uci" / f"{name}.csv", table, delimiter=",", header="columns", comments="", fmt="%.17g")


def test_last_column_is_the_target_and_both_are_standardised(tmp_path: Path, monkeypatch) -> None:
    table = np.random.default_rng(0).normal(3.0, 2.0, (50, 9))
    monkeypatch.setitem(tables.UCI, "concrete", (50, checksum(table)))
    write(tmp_path, "concrete", table)
    splits = load_concrete(tmp_path)
    inputs, targets = splits.train.tensors
    assert (len(splits.train), len(splits.test), splits.task) == (45, 5, "regression")
    np.testing.assert_allclose(inputs.double().mean(0), np.zeros(8), atol=1e-6)
    np.testing.assert_allclose(targets.double().std(0, correction=0), [1.0], atol=1e-6)
    features = inputs.double().numpy() * np.array(splits.std) + np.array(splits.mean)
    assert np.isclose(features[:, None], table[None, :, :8], atol=1e-5).all(2).any(1).all()
    write(tmp_path, "concrete", table[::-1])
    is_damaged(r"concrete.csv' is damaged \(its numbers, or their order, are not", load_concrete, tmp_path)


def test_missing_and_damaged_tables_are_named(tmp_path: Path) -> None:
    missing(r"data=energy is not there: looked for '.*energy.csv'", load_energy, tmp_path)
    write(tmp_path, "energy", np.zeros((5, 9)))
    is_damaged(r"768 rows of 9 numbers are needed, got shape \(5, 9\)", load_energy, tmp_path)
    (tmp_path / "uci" / "energy.csv").write_text("columns\n1,2,no number\n")
    is_damaged(r"energy.csv' is damaged", load_energy, tmp_path)


@pytest.mark.data
@pytest.mark.parametrize(
    ("load", "size"), [(load_concrete, (927, 103)), (load_energy, (691, 77)), (load_pima_diabetes, (691, 77))]
)
def test_the_real_tables_have_their_size(data_root, load, size: tuple[int, int]) -> None:
    splits = load(data_root("uci"))
    assert (len(splits.train), len(splits.test)) == size
    unread = "/nowhere" if load in (load_concrete, load_energy) else data_root("uci")
    data = {"_target_": f"curvlab.lab.data.{load.__name__}", "root": unread}
    assert shapes({"data": data}) == (tuple(splits.input_shape), splits.num_outputs)
    assert splits.task != "binary" or set(splits.train.tensors[1].flatten().tolist()) == {0.0, 1.0}


# ------------------------------------------------------------------------------------ LIBSVM
ROWS = "".join(f"{1 + i % 2} {1 + i % 3}:1 {4 + i % 2}:0.5\n" for i in range(10))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "libsvm").mkdir()
    (tmp_path / "libsvm" / "small").write_text(ROWS)
    return tmp_path


def test_rows_and_labels_are_those_of_the_file(root: Path) -> None:
    splits = load_libsvm(root, name="small")
    assert (len(splits.train), len(splits.test), splits.input_shape) == (7, 3, (5,))
    assert splits.class_names == ("1", "2")
    found = sorted((tuple(row.tolist()), float(target)) for row, target in zip(*whole(splits), strict=True))
    ones, halves = np.eye(3)[np.arange(10) % 3], 0.5 * np.eye(2)[np.arange(10) % 2]
    rows = map(tuple, np.hstack([ones, halves]).tolist())
    assert found == sorted((row, float(i % 2)) for i, row in enumerate(rows))


def test_a_missing_file_is_downloaded_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.urlopen", lambda url: io.BytesIO(ROWS.encode()))
    assert len(load_libsvm(tmp_path, name="small").train) == 7
    assert [path.name for path in (tmp_path / "libsvm").iterdir()] == ["small"]

    def refuse(url: str) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    missing(r"looked for '.*libsvm/mushrooms'.*no route to host", load_libsvm, tmp_path, name="mushrooms")


@pytest.mark.parametrize("content", ["1 1:1\n2 not a number\n", "", "1 1:1\n2 1:1\n3 1:1\n"])
def test_damaged_files_are_named(root: Path, content: str) -> None:
    (root / "libsvm" / "small").write_text(content)
    is_damaged(r"libsvm/small' is damaged", load_libsvm, root, name="small")


@pytest.mark.data
def test_mushrooms(data_root) -> None:
    inputs, targets = whole(load_libsvm(data_root("libsvm"), name="mushrooms"))
    assert inputs.shape == (8124, 112)
    assert torch.equal(inputs.sum(1), torch.full((8124,), 21.0))
    assert int(targets.sum()) == 4208


# ----------------------------------------------------------------------------------------
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
    refuses("num_train=6, but data=cifar10 has 5 examples there", load_cifar10, parquet_root, num_train=6)
    refuses("num_test=3, but data=cifar10 has 2 examples there", load_cifar10, parquet_root, num_test=3)
    (parquet_root / "cifar10" / "data" / "test-00000-of-00001.parquet").unlink()
    missing(r"looked for '.*test-00000-of-00001.parquet'", load_cifar10, parquet_root)


def test_damaged_shards_are_named(parquet_root: Path) -> None:
    shard = parquet_root / "cifar10" / "data" / "train-00001-of-00002.parquet"
    shard.write_bytes(shard.read_bytes()[:200])
    is_damaged(r"train-00001-of-00002.parquet' is damaged", load_cifar10, parquet_root)
    good = png(pixels(1, seed=2)[0])
    for bad in (good[: len(good) // 2], b"no image"):
        write_shard(shard, [good, bad], [3, 4])
        is_damaged(r"train-00001-of-00002.parquet' .*image in row 1", load_cifar10, parquet_root)
    for images, labels, text in (
        ([good, png(pixels(1, seed=2)[0][:16])], {"label": [3, 4]}, r"image in row 1 has shape \(16, 32, 3\)"),
        ([good], {"other": [3]}, r"train-00001-of-00002.parquet' is damaged"),
        ([good, good], {"label": [3, 10]}, r"labels outside 0..9"),
    ):
        ((column, own),) = labels.items()
        write_shard(shard, images, own, column)
        is_damaged(text, load_cifar10, parquet_root)


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
    refuses("num_train=5, but data=cifar10 has 4 examples there", load_cifar10, torchvision_root, num_train=5)

    file = torchvision_root / CIFAR10.base_folder / "data_batch_1"
    file.write_bytes(file.read_bytes() + b"x")
    is_damaged(r"data_batch_1' is damaged \(its md5 is not", load_cifar10, torchvision_root)
    (torchvision_root / CIFAR10.base_folder / "test_batch").unlink()  # incomplete, it gives way to parquet
    assert load_cifar10(torchvision_root).train.tensors[1].tolist() == [7, 1, 2, 3, 4]


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
