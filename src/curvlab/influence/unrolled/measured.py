"""Gradients of test measurements: where going back through a training starts."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from curvlab.influence.derivatives import Measurement, per_example_gradients
from curvlab.problem import Batches, Data, Loss, ModelFunction

Reduction = Literal["none", "mean"]


def measured_gradients(
    model: nn.Module,
    loss: Loss,
    test: Data,
    *,
    measurement: Measurement | None,
    reduction: Reduction,
) -> Tensor:
    """Return each test example's gradient, (M, P), or that of their mean, (1, P), some examples at a time."""
    if reduction not in ("none", "mean"):
        raise ValueError(f"reduction must be 'none' or 'mean', got {reduction!r}")
    if reduction == "none":
        return per_example_gradients(model, loss, test, measurement=measurement)
    function = ModelFunction(model)
    total, count = torch.zeros(function.num_parameters, device=function.device, dtype=function.dtype), 0
    for batch in Batches.of(function, test, batch_size=64):
        total += per_example_gradients(model, loss, batch, measurement=measurement).sum(0)
        count += len(batch[1])
    return total[None] / count
