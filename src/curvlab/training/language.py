"""Training and evaluation of causal language models on token sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from curvlab.data.splits import Pairs, stack
from curvlab.models.initialization import seeded_by
from curvlab.training.evaluate import Evaluation, num_examples
from curvlab.training.train import TrainingDivergedError, TrainingHistory

STEPS_PER_LOSS = 50  # the history holds one mean for so many steps
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
    generator: torch.Generator,
    progress: Callable[[Iterable[int]], Iterable[int]] | None = None,
) -> TrainingHistory:
    """Train `model` in place by AdamW on the mean cross-entropy of all predicted tokens; leave it in eval mode.

    The rate rises linearly over `warmup_steps`, then falls to 0 along a cosine; gradients are clipped to norm 1
    (both as usual for transformers). Sequences are visited in a new order each pass.

    Args:
        model: Hugging Face causal language model, or a module that maps tokens (B, T) to logits (B, T, V).
        sequences: pairs of tokens (T,) and next tokens (T,), -100 where there is none.
        num_steps: optimizer steps.
        batch_size: in sequences; a batch may be smaller at the end of a pass.
        lr: highest learning rate.
        warmup_steps: fewer than num_steps.
        weight_decay: decoupled, on matrices only.
        generator: source of the order, and of dropout.
        progress: wraps the steps, e.g. `tqdm.tqdm`.

    Raises:
        TrainingDivergedError: the loss of a batch was not finite.
    """
    if num_steps < 1 or batch_size < 1:
        raise ValueError(f"num_steps and batch_size must be at least 1, got {num_steps} and {batch_size}")
    if not lr > 0 or not 0 <= warmup_steps < num_steps:
        raise ValueError(
            f"lr must be positive and 0 <= warmup_steps < num_steps, got lr={lr}, warmup_steps={warmup_steps}, "
            f"num_steps={num_steps}"
        )
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError("the model has no parameter that requires gradients: freeze fewer of them")
    device = parameters[0].device
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=lr,
        betas=(0.9, 0.95),
    )
    order: list[Tensor] = []
    losses: list[float] = []
    current_lr = lr
    with seeded_by(generator, device):
        model.train()
        for step in range(num_steps) if progress is None else progress(range(num_steps)):
            current_lr = lr * _share(step, warmup_steps=warmup_steps, num_steps=num_steps)
            for group in optimizer.param_groups:
                group["lr"] = current_lr
            if not order:
                permutation = torch.randperm(num_examples(sequences), generator=generator)
                order = list(permutation.split(batch_size))
            inputs, targets = stack(sequences, order.pop(0))
            optimizer.zero_grad()
            loss = _token_loss(model, inputs.to(device), targets.to(device), reduction="mean")
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise TrainingDivergedError(
                    f"training diverged: the loss became {losses[-1]} in step {step}. Lower the learning rate, "
                    f"for example to lr={lr / 3:.3g}, or warm up longer."
                )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
            optimizer.step()
    model.zero_grad()
    model.eval()
    means = [
        sum(losses[start : start + STEPS_PER_LOSS]) / len(losses[start : start + STEPS_PER_LOSS])
        for start in range(0, num_steps, STEPS_PER_LOSS)
    ]
    return TrainingHistory(losses=tuple(means), num_steps=num_steps, final_lr=current_lr)


def evaluate_language_model(model: nn.Module, sequences: Pairs, *, batch_size: int = 32) -> Evaluation:
    """Return the mean cross-entropy of the predicted tokens (nats; exp of it is the perplexity).

    `accuracy` is the share of tokens that had the largest logit, `num_examples` the number of predicted tokens.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total, correct, count = 0.0, 0, 0
    with torch.no_grad():
        for chosen in torch.arange(num_examples(sequences)).split(batch_size):
            inputs, targets = (tensor.to(device) for tensor in stack(sequences, chosen))
            logits = _logits(model, inputs)
            kept = targets != -100
            total += functional.cross_entropy(logits[kept], targets[kept], reduction="sum").item()
            correct += int((logits.argmax(-1) == targets)[kept].sum())
            count += int(kept.sum())
    model.train(was_training)
    if count == 0:
        raise ValueError("every target is ignored (-100): there is no token to predict")
    return Evaluation(loss=total / count, accuracy=correct / count, num_examples=count)


def _share(step: int, *, warmup_steps: int, num_steps: int) -> float:
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup_steps) / (num_steps - warmup_steps)))


def _token_loss(model: nn.Module, inputs: Tensor, targets: Tensor, *, reduction: str) -> Tensor:
    return functional.cross_entropy(_logits(model, inputs).flatten(0, 1), targets.flatten(), reduction=reduction)


def _logits(model: nn.Module, inputs: Tensor) -> Tensor:
    outputs = model(inputs)
    logits: Tensor = outputs if isinstance(outputs, Tensor) else outputs.logits
    return logits
