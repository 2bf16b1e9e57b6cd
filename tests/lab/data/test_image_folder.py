from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from curvlab.lab.data import DamagedDataError, DataNotFoundError, load_image_folder
from curvlab.problem import stack


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
    with pytest.raises(ValueError, match="num_train=11, but data=imagenet has 10 examples"):
        load_image_folder(root, num_train=11)


def test_one_folder_is_split_without_overlap_and_strided(root: Path) -> None:
    splits = load_image_folder(root, train_folder="imagenet/train", test_folder="imagenet/train", class_stride=10)
    assert (len(splits.train), len(splits.test)) == (7, 3)
    assert not set(splits.train.files) & set(splits.test.files)
    assert set(splits.train.targets.tolist()) | set(splits.test.targets.tolist()) == {0, 10}
    assert splits.num_outputs == 20


def test_checksum_is_of_names_and_sizes(root: Path) -> None:
    before = load_image_folder(root).checksum
    assert load_image_folder(root).checksum == before
    file = root / "imagenet" / "val" / "b" / "b0.png"
    file.write_bytes(file.read_bytes() + b"x")
    assert load_image_folder(root).checksum != before


def test_missing_and_damaged_images_are_named(root: Path) -> None:
    with pytest.raises(
        DataNotFoundError, match=r"data=imagenet is not there: looked for '.*nowhere'\. These images"
    ):
        load_image_folder(root, train_folder="nowhere")
    (root / "empty").mkdir()
    with pytest.raises(DataNotFoundError, match=r"looked for '.*empty'\. Couldn't find any class folder"):
        load_image_folder(root, train_folder="empty")
    file = root / "imagenet" / "val" / "b" / "b0.png"
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(DamagedDataError, match=r"b0.png' is damaged"):
        stack(load_image_folder(root).test, range(3))


def test_folders_with_other_classes_are_refused(root: Path) -> None:
    write_images(root / "imagenet" / "val", {"c": 1})
    with pytest.raises(ValueError, match="both need the same sub-folders"):
        load_image_folder(root)


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
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(index), float(index) ** 2]), index


def test_stack_reads_memory_and_lazy_sets_alike() -> None:
    inputs = torch.tensor([[i, i**2] for i in range(5)], dtype=torch.float32)
    indices = [3, 0, 3]
    for data in (Squares(), TensorDataset(inputs, torch.arange(5)), (inputs, torch.arange(5))):
        for chosen in (indices, torch.tensor(indices)):
            stacked, targets = stack(data, chosen)
            assert torch.equal(stacked, inputs[indices])
            assert targets.tolist() == indices
    with pytest.raises(ValueError, match="holds 3 tensors, but two are needed"):
        stack(TensorDataset(*[torch.zeros(2)] * 3), [0])
