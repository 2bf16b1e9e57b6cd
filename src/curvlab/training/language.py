"""Training of causal language models on token sequences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from curvlab.iterate import Checkpoint
from curvlab.problem import Pairs
from curvlab.training.history import TrainingHistory
from curvlab.training.schedules import cosine_after_warmup
from curvlab.training.train import TrainingState, train

MAX_GRADIENT_NORM = 1.0


def train_language_model(
    model: nn.Module,
    sequences: Pairs,
    *,
    num_steps: int,
    batch_size: int,
    lr: float,
    warmup_steps: int = 0,
    weight_decay: float = 0.0,
    progress: bool | str = True,
    callback: Callable[[TrainingState], object] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    generator: torch.Generator | int,
) -> TrainingHistory:
    """Train `model` in place by AdamW on the mean cross-entropy of all predicted tokens; leave it in eval mode.

    `train` with the settings that are usual for transformers: the rate rises linearly over `warmup_steps`, then
    falls to 0 along a cosine; gradients are clipped to norm 1. Sequences are visited in a new order each pass.

    Args:
        model: Hugging Face causal language model, or a module that maps tokens (B, T) to logits (B, T, V).
        sequences: pairs of tokens (T,) and next tokens (T,), -100 where there is none.
        num_steps: optimizer steps.
        batch_size: in sequences; a batch may be smaller at the end of a pass.
        lr: highest learning rate.
        warmup_steps: fewer than num_steps.
        weight_decay: decoupled, on matrices only.
        progress: as for `train`.
        callback: likewise.
        checkpoint: likewise.
        generator: source of the order, and of dropout; or a seed.

    Raises:
        TrainingDivergedError: the loss of a batch was not finite.
    """
    if warmup_steps and not 0 <= warmup_steps < num_steps:
        raise ValueError(f"need 0 <= warmup_steps < num_steps, got {warmup_steps} and {num_steps}")
    return train(
        model,
        nn.CrossEntropyLoss(),
        sequences,
        num_steps=num_steps,
        batch_size=batch_size,
        lr=lr,
        optimizer=partial(_adamw, weight_decay=weight_decay),
        schedule=cosine_after_warmup(warmup_steps),
        max_gradient_norm=MAX_GRADIENT_NORM,
        progress=progress,
        callback=callback,
        checkpoint=checkpoint,
        generator=generator,
    )


def _adamw(parameters: list[nn.Parameter], lr: float, *, weight_decay: float) -> torch.optim.AdamW:
    """Return AdamW that decays matrices, but neither biases nor normalisation."""
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
