"""Fully connected networks, activations by name, and how every network gets its initial values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from curvlab.seeding import seeded_by


def build_model(
    factory: Callable[..., nn.Module], *, input_shape: Sequence[int], num_outputs: int, generator: torch.Generator
) -> nn.Module:
    """Return `factory(input_shape=..., num_outputs=...)` on the CPU, in eval mode.

    Random initial values follow from `generator` alone; pretrained ones are what they are.

    Args:
        factory: a model class or function of this package, or, for a Hydra node,
            `functools.partial(hydra.utils.instantiate, cfg.model)`.
        input_shape: of one input, from `DataSplits`.
        num_outputs: likewise.
        generator: drawn from once.
    """
    with seeded_by(generator):
        model = factory(input_shape=tuple(input_shape), num_outputs=num_outputs)
    return model.eval()


ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
}


def activation_module(name: str) -> nn.Module:
    """Return a new module for `name`, one of relu, tanh, gelu, sigmoid."""
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation '{name}': choose one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]()


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
