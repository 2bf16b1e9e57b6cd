"""Train K copies of one model at once, on shared batches, each with its own weights of the examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from curvlab.data.splits import Pairs
from curvlab.training.batch_order import BatchOrder
from curvlab.training.ensemble_losses import EnsembleLosses
from curvlab.training.loop import TrainingDivergedError
from curvlab.training.mean_loss import Loss
from curvlab.training.schedules import Schedule, ScheduleName, named_schedule


@dataclass(frozen=True)
class Ensemble:
    """K trained copies of a model.

    Attributes:
        parameters: (K, P), parameters that require gradients in `named_parameters()` order.
        losses: (K, num_epochs), mean loss of each epoch's batches, as met on the way, with the copy's weights.
        learning_rates: of each step, the same for all copies.
    """

    parameters: Tensor
    losses: Tensor
    learning_rates: tuple[float, ...]


def train_ensemble(
    model: nn.Module,
    loss: Loss,
    train_data: Pairs,
    *,
    example_weights: Tensor,
    num_epochs: int,
    batch_size: int,
    lr: float,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    schedule: ScheduleName | Schedule = "constant",
    start: Tensor | None = None,
    batches: Iterable[Tensor] | None = None,
    by_vmap: bool | None = None,
    generator: torch.Generator,
    on_step: Callable[[int], None] | None = None,
) -> Ensemble:
    """Train K copies by SGD with momentum; copy k has the loss sum_i w_ki l_i / |B| on every batch.

    The copies see the same batches, so that they differ by their weights alone: K retrainings that leave other
    examples out (weight 0). Equal, to rounding, to K calls of `train` with `example_weights[k]` and the same
    `batches`; a data set of sequences is the exception, where `train` divides by the tokens of each batch and
    this by |B| times the mean number of tokens of an example. `model` is not changed.

    Args:
        model: without dropout and BatchNorm, which differ in training.
        loss: mean over examples.
        train_data: as for `train`.
        example_weights: (K, N).
        num_epochs: passes over the data.
        batch_size: in examples.
        lr: learning rate.
        momentum: of SGD.
        weight_decay: L2, loss + weight_decay / 2 ||w||².
        schedule: as for `train`.
        start: (K, P), where each copy starts; None: all at the model's parameters.
        batches: as for `train`.
        by_vmap: all copies in one call, or one after the other; None: what is faster, see
            `EnsembleLosses.vmap_pays`.
        generator: source of the order of examples.
        on_step: called with the number of steps taken, after each of them.

    Raises:
        TrainingDivergedError: the loss of a copy was not finite.

    Cost: K forward and K backward passes of a batch for each step; memory of 3 K P numbers.
    """
    _check(model, num_epochs, batch_size, lr)
    losses = EnsembleLosses(model, loss, train_data)
    num_copies, size = _shape(example_weights, losses.num_examples)
    positions = _start(losses, start, num_copies)
    velocity = torch.zeros_like(positions)
    weights = example_weights.to(positions)
    factors = named_schedule(schedule)
    order = BatchOrder(size, batch_size=batch_size, num_epochs=num_epochs, given=batches)
    means: list[Tensor] = []
    rates: list[float] = []
    for epoch in range(order.num_epochs):
        total, seen = torch.zeros(num_copies, dtype=torch.float64), 0
        for indices in order.epoch(epoch, generator):
            chosen = indices.to(positions.device)
            batch = losses.batch(chosen)
            if by_vmap is None and isinstance(batch[0], Tensor):
                by_vmap = losses.vmap_pays(num_copies, batch[0].numel())
            found, gradients = losses.losses_and_gradients(
                positions, batch, shared=True, weights=weights[:, chosen], by_vmap=by_vmap
            )
            values = found.double().cpu()
            if not bool(values.isfinite().all()):
                raise _diverged(values, epoch, lr)
            rates.append(lr if factors is None else lr * factors(len(rates), order.num_steps))
            slope = torch.cat([gradient.flatten(1) for gradient in gradients], dim=1)
            if weight_decay:
                slope.add_(positions, alpha=weight_decay)
            velocity = slope if len(rates) == 1 else velocity.mul_(momentum).add_(slope)  # as torch.optim.SGD
            positions.add_(velocity, alpha=-rates[-1])
            total += values * len(indices)
            seen += len(indices)
            if on_step is not None:
                on_step(len(rates))
        means.append(total / seen)
    return Ensemble(positions, torch.stack(means, dim=1), tuple(rates))


def _check(model: nn.Module, num_epochs: int, batch_size: int, lr: float) -> None:
    if num_epochs < 1 or batch_size < 1:
        raise ValueError(f"num_epochs and batch_size must be at least 1, got {num_epochs} and {batch_size}")
    if not lr > 0:
        raise ValueError(f"lr must be positive, got {lr}")
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) or (isinstance(module, _DropoutNd) and module.p > 0):
            raise ValueError(
                f"module '{name}' ({type(module).__name__}) differs in training and in evaluation: copies are "
                "trained at once only without it. Use `train` with example_weights, once for each."
            )


def _shape(example_weights: Tensor, num_examples: int) -> tuple[int, int]:
    if example_weights.ndim != 2 or example_weights.shape[1] != num_examples:
        raise ValueError(
            f"example_weights have shape {tuple(example_weights.shape)}: one row for each copy and one column for "
            f"each of the {num_examples} examples are needed"
        )
    return len(example_weights), num_examples


def _start(losses: EnsembleLosses, start: Tensor | None, num_copies: int) -> Tensor:
    if start is None:
        return losses.start.repeat(num_copies, 1)
    if start.shape != (num_copies, len(losses.start)):
        raise ValueError(f"start has shape {tuple(start.shape)}, not ({num_copies}, {len(losses.start)})")
    return start.to(losses.start).clone()


def _diverged(values: Tensor, epoch: int, lr: float) -> TrainingDivergedError:
    copies = (~values.isfinite()).nonzero().flatten()[:5].tolist()
    return TrainingDivergedError(
        f"training diverged: the loss of copies {copies} is not finite in epoch {epoch} at lr={lr:.3g}. Lower the "
        f"learning rate, for example to lr={lr / 10:.3g}."
    )
