from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from curvlab.lab.data import DamagedDataError, load_fashion_mnist, load_mnist


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
    with pytest.raises(ValueError, match=r"1 channels, so mean and std need 1 numbers each"):
        load_mnist(mnist_root, mean=[0.5, 0.5, 0.5])


def test_leading_examples(mnist_root: Path) -> None:
    splits = load_mnist(mnist_root, num_train=2, num_test=1)
    assert splits.train.tensors[1].tolist() == [9, 8]
    assert splits.checksum != load_mnist(mnist_root).checksum
    with pytest.raises(ValueError, match="num_train=6, but data=mnist has 5 examples there: choose 1 to 5"):
        load_mnist(mnist_root, num_train=6)


@pytest.mark.parametrize("file", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
@pytest.mark.parametrize("kept_bytes", [0, 3, 9, -1])
def test_a_cut_file_is_named(mnist_root: Path, file: str, kept_bytes: int) -> None:
    path = mnist_root / "MNIST" / "raw" / file
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(DamagedDataError, match=rf"{file}' is damaged .*Delete it"):
        load_mnist(mnist_root)


def test_labels_that_do_not_belong_to_the_images_are_named(mnist_root: Path) -> None:
    raw = mnist_root / "MNIST" / "raw"
    labels = (raw / "t10k-labels-idx1-ubyte").read_bytes()
    (raw / "train-labels-idx1-ubyte").write_bytes(labels)
    with pytest.raises(DamagedDataError, match="3 labels for the 5 images of train-images-idx3-ubyte"):
        load_mnist(mnist_root)
    (raw / "t10k-labels-idx1-ubyte").write_bytes(labels[:-1] + bytes([10]))
    (raw / "train-labels-idx1-ubyte").write_bytes(labels[:7] + bytes([5]) + bytes(range(5)))
    with pytest.raises(DamagedDataError, match=r"t10k-labels-idx1-ubyte' is damaged \(labels outside 0..9"):
        load_mnist(mnist_root)


@pytest.mark.data
@pytest.mark.parametrize(
    ("load", "folder", "mean", "first"),
    [
        (load_mnist, "MNIST/raw", 0.1307, [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]),
        (load_fashion_mnist, "FashionMNIST/raw", 0.2860, [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]),
    ],
)
def test_real_sets(data_root, load, folder: str, mean: float, first: list[int]) -> None:
    splits = load(data_root(folder), mean=[0], std=[1])
    inputs, targets = splits.train.tensors
    assert inputs.shape == (60000, 1, 28, 28)
    assert len(splits.test) == 10000
    assert inputs.mean().item() == pytest.approx(mean, abs=1e-4)
    assert targets[:10].tolist() == first
    assert len(splits.class_names) == 10
