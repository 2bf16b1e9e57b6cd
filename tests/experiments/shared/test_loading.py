"""Images in files through a loader's workers: the same matrix as stacked ones, and read only then."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from curvlab.curvature import GaussNewtonOperator
from curvlab.lab.data import DataSplits, load_digits, load_image_folder
from curvlab.problem import stack
from curvlab.training import evaluate
from experiments.shared.loading import chosen_examples, held_out_examples

LOADED: DictConfig = OmegaConf.create({"memory_budget": 0, "num_workers": 2, "batch_size": 4})
FOLDER = "imagenet-sample"
ROOT = Path(os.environ.get("CURVLAB_DATA", "no data"))


@pytest.fixture
def splits() -> DataSplits:
    if not (ROOT / FOLDER).is_dir():
        pytest.skip(f"CURVLAB_DATA holds no {FOLDER}")
    return load_image_folder(ROOT, train_folder=FOLDER, test_folder=FOLDER, class_stride=10)


@pytest.mark.data
def test_products_over_the_loader_are_those_over_the_stacked_images(splits: DataSplits) -> None:
    indices = torch.tensor([0, 3, 4, 7, 12, 13, 20, 33, 35])
    stacked = stack(splits.train, indices)
    loader = chosen_examples(splits, indices, LOADED)
    assert isinstance(loader, DataLoader)
    assert loader.num_workers == 2
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 2, 7, stride=16), nn.Tanh(), nn.Flatten(), nn.Linear(2 * 14 * 14, 1000))
    model = model.double().eval()
    loss = nn.CrossEntropyLoss()
    read = GaussNewtonOperator(model, loss, loader)
    held = GaussNewtonOperator(model, loss, (stacked[0].double(), stacked[1]))
    vectors = held.randn(2, torch.Generator().manual_seed(0))
    assert_close(read @ vectors, held @ vectors, rtol=1e-10, atol=1e-14)
    drawn = [op.sample(3, torch.Generator().manual_seed(1)) @ vectors for op in (read, held)]
    assert_close(*drawn, rtol=1e-10, atol=1e-14)
    places = torch.tensor([8, 1])
    assert torch.equal(stack(loader, places)[0], stacked[0][places])
    single = model.float()
    assert evaluate(single, loss, loader).loss == pytest.approx(evaluate(single, loss, stacked).loss, rel=1e-5)


@pytest.mark.data
def test_few_images_are_stacked_and_all_of_them_never(splits: DataSplits) -> None:
    indices = torch.arange(3)
    one = 3 * 224 * 224 * 4
    enough = OmegaConf.create({"memory_budget": 3 * one})
    inputs, targets = chosen_examples(splits, indices, enough)
    assert (inputs.shape, targets.shape) == ((3, 3, 224, 224), (3,))
    little = OmegaConf.create({"memory_budget": 3 * one - 1, "num_workers": 0})
    assert isinstance(chosen_examples(splits, indices, little), DataLoader)
    everything = torch.arange(len(splits.train))
    assert isinstance(chosen_examples(splits, everything, None), DataLoader)
    assert isinstance(held_out_examples(splits, None), DataLoader)


@pytest.mark.data
def test_several_images_are_read_side_by_side_in_their_order(splits: DataSplits) -> None:
    together = splits.train.__getitems__([5, 1, 5])
    for index, (image, target) in zip([5, 1, 5], together, strict=True):
        assert torch.equal(image, splits.train[index][0])
        assert target == splits.train[index][1]


def test_sets_in_memory_stay_as_they_are() -> None:
    splits = load_digits()
    everything = torch.arange(len(splits.train))
    assert isinstance(splits.train, TensorDataset)
    assert chosen_examples(splits, everything, LOADED) is splits.train
    assert held_out_examples(splits, LOADED) is splits.test
    chosen = chosen_examples(splits, torch.tensor([2, 5]), LOADED)
    assert torch.equal(chosen[0], splits.train.tensors[0][[2, 5]])
