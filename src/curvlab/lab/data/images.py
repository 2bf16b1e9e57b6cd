"""From 8-bit images in memory to normalised training and test sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from curvlab.lab.data.splits import DataSplits, checksum

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
    mean: Sequence[float],
    std: Sequence[float],
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


def check_normalisation(mean: Sequence[float], std: Sequence[float], channels: int) -> None:
    """Raise a ValueError unless there is one mean and one positive std for each channel."""
    if len(mean) != channels or len(std) != channels or min(std) <= 0:
        raise ValueError(
            f"the images have {channels} channels, so mean and std need {channels} numbers each, std "
            f"positive; got mean={list(mean)}, std={list(std)}"
        )


def _normalise(images: np.ndarray, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    inputs = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().float().div_(255.0)
    return inputs.sub_(torch.tensor(mean)[:, None, None]).div_(torch.tensor(std)[:, None, None])
