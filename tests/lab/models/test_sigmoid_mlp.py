"""An MLP of sigmoids whose signals do not fade."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import nn

from curvlab.lab.models import MLP, SigmoidMLP, build_model

SIZES = [64, 256, 256, 256, 256, 10]


def spread(model: nn.Module) -> float:
    """Return the standard deviation over inputs of the last hidden layer's input to its sigmoid."""
    layers = list(model.layers)[:-2]  # type: ignore[arg-type]
    x = torch.rand(500, 64, generator=torch.Generator().manual_seed(1))
    for layer in layers:
        x = layer(x)
    return float(x.std(0).mean())


def test_signals_pass_through_as_they_do_not_by_default() -> None:
    generator = torch.Generator().manual_seed(0)
    models = {}
    for name, factory in (("sigmoid", SigmoidMLP), ("default", partial(MLP, activation="sigmoid"))):
        build = partial(factory, hidden_sizes=SIZES[1:-1])
        models[name] = build_model(build, input_shape=(64,), num_outputs=10, generator=generator)
    with torch.no_grad():
        assert spread(models["sigmoid"]) > 0.1  # of the inputs: 0.29
        assert spread(models["default"]) < 0.01
    linear = [layer for layer in models["sigmoid"].layers if isinstance(layer, nn.Linear)]
    gains = [4.0] * (len(linear) - 1) + [1.0]
    for layer, gain in zip(linear, gains, strict=True):
        limit = gain * math.sqrt(6 / (layer.in_features + layer.out_features))
        assert 0.95 * limit < float(layer.weight.abs().max()) <= limit
        assert not layer.bias.any()
    assert sum(isinstance(layer, nn.Sigmoid) for layer in models["sigmoid"].layers) == len(linear) - 1
