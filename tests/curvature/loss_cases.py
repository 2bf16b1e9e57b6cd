"""Losses of a user's own, beside what is known of them: name, function, targets, outputs per example, convex."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def focal(outputs: Tensor, targets: Tensor) -> Tensor:
    """Lin et al. 2017, gamma = 2."""
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def gaussian_nll(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean and log variance are both learnt: log s²/2 + (y - m)²/(2 s²)."""
    mean, log_variance = outputs.chunk(2, -1)
    return 0.5 * (log_variance + (targets - mean) ** 2 * (-log_variance).exp()).mean()


def checked_gaussian_nll(outputs: Tensor, targets: Tensor) -> Tensor:
    """PyTorch's, which branches on the variance's values: no vmap."""
    mean, log_variance = outputs.chunk(2, -1)
    return F.gaussian_nll_loss(mean, targets, log_variance.exp(), eps=1e-12)


def soft_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


@dataclass(frozen=True)
class LossCase:
    loss: Callable[[Tensor, Tensor], Tensor]
    targets: Tensor
    num_outputs: int
    convex: bool


_G = torch.Generator().manual_seed(3)
COUNTS = torch.randint(0, 5, (6, 2), generator=_G).double()
REAL = torch.randn(6, 2, generator=_G, dtype=torch.float64)
CLASSES = torch.tensor([0, 2, 1, 1, 0, 2])
SHARES = torch.rand(6, 3, generator=_G, dtype=torch.float64).softmax(-1)

CASES = {
    "poisson": LossCase(nn.PoissonNLLLoss(), COUNTS, 2, True),
    "huber": LossCase(nn.HuberLoss(delta=0.7), REAL, 2, True),
    "smooth_l1": LossCase(nn.SmoothL1Loss(beta=0.7), REAL, 2, True),
    "focal": LossCase(focal, CLASSES, 3, False),
    "gaussian": LossCase(gaussian_nll, REAL, 4, False),
    "gaussian_checked": LossCase(checked_gaussian_nll, REAL, 4, False),
    "soft_labels": LossCase(soft_cross_entropy, SHARES, 3, True),
}
WEIGHTS = torch.tensor([0.3, 2.0, 1.1], dtype=torch.float64)
KNOWN = {
    "class_weights": (nn.CrossEntropyLoss(weight=WEIGHTS), CLASSES),
    "class_weights_smoothing": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2), CLASSES),
    "class_weights_sum": (nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum"), CLASSES),
    "class_weights_ignored": (nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=1, label_smoothing=0.1), CLASSES),
    "pos_weight": (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), (SHARES > 0.33).double()),
    "pos_weight_soft": (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS, weight=WEIGHTS.flip(0)), SHARES),
}


def inputs() -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def network(num_outputs: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, num_outputs)).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.8 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model
