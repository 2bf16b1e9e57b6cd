"""The optimizers that the NGD paper compares, and their steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlab.curvature import FisherOperator
from curvlab.optim import ExactNGD
from curvlab.training import Learner, MeanLoss, StepInfo, TrainingBatch
from experiments.ngd.optimizers import make_optimizer


def batch() -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(3, 2, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.randn(2, 3, dtype=torch.float64, generator=generator))
    inputs = torch.randn(8, 3, dtype=torch.float64, generator=generator)
    return model, inputs, torch.randint(2, (8,), generator=generator)


@pytest.mark.parametrize("name", ["sgd", "ngd", "exact_ngd"])
def test_every_optimizer_goes_downhill(name: str) -> None:
    model, inputs, targets = batch()
    step = make_step(model, inputs, targets, {"name": name, "lr": 0.05})
    losses = [step(TrainingBatch(inputs, targets)).loss for _ in range(20)]
    assert losses[-1] < losses[0]


def make_step(
    model: nn.Module, inputs: Tensor, targets: Tensor, settings: dict[str, Any]
) -> Callable[[TrainingBatch], StepInfo]:
    loss = nn.CrossEntropyLoss()
    optimizer, step = make_optimizer(model, loss, (inputs, targets), settings)
    return partial(step, Learner(model, MeanLoss(loss), optimizer))


def test_exact_ngd_takes_the_fisher_matrix_of_its_batch() -> None:
    model, inputs, targets = batch()
    loss = nn.CrossEntropyLoss()
    step = make_step(model, inputs, targets, {"name": "exact_ngd", "lr": 1.0, "alpha": 0.5, "rescale": True})
    step(TrainingBatch(inputs, targets))
    start = [parameter.detach().clone() for parameter in model.parameters()]
    step(TrainingBatch(inputs[:4], targets[:4]))
    own = FisherOperator(linear := copy_of(model, start), loss, (inputs[:4], targets[:4]))
    loss(linear(inputs[:4]), targets[:4]).backward()
    ExactNGD(linear.parameters(), own, 1.0, alpha=0.5, rescale=True).step()
    for expected, found in zip(linear.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def copy_of(model: nn.Module, values: list[Tensor]) -> nn.Module:
    other = copy.deepcopy(model)
    other.zero_grad()
    with torch.no_grad():
        for parameter, value in zip(other.parameters(), values, strict=True):
            parameter.copy_(value)
    return other


def test_unknown_optimizer() -> None:
    with pytest.raises(ValueError, match="choose sgd, ngd or exact_ngd"):
        make_step(*batch(), {"name": "adam", "lr": 0.1})
