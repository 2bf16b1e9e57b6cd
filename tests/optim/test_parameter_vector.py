"""What all optimizers refuse alike."""

import pytest
import torch
from torch import nn

from curvlab.curvature import FisherOperator, HessianOperator
from curvlab.optim import CubicNewton, FisherNewton, UniformDirection

INPUTS = torch.tensor([[1.0, 2.0], [0.5, -1.0], [2.0, 0.1]])
TARGETS = torch.tensor([[1.0], [0.0], [1.0]])
OPTIMIZERS = {
    "UniformDirection": (UniformDirection, HessianOperator),
    "CubicNewton": (CubicNewton, HessianOperator),
    "FisherNewton": (FisherNewton, FisherOperator),
}


@pytest.fixture(params=OPTIMIZERS)
def case(request):
    network = nn.Linear(2, 1)
    optimizer, operator = OPTIMIZERS[request.param]
    return network, optimizer, operator(network, nn.BCEWithLogitsLoss(), (INPUTS, TARGETS))


def test_missing_gradients(case) -> None:
    network, optimizer, operator = case
    with pytest.raises(ValueError, match=r"found no gradients: call loss.backward\(\) first"):
        optimizer(network.parameters(), operator).step()


def test_gradients_that_are_not_finite(case) -> None:
    network, optimizer, operator = case
    network.weight.grad = torch.full_like(network.weight, torch.nan)
    with pytest.raises(ValueError, match="NaN or infinity in the gradient: the iteration has diverged"):
        optimizer(network.parameters(), operator).step()


def test_operators_of_another_size(case) -> None:
    network, optimizer, operator = case
    with pytest.raises(ValueError, match=r"got 2 parameters and a \w+ of size 3"):
        optimizer([network.weight], operator)


def test_several_groups(case) -> None:
    network, optimizer, operator = case
    with pytest.raises(ValueError, match="takes one parameter group, got 2"):
        optimizer([{"params": [network.weight]}, {"params": [network.bias]}], operator)


def test_a_parameter_without_gradient_stays(case) -> None:
    network, optimizer, operator = case
    network.weight.grad = torch.ones_like(network.weight)
    stepper = optimizer(network.parameters(), operator)
    before = network.weight.detach().clone()
    stepper.step()
    assert not torch.equal(before, network.weight)
