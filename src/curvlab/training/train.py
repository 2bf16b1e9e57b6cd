"""Minibatch training with SGD or Adam, reproducible from one generator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from curvlab.data.splits import Pairs, stack
from curvlab.models.initialization import seeded_by
from curvlab.training.evaluate import num_examples

OptimizerName: TypeAlias = Literal["sgd", "adam"]
ScheduleName: TypeAlias = Literal["constant", "cosine"]


class TrainingDivergedError(ArithmeticError):
    """The loss became infinite or NaN."""


@dataclass(frozen=True)
class TrainingHistory:
    """What training went through.

    Attributes:
        losses: mean training loss of each epoch's batches, as met on the way; one number an epoch.
        num_steps: optimizer steps taken.
        final_lr: learning rate of the last step.
    """

    losses: tuple[float, ...]
    num_steps: int
    final_lr: float


def train(
    model: nn.Module,
    loss: nn.Module,
    train_data: Pairs,
    *,
    num_epochs: int,
    batch_size: int,
    lr: float,
    optimizer: OptimizerName = "sgd",
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    schedule: ScheduleName = "constant",
    generator: torch.Generator,
    progress: Callable[[Iterable[int]], Iterable[int]] | None = None,
    on_epoch_end: Callable[[int, float], None] | None = None,
) -> TrainingHistory:
    """Train `model` in place, and leave it in eval mode.

    Every epoch visits all examples once in a new order; the last batch may be smaller. Only parameters
    that require gradients move. Same model, data and generator state: bit-identical weights (one device,
    one number of threads).

    Args:
        model: on the device to train on; batches are moved there.
        loss: mean over the batch, e.g. nn.CrossEntropyLoss().
        train_data: map-style dataset of (input, target), or a pair of tensors.
        num_epochs: passes over the data.
        batch_size: in examples.
        lr: learning rate, of the first step under "cosine".
        optimizer: "sgd" or "adam".
        momentum: of SGD; Adam uses its defaults.
        weight_decay: L2, added to the gradient: loss + weight_decay / 2 ||w||².
        schedule: "constant", or "cosine" from lr to 0 over all steps.
        generator: source of the order of examples, and of dropout.
        progress: wraps the epochs, e.g. `tqdm.tqdm`.
        on_epoch_end: called with (epoch from 0, its mean loss).

    Raises:
        TrainingDivergedError: the loss of a batch was not finite; the model is not usable then.
        ValueError: a setting is out of range, or nothing is there to train.
    """
    _check(num_epochs=num_epochs, batch_size=batch_size, lr=lr, schedule=schedule)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError("the model has no parameter that requires gradients: freeze fewer of them")
    device, size = parameters[0].device, num_examples(train_data)
    stepper = _optimizer(optimizer, parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)
    total_steps = num_epochs * math.ceil(size / batch_size)
    losses: list[float] = []
    step, current_lr = 0, lr
    with seeded_by(generator, device):
        for epoch in range(num_epochs) if progress is None else progress(range(num_epochs)):
            order = torch.randperm(size, generator=generator, device=generator.device).cpu()
            total = 0.0
            model.train()
            for chosen in order.split(batch_size):
                if schedule == "cosine":
                    current_lr = 0.5 * lr * (1.0 + math.cos(math.pi * step / total_steps))
                    stepper.param_groups[0]["lr"] = current_lr
                inputs, targets = stack(train_data, chosen)
                stepper.zero_grad()
                batch_loss: Tensor = loss(model(inputs.to(device)), targets.to(device))
                value = batch_loss.item()
                if not math.isfinite(value):
                    raise _diverged(value, epoch=epoch, step=step, optimizer=optimizer, lr=current_lr)
                batch_loss.backward()
                stepper.step()
                total += value * len(chosen)
                step += 1
            losses.append(total / size)
            if on_epoch_end is not None:
                on_epoch_end(epoch, losses[-1])
    if not all(parameter.isfinite().all() for parameter in parameters):  # the last step can do it, too
        raise _diverged(math.nan, epoch=num_epochs - 1, step=step, optimizer=optimizer, lr=current_lr)
    model.zero_grad()
    model.eval()
    return TrainingHistory(losses=tuple(losses), num_steps=step, final_lr=current_lr)


def _check(*, num_epochs: int, batch_size: int, lr: float, schedule: str) -> None:
    if num_epochs < 1 or batch_size < 1:
        raise ValueError(f"num_epochs and batch_size must be at least 1, got {num_epochs} and {batch_size}")
    if not lr > 0:
        raise ValueError(f"lr must be positive, got {lr}")
    if schedule not in ("constant", "cosine"):
        raise ValueError(f"unknown schedule '{schedule}': choose constant or cosine")


def _optimizer(
    name: str, parameters: list[nn.Parameter], *, lr: float, momentum: float, weight_decay: float
) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)
    if name == "adam":
        return torch.optim.Adam(parameters, lr=lr, weight_decay=weight_decay)
    raise ValueError(f"unknown optimizer '{name}': choose sgd or adam")


def _diverged(value: float, *, epoch: int, step: int, optimizer: str, lr: float) -> TrainingDivergedError:
    if step == 0:
        return TrainingDivergedError(
            f"the loss is {value} before the first step: look for NaN or huge values in the inputs or targets, "
            "or in the initial weights"
        )
    return TrainingDivergedError(
        f"training diverged: the loss became {value} in epoch {epoch} (step {step}) with {optimizer} at "
        f"lr={lr:.3g}. Lower the learning rate, for example to lr={lr / 10:.3g}, or momentum."
    )
