"""Minibatch training, reproducible from one generator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from curvlab.checkpoint import Checkpoint, described, fingerprint
from curvlab.training.batch_order import BatchOrder
from curvlab.training.evaluate import evaluate
from curvlab.training.history import TrainingHistory
from curvlab.training.loop import OnEpochEnd, Trace, TrainingLoop
from curvlab.training.own_batches import OwnBatches, TrainingData, num_examples, readable
from curvlab.training.schedules import Schedule, ScheduleName, named_schedule
from curvlab.training.steps import Learner, Loss, MeanLoss, Step, closure_step, gradient_step

OptimizerName: TypeAlias = Literal["sgd", "adam", "lbfgs"]
OptimizerFactory: TypeAlias = Callable[..., torch.optim.Optimizer]


def train(
    model: nn.Module,
    loss: Loss,
    train_data: TrainingData,
    *,
    num_epochs: int | None = None,
    num_steps: int | None = None,
    batch_size: int,
    lr: float | None = None,
    optimizer: OptimizerName | OptimizerFactory | torch.optim.Optimizer = "sgd",
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    schedule: ScheduleName | Schedule = "constant",
    max_gradient_norm: float | None = None,
    gradient_norm: float | None = None,
    step: Step | None = None,
    example_weights: Tensor | None = None,
    batches: Iterable[Tensor] | None = None,
    validation: TrainingData | Callable[[nn.Module], float] | None = None,
    keep: Literal["last", "best"] = "last",
    measure_updates: bool = False,
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    generator: torch.Generator,
    progress: Callable[[Iterable[int]], Iterable[int]] | None = None,
    on_epoch_end: OnEpochEnd | None = None,
    on_step: Callable[[int], None] | None = None,
) -> TrainingHistory:
    """Train `model` in place, and leave it in eval mode.

    Every epoch visits all examples once in a new order; the last batch may be smaller. Only parameters
    that require gradients move. Same model, data and generator state: bit-identical weights (one device,
    one number of threads), also after an interruption with `checkpoint`.

    Args:
        model: on the device to train on; batches are moved there. Language models map tokens (B, T) to logits
            (B, T, V), or to a record with `.logits`.
        loss: mean over the batch, e.g. nn.CrossEntropyLoss().
        train_data: map-style dataset of (input, target), or a pair of tensors. Or what holds its labels inside, as
            the curvature operators read it: a data set of Hugging Face with `labels`, mappings of tensors, or a
            DataLoader, whose collator then makes (and pads) every batch; order and size of batches are as here.
        num_epochs: passes over the data; this or `num_steps`.
        num_steps: optimizer steps; the last pass is cut short.
        batch_size: in examples; at least N for "lbfgs".
        lr: learning rate, where a schedule's factor is 1. Not with an optimizer that exists already.
        optimizer: "sgd", "adam", "lbfgs" (strong Wolfe line search; full batches), a function called with
            (parameters, lr=lr), such as `functools.partial(Ginger, rank=4, ...)`, or an optimizer.
        momentum: of "sgd"; every other optimizer has its own.
        weight_decay: of the named optimizers: L2, loss + weight_decay / 2 ||w||².
        schedule: "constant", "cosine" from lr to 0 over all steps, or a function of (step, number of steps) that
            gives the factor of lr at each step.
        max_gradient_norm: gradients are scaled down to this norm.
        gradient_norm: stop, before a step, when the batch's gradient norm is at most this (meant for full
            batches); `TrainingHistory.gradient_norm` says whether that was reached. It takes no account of
            `weight_decay` unless the optimizer is "lbfgs".
        step: what is done with a batch; None: `closure_step` for L-BFGS, `gradient_step` for others.
            `curvature_step` is for Ginger and QNG.
        example_weights: (N,); the loss of a batch is sum w_i l_i / |B|, see `MeanLoss`. 0 removes an example.
        batches: indices of each step's examples, for all steps, in place of the random order; with `num_epochs`
            they are split into as many equal epochs, without it they are one. `batch_size` is then not used.
        validation: data whose mean loss is taken after each epoch, or a function of the model that returns a
            number, lower is better.
        keep: "last" weights, or those of the epoch with the "best" validation.
        measure_updates: record the norm of every update.
        checkpoint: file in which the unfinished training is kept, saved every minute; the same call resumes there.
        checkpoint_every: save after so many steps, too.
        generator: source of the order of examples, and of dropout.
        progress: wraps the epochs, e.g. `tqdm.tqdm`.
        on_epoch_end: called with (epoch from 0, its mean loss); a mapping that it returns is kept in the history,
            and in checkpoints. Not called again for epochs before an interruption.
        on_step: called with the number of steps taken, after each of them.

    Raises:
        TrainingDivergedError: the loss of a batch was not finite; the model is not usable then.
        ValueError: a setting is out of range, or nothing is there to train.
    """
    data = readable(model, train_data)
    size = num_examples(data)
    _check(num_epochs, num_steps, batch_size, given=batches is not None)
    if example_weights is not None and example_weights.shape != (size,):
        raise ValueError(
            f"example_weights have shape {tuple(example_weights.shape)}, but there are {size} examples"
        )
    if keep == "best" and validation is None:
        raise ValueError("keep='best' needs a validation set to choose by")
    factors = named_schedule(schedule)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError("the model has no parameter that requires gradients: freeze fewer of them")
    stepper = _optimizer(optimizer, parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)
    by_closure = isinstance(stepper, torch.optim.LBFGS)
    if optimizer == "lbfgs" and batches is None and batch_size < size:
        raise ValueError(f"lbfgs needs full batches: batch_size is {batch_size}, there are {size} examples")
    learner = Learner(
        model,
        MeanLoss(loss),
        stepper,
        max_gradient_norm=max_gradient_norm,
        gradient_norm=gradient_norm,
        l2=weight_decay if by_closure else 0.0,
    )
    order = BatchOrder(size, batch_size=batch_size, num_epochs=num_epochs, num_steps=num_steps, given=batches)
    loop = TrainingLoop(
        learner,
        data,
        order,
        step=step or (closure_step if by_closure else gradient_step),
        schedule=factors,
        example_weights=example_weights,
        measure_updates=measure_updates,
        validate=_validate(model, loss, validation),
        keep_best=keep == "best",
        on_epoch_end=on_epoch_end,
        on_step=on_step,
    )
    if checkpoint is not None:
        settings = _settings(loop, batch_size, schedule, keep, generator)
        loop.checkpoint = Checkpoint(checkpoint, settings, every=checkpoint_every)
    return _history(loop.run(generator, progress), loop, batch_size, size)


def _history(trace: Trace, loop: TrainingLoop, batch_size: int, size: int) -> TrainingHistory:
    group = loop.learner.optimizer.param_groups[0]
    return TrainingHistory(
        losses=tuple(trace.losses),
        step_losses=tuple(trace.step_losses),
        learning_rates=tuple(trace.learning_rates),
        batch_size=batch_size,
        num_examples=size,
        momentum=group.get("momentum"),
        weight_decay=loop.learner.l2 or group.get("weight_decay"),
        gradient_norm=trace.gradient_norm,
        update_norms=tuple(trace.update_norms),
        validation=tuple(trace.validation),
        best_epoch=loop.best_epoch,
        records=tuple(trace.records),
    )


def _check(num_epochs: int | None, num_steps: int | None, batch_size: int, *, given: bool) -> None:
    if num_epochs is not None and num_steps is not None:
        raise ValueError(f"give num_epochs or num_steps, not both (got {num_epochs} and {num_steps})")
    if num_epochs is None and num_steps is None and not given:
        raise ValueError("say how long to train: num_epochs or num_steps")
    name, count = ("num_epochs", num_epochs) if num_steps is None else ("num_steps", num_steps)
    if (count is not None and count < 1) or batch_size < 1:
        raise ValueError(f"{name} and batch_size must be at least 1, got {count} and {batch_size}")


def _optimizer(
    optimizer: OptimizerName | OptimizerFactory | torch.optim.Optimizer,
    parameters: list[nn.Parameter],
    *,
    lr: float | None,
    momentum: float,
    weight_decay: float,
) -> torch.optim.Optimizer:
    if isinstance(optimizer, torch.optim.Optimizer):
        if lr is not None:
            raise ValueError("the optimizer has its own learning rate: leave lr out")
    elif lr is None or not lr > 0:
        raise ValueError(f"lr must be positive, got {lr}")
    if not isinstance(optimizer, str) and weight_decay:
        raise ValueError("weight_decay is for optimizers by name: set it in the optimizer that you pass")
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if callable(optimizer):
        return optimizer(parameters, lr=lr)
    known: dict[str, OptimizerFactory] = {
        "sgd": partial(torch.optim.SGD, momentum=momentum, weight_decay=weight_decay),
        "adam": partial(torch.optim.Adam, weight_decay=weight_decay),
        # Its own tolerances would end each call long before a small gradient norm is reached.
        "lbfgs": partial(
            torch.optim.LBFGS, line_search_fn="strong_wolfe", tolerance_grad=0.0, tolerance_change=0.0
        ),
    }
    if optimizer not in known:
        raise ValueError(f"unknown optimizer '{optimizer}': choose sgd, adam or lbfgs, or pass an optimizer")
    return known[optimizer](parameters, lr=lr)


def _validate(
    model: nn.Module, loss: Loss, validation: TrainingData | Callable[[nn.Module], float] | None
) -> Callable[[nn.Module], float] | None:
    if validation is None or callable(validation):
        return validation
    read = readable(model, validation)
    return lambda model: evaluate(model, loss, read).loss  # type: ignore[arg-type]


def _settings(
    loop: TrainingLoop, batch_size: int, schedule: ScheduleName | Schedule, keep: str, generator: torch.Generator
) -> dict[str, Any]:
    """Return what the weights at the end depend on, as far as it can be written down."""
    learner, data = loop.learner, loop.data
    groups = [{k: v for k, v in g.items() if k != "params"} for g in learner.optimizer.param_groups]
    tensors: Iterable[Tensor]
    if isinstance(data, OwnBatches):
        tensors = data.fixed_tensors()
    else:
        tensors = data if isinstance(data, tuple) else getattr(data, "tensors", ())
    weights = [] if loop.example_weights is None else [loop.example_weights]
    return {
        "model": fingerprint(learner.model.state_dict().values()),
        "data": lambda: fingerprint(tensors),
        "num_examples": num_examples(data),
        "loss": described(learner.loss.loss),
        "optimizer": f"{type(learner.optimizer).__name__} {groups}",
        "num_steps": loop.order.num_steps,
        "steps_per_epoch": loop.order.steps_per_epoch,
        "batch_size": batch_size,
        "batches": fingerprint(loop.order.given),
        "schedule": described(schedule),
        "step": described(loop.step),
        "max_gradient_norm": learner.max_gradient_norm,
        "gradient_norm": learner.gradient_norm,
        "example_weights": fingerprint(weights),
        "keep": keep,
        "generator": fingerprint([generator.get_state()]),
    }
