"""Images whose targets are the images themselves."""

from __future__ import annotations

import pytest
import torch

from curvlab.lab.data import load_digits, load_reconstruction


def test_targets_are_the_flat_grey_levels() -> None:
    splits, images = load_reconstruction("ignored", source="digits", num_train=7), load_digits(num_train=7)
    inputs, targets = splits.train.tensors
    assert torch.equal(inputs, images.train.tensors[0])
    assert torch.equal(targets, inputs.flatten(1))
    assert 0 <= float(targets.min()) <= float(targets.max()) <= 1
    assert (splits.num_outputs, splits.task, splits.name) == (64, "binary", "digits_reconstruction")
    assert splits.to_image(inputs[0]).shape == (8, 8)


def test_unknown_source_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown source 'cifar10' of images: choose mnist or digits"):
        load_reconstruction("nowhere", source="cifar10")
