"""Parameters chosen by kind or by name: frozen, or blocks of the whole matrix."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from curvlab.curvature import GaussNewtonOperator
from curvlab.lab.models import MLP, ResNet20, resnet18
from curvlab.problem import freeze, mean_gradient, only_parameters


@pytest.mark.parametrize(
    ("normalization", "biases", "expected"),
    [(True, True, 268_336), (True, False, 268_346), (False, True, 269_024), (False, False, 269_722)],
)
def test_resnet20(normalization: bool, biases: bool, expected: int) -> None:
    model = ResNet20((3, 32, 32), 10)
    assert freeze(model, normalization=normalization, biases=biases) == expected
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert ("bn1.weight" in trainable) is not normalization
    assert ("bn1.bias" in trainable) is (not normalization and not biases)
    assert ("linear.bias" in trainable) is not biases
    assert "linear.weight" in trainable


def test_frozen_stays_frozen_and_outputs_do_not_change() -> None:
    model = MLP((3,), 2, hidden_sizes=[4])
    model.layers[1].weight.requires_grad_(False)
    inputs = torch.randn(2, 3)
    before = model(inputs)
    assert freeze(model, normalization=True, biases=True) == 4 * 2
    assert torch.equal(model(inputs), before)


def test_attention_and_layer_norm() -> None:
    class OtherRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16)
    model = nn.Sequential(layer, OtherRMSNorm(), nn.GroupNorm(2, 8))
    matrices = 3 * 8 * 8 + 8 * 8 + 2 * 8 * 16
    assert freeze(model, normalization=True, biases=False) == matrices + 3 * 8 + 8 + 16 + 8
    assert freeze(model, normalization=False, biases=True) == matrices


def test_torchvision_resnet18() -> None:
    model = resnet18((3, 64, 64), 1000)
    assert freeze(model, normalization=True, biases=True) == 11_689_512 - 9_600 - 1_000


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
