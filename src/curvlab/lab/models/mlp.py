"""Fully connected network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from curvlab.lab.models.activation import activation_module


class MLP(nn.Module):
    """Linear layers with an activation between them, (B, *input_shape) -> (B, num_outputs).

    Args:
        input_shape: of one input; flattened first.
        num_outputs: classes, or 1 for a binary or regression task.
        hidden_sizes: width of each hidden layer; empty for a linear model.
        activation: relu, tanh, gelu or sigmoid.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        num_outputs: int,
        *,
        hidden_sizes: Sequence[int] = (128, 128),
        activation: str = "relu",
    ) -> None:
        super().__init__()
        if any(size < 1 for size in hidden_sizes):
            raise ValueError(f"hidden_sizes must be positive, got {list(hidden_sizes)}")
        sizes = [math.prod(input_shape), *hidden_sizes]
        layers: list[nn.Module] = [nn.Flatten()]
        for size, next_size in pairwise(sizes):
            layers += [nn.Linear(size, next_size), activation_module(activation)]
        self.layers = nn.Sequential(*layers, nn.Linear(sizes[-1], num_outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits or predictions, (B, num_outputs)."""
        return self.layers(inputs)
