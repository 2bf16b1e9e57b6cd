"""Images in memory: MNIST, the sets of autoencoders, random crops, and how an input becomes an image again."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

from curvlab.lab.data import (
    DataSplits,
    cropped_and_flipped,
    load_digits,
    load_fashion_mnist,
    load_mnist,
    load_reconstruction,
)
from curvlab.lab.data.splits import checksum, fixed_permutation, leading


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
    with pytest.raises(ValueError, match=r"1 channels, so mean and std need 1 numbers each"):
        load_mnist(mnist_root, mean=[0.5, 0.5, 0.5])
    with pytest.raises(ValueError, match="num_train=6, but data=mnist has 5 examples there: choose 1 to 5"):
        load_mnist(mnist_root, num_train=6)


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


def test_the_same_generator_gives_the_same_images() -> None:
    images = torch.rand(8, 1, 6, 6)
    first, second = (
        cropped_and_flipped(images, padding=2, generator=torch.Generator().manual_seed(3)) for _ in "12"
    )
    assert torch.equal(first, second)
    with pytest.raises(ValueError, match=r"only images \(B, C, H, W\) .* got shape \(8, 6\)"):
        cropped_and_flipped(images[:, 0, 0], padding=1, generator=torch.Generator())


# ------------------------------------------------------------------------------------ splits
def image_splits(channels: int) -> DataSplits:
    data = TensorDataset(torch.zeros(1, channels, 2, 2), torch.zeros(1, dtype=torch.long))
    mean, std = (0.5, 0.25, 0.0)[:channels], (2.0, 4.0, 1.0)[:channels]
    return DataSplits("tiny", data, data, (channels, 2, 2), 2, "classification", None, "", mean, std)


def test_to_image_undoes_the_normalisation_by_channel() -> None:
    pixels = torch.tensor([0.1, 0.6, 0.9])[:, None, None].expand(3, 2, 2)
    mean, std = torch.tensor([0.5, 0.25, 0.0]), torch.tensor([2.0, 4.0, 1.0])
    image = image_splits(3).to_image((pixels - mean[:, None, None]) / std[:, None, None])
    assert image.shape == (2, 2, 3)
    np.testing.assert_allclose(image[0, 1], [0.1, 0.6, 0.9], atol=1e-6)
    grey = image_splits(1).to_image(torch.tensor([[[-0.2, 0.0], [0.2, 3.0]]]))
    np.testing.assert_allclose(grey, [[0.1, 0.5], [0.9, 1.0]], atol=1e-6)  # without a channel axis, clamped
    with pytest.raises(ValueError, match=r"one input of shape \(1, 2, 2\), got \(4, 1, 2, 2\)"):
        image_splits(1).to_image(torch.zeros(4, 1, 2, 2))
    with pytest.raises(ValueError, match="tiny holds no images"):
        dataclasses.replace(image_splits(1), input_shape=(30,)).to_image(torch.zeros(30))


def test_leading_checksum_and_the_permutation_that_never_changes() -> None:
    assert leading(None, 7, setting="num_train", name="tiny") == 7
    assert leading(7, 7, setting="num_train", name="tiny") == 7
    for wanted in (0, -1, 8):
        with pytest.raises(ValueError, match=rf"num_test={wanted}, but data=tiny has 7 examples there"):
            leading(wanted, 7, setting="num_test", name="tiny")
    array = np.arange(6, dtype=np.uint8)
    by_hand = hashlib.sha256(b"|u1(6,)" + bytes(range(6))).hexdigest()
    assert checksum(array) == by_hand
    assert len({by_hand, checksum(array.reshape(2, 3)), checksum(array.view(np.int8)), checksum(array[::-1])}) == 4
    assert fixed_permutation(10).tolist() == [2, 8, 4, 9, 1, 6, 7, 3, 0, 5]
