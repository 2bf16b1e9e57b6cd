"""Activations by name."""

from __future__ import annotations

from torch import nn

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
