"""Train K copies of one model at once, on shared batches, each with its own weights of the examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from curvlab.checkpoint import described, fingerprint
from curvlab.problem.examples import Pairs
from curvlab.training.batch_order import BatchOrder
from curvlab.training.ensemble_descent import Ensemble, EnsembleGradient, EnsembleOptimizer, descend
from curvlab.training.ensemble_losses import EnsembleLosses
from curvlab.training.schedules import Schedule, ScheduleName
from curvlab.training.steps import Loss, differs_in_training


def train_ensemble(
    model: nn.Module,
    loss: Loss,
    train_data: Pairs,
    *,
    example_weights: Tensor,
    num_epochs: int,
    batch_size: int,
    lr: float,
    optimizer: EnsembleOptimizer = "sgd",
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    schedule: ScheduleName | Schedule = "constant",
    start: Tensor | None = None,
    batches: Iterable[Tensor] | None = None,
    by_vmap: bool | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    generator: torch.Generator,
    on_step: Callable[[int], None] | None = None,
) -> Ensemble:
    """Train K copies by SGD or Adam; copy k has the loss sum_i w_ki l_i / |B| on every batch.

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
        optimizer: "sgd" or "adam".
        momentum: of SGD.
        weight_decay: L2, loss + weight_decay / 2 ||w||².
        schedule: as for `train`.
        start: (K, P), where each copy starts; None: all at the model's parameters.
        batches: as for `train`.
        by_vmap: all copies in one call, or one after the other; None: what is faster, see
            `EnsembleLosses.vmap_pays`.
        checkpoint: as for `train`.
        checkpoint_every: likewise.
        generator: source of the order of examples.
        on_step: called with the number of steps taken, after each of them.

    Raises:
        TrainingDivergedError: the loss of a copy was not finite.

    Cost: K forward and K backward passes of a batch for each step; memory as of `descend`.
    """
    _check(model, num_epochs, batch_size)
    losses = EnsembleLosses(model, loss, train_data)
    num_copies, size = _shape(example_weights, losses.num_examples)
    positions = _start(losses, start, num_copies)
    return descend(
        positions,
        weighted_gradient(losses, example_weights, by_vmap=by_vmap),
        BatchOrder(size, batch_size=batch_size, num_epochs=num_epochs, given=batches),
        lr=lr,
        optimizer=optimizer,
        momentum=momentum,
        weight_decay=weight_decay,
        schedule=schedule,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        depends_on={
            "loss": described(loss),
            "data": lambda: fingerprint(losses.fixed_tensors()),
            "example_weights": fingerprint([example_weights]),
            "by_vmap": by_vmap,
        },
        generator=generator,
        on_step=on_step,
    )


def weighted_gradient(
    losses: EnsembleLosses, example_weights: Tensor, *, by_vmap: bool | None = None
) -> EnsembleGradient:
    """Return the function that gives sum_i w_ki l_i / |B| on a batch, (K,), and its gradients, (K, P).

    Args:
        losses: of one example each.
        example_weights: w, (K, N).
        by_vmap: as for `train_ensemble`.
    """
    weights = example_weights.to(losses.start)

    def gradient(positions: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        batch = losses.batch(indices)
        together = by_vmap
        if together is None and isinstance(batch[0], Tensor):
            together = losses.vmap_pays(len(positions), batch[0].numel())
        found, gradients = losses.losses_and_gradients(
            positions, batch, shared=True, weights=weights[:, indices], by_vmap=together
        )
        return found, torch.cat([piece.flatten(1) for piece in gradients], dim=1)

    return gradient


def _check(model: nn.Module, num_epochs: int, batch_size: int) -> None:
    if num_epochs < 1 or batch_size < 1:
        raise ValueError(f"num_epochs and batch_size must be at least 1, got {num_epochs} and {batch_size}")
    different = differs_in_training(model)
    if different is not None:
        raise ValueError(
            f"{different} differs in training and in evaluation: copies are trained at once only without it. Use "
            "`train` with example_weights, once for each."
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
