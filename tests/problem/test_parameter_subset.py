"""Parameters chosen by name: blocks of the whole matrix, and the model as before."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from curvlab.curvature import GaussNewtonOperator
from curvlab.problem import mean_gradient, only_parameters

LOSS = nn.CrossEntropyLoss()


@pytest.fixture
def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval()


def test_the_matrix_of_some_parameters_is_a_block_of_the_whole(network: nn.Sequential) -> None:
    data = torch.randn(6, 3, dtype=torch.float64), torch.arange(6) % 3
    whole, gradient = GaussNewtonOperator(network, LOSS, data).to_dense(), mean_gradient(network, LOSS, data)
    with only_parameters(network, "0.bias", "2.*") as size:
        op = GaussNewtonOperator(network, LOSS, data)
        assert_close(mean_gradient(network, LOSS, data), gradient[12:])
    assert size == 4 + 12 + 3
    assert_close(op.to_dense(), whole[12:, 12:])  # also after the block
    assert GaussNewtonOperator(network, LOSS, data).shape == whole.shape


def test_flags_are_put_back_and_frozen_parameters_may_be_chosen(network: nn.Sequential) -> None:
    network[0].weight.requires_grad_(False)
    with only_parameters(network, "0.weight") as size:
        assert size == 12
        assert [p.requires_grad for p in network.parameters()] == [True, False, False, False]
    assert [p.requires_grad for p in network.parameters()] == [False, True, True, True]


def test_patterns_that_choose_nothing_are_refused(network: nn.Sequential) -> None:
    with (
        pytest.raises(ValueError, match=r"matches '2\.wieght': names are like 2\.weight"),
        only_parameters(network, "2.*", "2.wieght"),
    ):
        pass
    with pytest.raises(ValueError, match="no pattern"), only_parameters(network):
        pass
    assert all(p.requires_grad for p in network.parameters())
