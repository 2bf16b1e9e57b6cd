"""Images: loaders, folders of images, downloads, and the configs of all data."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import shutil
import socket
from functools import partial
from pathlib import Path

import hydra
import numpy as np
import pyarrow.parquet
import pytest
import torch
from omegaconf import DictConfig
from PIL import Image
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset
from torchvision.datasets import CIFAR10, MNIST

from curvlab.lab.data import (
    DamagedDataError,
    DataNotFoundError,
    DataSplits,
    cropped_and_flipped,
    load_cifar10,
    load_digits,
    load_fashion_mnist,
    load_image_folder,
    load_libsvm,
    load_mnist,
    load_penn_treebank,
    load_reconstruction,
    load_xsum,
)
from curvlab.lab.data.download import KNOWN, TIMEOUT_SECONDS, check_known, download, file_hash
from curvlab.lab.data.splits import checksum, fixed_permutation, leading
from curvlab.problem import stack
from tests.refusals import refuses


def test_pixels_labels_and_normalisation(mnist_root: Path) -> None:
    splits = load_mnist(mnist_root)
    inputs, targets = splits.train.tensors
    pixels = (np.arange(5 * 784) % 256).reshape(5, 1, 28, 28)
    np.testing.assert_allclose(inputs, (pixels / 255 - 0.1307) / 0.3081, atol=1e-6)
    assert targets.tolist() == [9, 8, 7, 6, 5]
    assert targets.dtype == torch.int64
    assert (len(splits.test), splits.input_shape, splits.num_outputs) == (3, (1, 28, 28), 10)
    np.testing.assert_allclose(splits.to_image(inputs[2]), pixels[2, 0] / 255, atol=1e-6)


def test_normalisation_is_a_setting_that_leaves_the_checksum(mnist_root: Path) -> None:
    plain = load_mnist(mnist_root, mean=[0], std=[1])
    assert plain.train.tensors[0].max() == 1.0
    assert plain.checksum == load_mnist(mnist_root).checksum
    assert load_mnist(mnist_root, num_train=2).checksum != plain.checksum
    refuses(r"1 channels, so mean and std need 1 numbers each", load_mnist, mnist_root, mean=[0.5, 0.5, 0.5])
    refuses("num_train=6, but data=mnist has 5 examples there: choose 1 to 5", load_mnist, mnist_root, num_train=6)


@pytest.mark.data
@pytest.mark.parametrize(
    ("load", "folder", "mean", "first", "name"),
    [
        (load_mnist, "MNIST/raw", 0.1307, [5, 0, 4, 1, 9, 2, 1, 3, 1, 4], "five"),
        (load_fashion_mnist, "FashionMNIST/raw", 0.2860, [9, 0, 0, 3, 0, 2, 7, 2, 5, 5], "Ankle boot"),
    ],
)
def test_real_sets(data_root, load, folder: str, mean: float, first: list[int], name: str) -> None:
    splits = load(data_root(folder), mean=[0], std=[1])
    inputs, targets = splits.train.tensors
    assert inputs.shape == (60000, 1, 28, 28)
    assert len(splits.test) == 10000
    assert inputs.mean().item() == pytest.approx(mean, abs=1e-4)
    assert targets[:10].tolist() == first
    assert len(splits.class_names) == 10
    assert splits.class_names[first[0]] == name


def test_reconstruction_targets_are_the_flat_grey_levels() -> None:
    splits, images = load_reconstruction("ignored", source="digits", num_train=7), load_digits(num_train=7)
    inputs, targets = splits.train.tensors
    assert torch.equal(inputs, images.train.tensors[0])
    assert torch.equal(targets, inputs.flatten(1))
    assert 0 <= float(targets.min()) <= float(targets.max()) <= 1
    assert (splits.num_outputs, splits.task, splits.name) == (64, "binary", "digits_reconstruction")
    assert splits.to_image(inputs[0]).shape == (8, 8)
    with pytest.raises(ValueError, match="unknown source 'cifar10' of images: choose mnist or digits"):
        load_reconstruction("nowhere", source="cifar10")


# ------------------------------------------------------------------------------------ random crops
def test_every_image_is_a_crop_of_the_padded_one_or_its_mirror_image() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(200, 3, 4, 5, generator=generator)
    found = cropped_and_flipped(images, padding=1, generator=generator)
    assert found.shape == images.shape
    padded = functional.pad(images, (1, 1, 1, 1))
    places = set()
    for image, source in zip(found, padded, strict=True):
        crops = {
            (row, column): source[:, row : row + 4, column : column + 5] for row in range(3) for column in range(3)
        }
        fitting = {(place, False) for place, crop in crops.items() if torch.equal(image, crop)}
        fitting |= {(place, True) for place, crop in crops.items() if torch.equal(image, crop.flip(2))}
        assert len(fitting) == 1
        places |= fitting
    assert len(places) == 18  # all nine places, as they are and mirrored

    first, second = (cropped_and_flipped(images, padding=2, generator=torch.Generator()) for _ in "12")
    assert torch.equal(first, second)
    text = r"only images \(B, C, H, W\) .* got shape \(200, 5\)"
    refuses(text, cropped_and_flipped, images[:, 0, 0], padding=1, generator=generator)


# ------------------------------------------------------------------------------------ splits
def image_splits(channels: int) -> DataSplits:
    data = TensorDataset(torch.zeros(1, channels, 2, 2), torch.zeros(1, dtype=torch.long))
    mean, std = (0.5, 0.25, 0.0)[:channels], (2.0, 4.0, 1.0)[:channels]
    return DataSplits("tiny", data, data, (channels, 2, 2), 2, "classification", None, "", mean, std)


def test_to_image_undoes_the_normalisation_by_channel() -> None:
    pixels = torch.tensor([0.1, 0.6, 0.9])[:, None, None].expand(3, 2, 2)
    three = image_splits(3)
    mean, std = (torch.tensor(own)[:, None, None] for own in (three.mean, three.std))
    image = three.to_image((pixels - mean) / std)
    assert image.shape == (2, 2, 3)
    np.testing.assert_allclose(image[0, 1], [0.1, 0.6, 0.9], atol=1e-6)
    grey = image_splits(1).to_image(torch.tensor([[[-0.2, 0.0], [0.2, 3.0]]]))
    np.testing.assert_allclose(grey, [[0.1, 0.5], [0.9, 1.0]], atol=1e-6)  # without a channel axis, clamped
    one, table = image_splits(1), dataclasses.replace(image_splits(1), input_shape=(30,))
    refuses(r"one input of shape \(1, 2, 2\), got \(4, 1, 2, 2\)", one.to_image, torch.zeros(4, 1, 2, 2))
    refuses("tiny holds no images", table.to_image, torch.zeros(30))


def test_leading_checksum_and_the_permutation_that_never_changes() -> None:
    of_seven = partial(leading, available=7, setting="num_test", name="tiny")
    assert of_seven(None) == of_seven(7) == 7
    for wanted in (0, -1, 8):
        refuses(rf"num_test={wanted}, but data=tiny has 7 examples there", of_seven, wanted)
    array = np.arange(6, dtype=np.uint8)
    by_hand = hashlib.sha256(b"|u1(6,)" + bytes(range(6))).hexdigest()
    assert checksum(array) == by_hand
    assert len({by_hand, checksum(array.reshape(2, 3)), checksum(array.view(np.int8)), checksum(array[::-1])}) == 4
    assert fixed_permutation(10).tolist() == [2, 8, 4, 9, 1, 6, 7, 3, 0, 5]


# ----------------------------------------------------------------------------------------
def write_images(folder: Path, counts: dict[str, int]) -> None:
    """Write images of one colour a class, (80 k, 0, 255) for the k-th class."""
    for k, (label, count) in enumerate(counts.items()):
        (folder / label).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (40 + i, 30), (80 * k, 0, 255)).save(folder / label / f"{label}{i}.png")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_images(tmp_path / "imagenet" / "train", {"a": 6, "b": 4})
    write_images(tmp_path / "imagenet" / "val", {"a": 2, "b": 1})
    return tmp_path


def test_two_folders(root: Path) -> None:
    splits = load_image_folder(root)
    assert (len(splits.train), len(splits.test)) == (10, 3)
    assert (splits.input_shape, splits.num_outputs, splits.class_names) == ((3, 224, 224), 2, ("a", "b"))
    inputs, targets = stack(splits.train, range(10))
    assert inputs.shape == (10, 3, 224, 224)
    assert inputs.dtype == torch.float32
    assert targets.tolist() == splits.train.targets.tolist()
    assert sorted(targets.tolist()) == [0] * 6 + [1] * 4
    for example, target in zip(inputs, targets, strict=True):
        colour = splits.to_image(example)[100, 100]
        np.testing.assert_allclose(colour, [80 * int(target) / 255, 0, 1], atol=1e-5)


def test_leading_images_are_not_all_of_one_class(root: Path) -> None:
    splits = load_image_folder(root, num_train=5, num_test=2)
    assert (len(splits.train), len(splits.test)) == (5, 2)
    assert set(splits.train.targets.tolist()) == {0, 1}
    assert splits.train.files == load_image_folder(root).train.files[:5]
    refuses("num_train=11, but data=imagenet has 10 examples", load_image_folder, root, num_train=11)


def test_one_folder_is_split_without_overlap_and_strided(root: Path) -> None:
    splits = load_image_folder(root, train_folder="imagenet/train", test_folder="imagenet/train", class_stride=10)
    assert (len(splits.train), len(splits.test)) == (7, 3)
    assert not set(splits.train.files) & set(splits.test.files)
    assert set(splits.train.targets.tolist()) | set(splits.test.targets.tolist()) == {0, 10}
    assert splits.num_outputs == 20


def test_missing_and_damaged_images_and_other_classes_are_named(root: Path) -> None:
    missing = partial(refuses, error=DataNotFoundError)
    text = r"data=imagenet is not there: looked for '.*nowhere'\. These images"
    missing(text, load_image_folder, root, train_folder="nowhere")
    (root / "empty").mkdir()
    text = r"looked for '.*empty'\. Couldn't find any class folder"
    missing(text, load_image_folder, root, train_folder="empty")
    before = load_image_folder(root).checksum  # of names and sizes
    assert load_image_folder(root).checksum == before
    file = root / "imagenet" / "val" / "b" / "b0.png"
    file.write_bytes(file.read_bytes()[:50])
    assert load_image_folder(root).checksum != before
    refuses(r"b0.png' is damaged", stack, load_image_folder(root).test, range(3), error=DamagedDataError)
    write_images(root / "imagenet" / "val", {"c": 1})
    refuses("both need the same sub-folders", load_image_folder, root)


@pytest.mark.data
def test_imagenet_sample_targets_are_imagenet_classes(data_root) -> None:
    folder = "imagenet-sample"
    splits = load_image_folder(
        data_root(folder), name="imagenet_sample", train_folder=folder, test_folder=folder, class_stride=10
    )
    targets = torch.cat([splits.train.targets, splits.test.targets])
    assert sorted(targets.tolist()) == list(range(0, 1000, 10))
    by_file = {file.parent.name: int(t) for file, t in zip(splits.train.files, splits.train.targets, strict=True)}
    wnids = sorted(path.name for path in (data_root(folder) / folder).iterdir())
    assert all(wnids[target // 10] == wnid for wnid, target in by_file.items())
    assert stack(splits.test, [0, 1])[0].shape == (2, 3, 224, 224)


class Squares(Dataset):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(index), float(index) ** 2]), index


def test_stack_reads_memory_and_lazy_sets_alike() -> None:
    inputs, indices = torch.tensor([[i, i**2] for i in range(5)], dtype=torch.float32), [3, 0, 3]
    for data in (Squares(), TensorDataset(inputs, torch.arange(5)), (inputs, torch.arange(5))):
        for chosen in (indices, torch.tensor(indices)):
            stacked, targets = stack(data, chosen)
            assert torch.equal(stacked, inputs[indices])
            assert targets.tolist() == indices
    refuses("holds 3 tensors, but two are needed", stack, TensorDataset(*[torch.zeros(2)] * 3), [0])


# ------- Files: missing ones are downloaded or named, damaged ones refused with what to do
REFUSED = "http://127.0.0.1:1/"  # nothing listens there: the connection is refused at once
HELP = r"Set the environment variable CURVLAB_DATA, or data.root .* data=digits, .* need no files and no download"
FILE = "MNIST/raw/t10k-labels-idx1-ubyte"


def test_mnist_and_cifar_name_file_reason_and_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MNIST, "mirrors", [REFUSED])
    monkeypatch.chdir(tmp_path)
    text = (
        r"^data=mnist is not there: looked for 'data/MNIST/raw/train-images-idx3-ubyte'\. "
        rf"The download failed: .*refused.* {HELP}"
    )
    with pytest.raises(DataNotFoundError, match=text) as caught:
        load_mnist("data")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__  # no stack trace of urllib
    assert isinstance(caught.value, FileNotFoundError)
    assert "\n" not in str(caught.value)
    (tmp_path / "file").touch()  # a root that cannot be written gives the same error
    with pytest.raises(DataNotFoundError, match=r"data=mnist is not there: looked for .* The download failed"):
        load_mnist(tmp_path / "file" / "root")
    monkeypatch.setattr(CIFAR10, "url", REFUSED)
    text = rf"cifar-10-batches-py/data_batch_1'\. The download failed: .*{HELP}"
    refuses(text, load_cifar10, tmp_path, error=DataNotFoundError)


def test_missing_files_are_downloaded_with_a_timeout_that_is_put_back(tmp_path: Path) -> None:
    seen: list[float | None] = []
    download("tiny", tmp_path / "new", lambda: seen.append(socket.getdefaulttimeout()), missing=tmp_path)
    assert seen == [TIMEOUT_SECONDS]
    assert socket.getdefaulttimeout() is None
    assert (tmp_path / "new").is_dir()


def test_nothing_is_downloaded_when_all_is_there(mnist_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: MNIST) -> None:
        raise RuntimeError("downloaded although the files are there")

    monkeypatch.setattr(MNIST, "download", fail)
    assert len(load_mnist(mnist_root).train) == 5
    (mnist_root / FILE).unlink()
    with pytest.raises(DataNotFoundError, match=r"looked for '.*t10k-labels-idx1-ubyte'.*although the files"):
        load_mnist(mnist_root)


def test_labels_of_cifar_that_are_no_numbers_are_damage(tmp_path: Path) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (32, 32)).save(picture, "PNG")
    (tmp_path / "cifar10" / "data").mkdir(parents=True)

    def write(part: str, labels: list[object]) -> None:
        images = [{"bytes": picture.getvalue(), "path": None}] * len(labels)
        path = tmp_path / "cifar10" / "data" / f"{part}-00000-of-00001.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"img": images, "label": labels}), path)

    for part, labels in (("train", [3, 1, 2]), ("test", [9])):
        write(part, labels)
    assert load_cifar10(tmp_path, num_train=2).train.tensors[1].tolist() == [3, 1]
    for labels in ([3, None, 2], ["cat", "dog"], [3, 10]):
        write("train", labels)
        refuses(r"train-00000-of-00001.parquet' is damaged", load_cifar10, tmp_path, error=DamagedDataError)


# ------------------------------------------------------------------------------------ published files
@pytest.mark.parametrize(
    ("load", "name"),
    [
        (load_mnist, FILE),
        (lambda root: load_libsvm(root, name="mushrooms"), "libsvm/mushrooms"),
        (load_penn_treebank, "ptb/ptb.train.txt"),
        (load_xsum, "xsum/test.jsonl"),
    ],
)
def test_a_published_file_of_another_size_is_refused(tmp_path: Path, load, name: str) -> None:
    for known in KNOWN:
        (tmp_path / known).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / known).write_bytes(b"12345")
    refused = r"\(5 bytes; as published it has [\d,]+\)\. Delete it, then run again to download it, or copy"
    with pytest.raises(DamagedDataError, match=refused) as caught:
        load(tmp_path)
    assert str(tmp_path / name.partition("/")[0]) in str(caught.value)


def test_a_published_file_is_hashed_once_and_again_when_it_changes(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "libsvm" / "mushrooms"
    path.parent.mkdir()
    path.write_bytes(b"as published")
    expected = file_hash(path, 0)
    monkeypatch.setitem(KNOWN, "libsvm/mushrooms", (12, expected))
    check_known(tmp_path, "libsvm/mushrooms", "libsvm/others")
    misses = file_hash.cache_info().misses
    check_known(tmp_path, "libsvm/mushrooms")
    assert file_hash.cache_info().misses == misses
    path.write_bytes(b"as publisHed")
    with pytest.raises(DamagedDataError, match=rf"mushrooms' is damaged \(its sha256 .*{expected[:12]}"):
        check_known(tmp_path, "libsvm/mushrooms")


@pytest.mark.data
def test_one_flipped_pixel_of_mnist_is_refused(data_root, tmp_path: Path) -> None:
    root = data_root("MNIST/raw")
    shutil.copytree(root / "MNIST", tmp_path / "MNIST")
    assert len(load_mnist(tmp_path, num_train=3).train) == 3
    file = tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    content = bytearray(file.read_bytes())
    content[20000] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedDataError, match=r"t10k-images-idx3-ubyte' is damaged \(its sha256 starts with"):
        load_mnist(tmp_path, num_train=3)


# ----------------------------------------------------------------------------------------
CONF = Path(__file__).parents[3] / "conf"


def data_config(name: str) -> DictConfig:
    """What Hydra makes of a file of conf/data."""
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose(overrides=[f"+data={name}"]).data


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "data").glob("*.yaml")))
def test_every_config_has_the_common_keys_and_a_loader(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = data_config(name)
    assert {"_target_", "root", "num_train", "num_test"} <= set(config)
    assert callable(hydra.utils.get_method(config["_target_"]))
    monkeypatch.delenv("CURVLAB_DATA", raising=False)
    assert config.root == "data"
    monkeypatch.setenv("CURVLAB_DATA", "elsewhere")
    assert config.root == "elsewhere"


FOLDERS = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "imagenet_sample": "imagenet-sample"}
STAGED = [pytest.param(name, marks=pytest.mark.data) for name in (*FOLDERS, "cifar10", "cifar100")]


@pytest.mark.parametrize("name", ["digits", "breast_cancer", "diabetes", *STAGED])
def test_sets_load_from_their_config(data_root, name: str) -> None:
    if name not in ("digits", "breast_cancer", "diabetes"):
        data_root(FOLDERS.get(name, name))
    splits = hydra.utils.instantiate(data_config(name), num_train=10, num_test=5)
    assert splits.name == name
    assert (len(splits.train), len(splits.test)) == (10, 5)
