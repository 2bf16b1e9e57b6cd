"""The second gradient of natural-gradient methods: for labels that the model draws itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from curvlab.problem import output_loss


def sampled_label_loss(loss: nn.Module, outputs: Tensor, targets: Tensor, *, generator: torch.Generator) -> Tensor:
    """Return -Σ_n log p(ŷ_n | h_n) / √N, ŷ drawn from the model: its gradient is d of Eq. 8 (Ginger, 2024).

    E d dᵀ is FisherOperator(model, loss, batch), with its conventions: N counts the predictions that the loss
    averages over (predicted tokens; all single outputs of nn.MSELoss, which is read as the Gaussian with
    p ∝ exp(-(h - y)²)), and is 1 for reduction="sum". Compute the outputs in eval mode, as the authors' code does.

    Args:
        loss: nn.CrossEntropyLoss (classes last), nn.MSELoss or nn.BCEWithLogitsLoss.
        outputs: of the model, with their graph.
        targets: only their shape counts, and which of them cross-entropy ignores: those are not drawn.
        generator: draws the labels.

    Cost: that of the loss.
    """
    closed_form = output_loss(loss)
    closed_form.check(outputs, targets)
    drawn = closed_form.sample_targets(outputs.detach(), targets, generator)
    of_drawn = closed_form.for_sampled_targets()
    count = 1.0 if closed_form.reduction == "sum" else of_drawn.count(drawn)
    return of_drawn.per_example(outputs, drawn).sum() / max(count, 1.0) ** 0.5
