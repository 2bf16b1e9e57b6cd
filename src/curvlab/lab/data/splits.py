"""A training and a test set with what is needed to use, show and identify them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

Task: TypeAlias = Literal["classification", "binary", "regression"]
# What every loader takes: see `curvlab.lab.data`.
Root: TypeAlias = str | Path
Count: TypeAlias = int | None


@dataclass(frozen=True)
class DataSplits:
    """Map-style training and test sets of (input, target), and how the inputs were normalised.

    Inputs are float32 of shape `input_shape`: (C, H, W) for images, (F,) for tables. Targets are class
    indices () int64 for "classification" (for nn.CrossEntropyLoss), and (1,) float32 for "binary"
    (nn.BCEWithLogitsLoss) and "regression" (nn.MSELoss), the shape of the model's output.

    Attributes:
        name: as on the command line, `data=name`.
        train: training set; a TensorDataset unless images are read lazily from files.
        test: test set, likewise.
        input_shape: shape of one input.
        num_outputs: outputs a model needs: classes, or 1 for "binary" and "regression".
        task: which of the three it is.
        class_names: by class index; None when there are no classes or their names are not known.
        checksum: sha256 of what was loaded, before normalisation: bytes of the tensors, or names and
            sizes of the image files.
        mean: subtracted from the inputs, one number for each channel (images) or feature (tables).
        std: then divided by.
    """

    name: str
    train: Dataset[Any]
    test: Dataset[Any]
    input_shape: tuple[int, ...]
    num_outputs: int
    task: Task
    class_names: tuple[str, ...] | None
    checksum: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def to_image(self, example: Tensor) -> np.ndarray:
        """Return an input as an image in [0, 1], normalisation undone: (C, H, W) -> (H, W) or (H, W, 3)."""
        if len(self.input_shape) != 3:
            raise ValueError(f"{self.name} holds no images: its inputs have shape {self.input_shape}")
        if example.shape != self.input_shape:
            raise ValueError(f"to_image takes one input of shape {self.input_shape}, got {tuple(example.shape)}")
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        image = (example.detach().cpu().float() * std + mean).clamp(0.0, 1.0)
        return image[0].numpy() if len(image) == 1 else image.permute(1, 2, 0).numpy()


def leading(wanted: Count, available: int, *, setting: str, name: str) -> int:
    """Return how many leading examples to keep: `wanted`, or all `available` when it is None.

    Raises:
        ValueError: naming `setting` (num_train or num_test) unless 1 <= wanted <= available.
    """
    if wanted is None:
        return available
    if not 1 <= wanted <= available:
        raise ValueError(
            f"{setting}={wanted}, but data={name} has {available} examples there: choose 1 to {available}, "
            "or null for all of them"
        )
    return wanted


def checksum(*arrays: np.ndarray) -> str:
    """Return the sha256 over dtype, shape and bytes of each array, in order."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def fixed_permutation(size: int) -> np.ndarray:
    """Return the one permutation used to split sets that come without a split or sorted by class.

    `RandomState`, because NumPy guarantees its stream for ever, unlike that of `default_rng` or torch.
    """
    return np.random.RandomState(0).permutation(size)
