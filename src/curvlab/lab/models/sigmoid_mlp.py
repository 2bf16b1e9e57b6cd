"""Fully connected network of sigmoids that signals pass through."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from curvlab.lab.models.mlp import MLP

_GAIN = 4.0  # 1 over the slope of a sigmoid at 0


class SigmoidMLP(MLP):
    """An `MLP` of sigmoids whose weights start uniform, as Glorot & Bengio (2010) have it, at gain 4; biases at 0.

    With nn.Linear's own start a sigmoid passes on less than a tenth of its inputs' standard deviation: a deep
    autoencoder then learns its mean image and nothing else. Gain 4 makes up for the slope of 1/4 at 0. The last
    layer has no sigmoid behind it, and gain 1.

    Args:
        input_shape: of one input; flattened first.
        num_outputs: as for `MLP`.
        hidden_sizes: width of each hidden layer.
    """

    def __init__(self, input_shape: Sequence[int], num_outputs: int, *, hidden_sizes: Sequence[int]) -> None:
        super().__init__(input_shape, num_outputs, hidden_sizes=hidden_sizes, activation="sigmoid")
        linear = [layer for layer in self.layers if isinstance(layer, nn.Linear)]
        for layer in linear:
            nn.init.xavier_uniform_(layer.weight, gain=1.0 if layer is linear[-1] else _GAIN)
            nn.init.zeros_(layer.bias)
