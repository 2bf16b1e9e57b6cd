"""Outputs whose shape does not say where their classes stand."""

from __future__ import annotations

from torch import Tensor


def has_two_readings(outputs: Tensor, targets: Tensor) -> bool:
    """Return whether classes could stand last, (N, T, V), as well as second, (N, C, H), as PyTorch has it.

    Both give a number for (N, K, K) and targets (N, K), and it is not the same one.
    """
    last, second = outputs.shape[:-1], (outputs.shape[0], *outputs.shape[2:])
    return outputs.ndim > 2 and targets.shape == last and targets.shape == second


def refuse_two_readings(outputs: Tensor, targets: Tensor) -> None:
    """Raise a ValueError where class indices fit the outputs in two ways."""
    if has_two_readings(outputs, targets):
        raise ValueError(
            f"outputs {tuple(outputs.shape)} with targets {tuple(targets.shape)} can be read in two ways: "
            "with classes last, as a language model's logits, or second, as nn.CrossEntropyLoss reads them. Say "
            "which by a loss of your own: lambda outputs, targets: torch.nn.functional.cross_entropy("
            "outputs.flatten(0, -2), targets.flatten()) for classes last, without flatten for classes second; or "
            "pad or cut sequences to another length than the number of classes."
        )
