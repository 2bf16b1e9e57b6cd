from __future__ import annotations

import numpy as np
import pytest
import sklearn.datasets
import torch

from curvlab.lab.data import load_breast_cancer, load_diabetes, load_digits

LOADERS = [load_digits, load_breast_cancer, load_diabetes]


def test_digits_are_all_there_once_unchanged() -> None:
    splits = load_digits()
    images = torch.cat([splits.train.tensors[0], splits.test.tensors[0]])
    labels = torch.cat([splits.train.tensors[1], splits.test.tensors[1]])
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    bunch = sklearn.datasets.load_digits()
    ours = sorted((tuple(i.flatten().tolist()), int(t)) for i, t in zip(images, labels, strict=True))
    theirs = sorted(
        (tuple((i / 16).ravel().tolist()), int(t)) for i, t in zip(bunch.images, bunch.target, strict=True)
    )
    assert ours == theirs
    assert len(splits.test) == 539
    assert splits.to_image(images[0]).shape == (8, 8)


def test_breast_cancer_is_standardised_by_its_training_part() -> None:
    splits = load_breast_cancer()
    inputs, targets = splits.train.tensors
    assert (len(splits.train), len(splits.test)) == (398, 171)
    np.testing.assert_allclose(inputs.double().mean(0), np.zeros(30), atol=1e-6)
    np.testing.assert_allclose(inputs.double().std(0, correction=0), np.ones(30), atol=1e-6)
    assert splits.test.tensors[0].double().mean(0).abs().max() > 1e-3
    assert targets.shape == (398, 1)
    assert targets.dtype == torch.float32
    assert set(targets.flatten().tolist()) == {0.0, 1.0}
    assert splits.class_names == ("malignant", "benign")
    assert (splits.task, splits.num_outputs) == ("binary", 1)


def test_features_come_back_from_mean_and_std() -> None:
    splits = load_breast_cancer()
    inputs = torch.cat([splits.train.tensors[0], splits.test.tensors[0]]).double()
    features = inputs.numpy() * np.array(splits.std) + np.array(splits.mean)
    expected = sklearn.datasets.load_breast_cancer().data
    np.testing.assert_allclose(np.sort(features, axis=0), np.sort(expected, axis=0), rtol=1e-4, atol=1e-5)


def test_diabetes_is_the_regression_set_with_standardised_targets() -> None:
    splits = load_diabetes()
    inputs, targets = splits.train.tensors
    assert (inputs.shape, targets.shape) == ((309, 10), (309, 1))
    assert len(torch.unique(targets)) > 100
    assert abs(targets.double().mean().item()) < 1e-6
    assert targets.double().std(correction=0).item() == pytest.approx(1.0, abs=1e-6)
    assert (splits.task, splits.class_names) == ("regression", None)


@pytest.mark.parametrize("load", LOADERS)
def test_leading_examples_do_not_depend_on_how_many(load) -> None:
    full, small = load("ignored"), load(num_train=20, num_test=10)
    assert (len(small.train), len(small.test)) == (20, 10)
    for kept, whole in ((small.train, full.train), (small.test, full.test)):
        for ours, theirs in zip(kept.tensors, whole.tensors, strict=True):
            assert torch.equal(ours, theirs[: len(ours)])
    assert small.checksum != full.checksum
    assert load().checksum == full.checksum


@pytest.mark.parametrize("load", LOADERS)
def test_too_many_are_refused_with_the_number_there(load) -> None:
    available = len(load().train)
    with pytest.raises(ValueError, match=f"num_train=5000, but data=.* has {available} examples"):
        load(num_train=5000)
