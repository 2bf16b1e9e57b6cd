"""Images whose targets are the images themselves, for autoencoders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import TensorDataset

from curvlab.lab.data.mnist import load_mnist
from curvlab.lab.data.scikit_learn import load_digits
from curvlab.lab.data.splits import DataSplits


def load_reconstruction(
    root: str | Path,
    *,
    source: Literal["mnist", "digits"],
    num_train: int | None = None,
    num_test: int | None = None,
) -> DataSplits:
    """Grey levels in [0, 1] as inputs and, flattened, as targets of one logit for each pixel.

    As in Martens & Grosse (2015), whose binary cross-entropy is summed over the pixels; nn.BCEWithLogitsLoss, the
    loss of "binary" sets, takes their mean.

    Args:
        root: data root.
        source: the images: "mnist" or "digits".
        num_train: keep the leading ones only.
        num_test: likewise.
    """
    sizes = {"num_train": num_train, "num_test": num_test}
    if source == "mnist":
        splits = load_mnist(root, mean=(0.0,), std=(1.0,), **sizes)
    elif source == "digits":
        splits = load_digits(root, **sizes)
    else:
        raise ValueError(f"unknown source '{source}' of images: choose mnist or digits")
    train, test = (_with_itself(part) for part in (splits.train, splits.test))
    num_pixels = train.tensors[1].shape[1]
    return replace(
        splits,
        name=f"{source}_reconstruction",
        train=train,
        test=test,
        num_outputs=num_pixels,
        task="binary",
        class_names=None,
    )


def _with_itself(part: Any) -> TensorDataset:
    inputs = part.tensors[0]
    return TensorDataset(inputs, inputs.flatten(1))
