from __future__ import annotations

import pytest
import torch
from torch import nn

from curvlab.lab.models import MLP, ResNet20, resnet18
from curvlab.problem import freeze


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
