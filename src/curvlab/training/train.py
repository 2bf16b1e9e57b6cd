"""Minibatch training, reproducible from one generator."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from curvlab.arguments import positive, real, whole
from curvlab.iterate import Checkpoint, iterate
from curvlab.linalg import flatten
from curvlab.problem import Batches, Data, Problem
from curvlab.progress import can_be_silent
from curvlab.seeding import generator_of, seeded_by
from curvlab.training.evaluate import evaluate
from curvlab.training.history import DataProbe, TrainingHistory, TrainingRun, UpdateRule, rule_of
from curvlab.training.schedules import BatchOrder, Schedule, ScheduleName, named_schedule
from curvlab.training.steps import (
    Learner,
    Loss,
    MeanLoss,
    Step,
    TrainingBatch,
    closure_step,
    gradient_step,
    opened,
)

OptimizerName: TypeAlias = Literal["sgd", "adam", "lbfgs"]
OptimizerFactory: TypeAlias = Callable[..., torch.optim.Optimizer]
OnEpochEnd: TypeAlias = Callable[[int, float], Mapping[str, Any] | None]


class TrainingDivergedError(ArithmeticError):
    """The loss became infinite or NaN."""


@can_be_silent
def train(
    model: nn.Module | Problem,
    loss: Loss | None = None,
    train_data: Data | None = None,
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
    validation: Data | Callable[[nn.Module], float] | None = None,
    keep: Literal["last", "best"] = "last",
    measure_updates: bool = False,
    record: bool = False,
    on_epoch_end: OnEpochEnd | None = None,
    progress: bool | str = True,
    callback: Callable[[TrainingState], object] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    generator: torch.Generator | int,
) -> TrainingHistory:
    """Train `model` in place, and leave it in eval mode.

    Every epoch visits all examples once in a new order; the last batch may be smaller. Only parameters
    that require gradients move. Same model, data and generator state: bit-identical weights (one device,
    one number of threads), also after an interruption with `checkpoint`.

    Args:
        model: on the device to train on; batches are moved there. Language models map tokens (B, T) to logits
            (B, T, V), or to a record with `.logits`. Or a `Problem` in the place of model, loss, train_data and
            example_weights.
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
        record: keep the start, the batches and the optimizer's rule as `TrainingHistory.run`, which
            `unrolled_response` differentiates through; for SGD, Adam and AdamW.
        on_epoch_end: called with (epoch from 0, its mean loss); a mapping that it returns is kept in the history,
            and in checkpoints. Not called again for epochs before an interruption.
        progress: show a bar; a text is its name.
        callback: called with the `TrainingState` after each step.
        checkpoint: file in which the unfinished training is kept, saved every minute; the same call resumes there.
        generator: source of the order of examples, and of dropout; or a seed.

    Raises:
        TrainingDivergedError: the loss of a batch was not finite; the model is not usable then.
        ValueError: a setting is out of range, or nothing is there to train; or the checkpoint is of other work.
    """
    model, loss, data, example_weights = opened(model, loss, train_data, "train_data", weights=example_weights)
    size = data.num_examples
    _check(num_epochs, num_steps, batch_size, given=batches is not None)
    if keep not in ("last", "best"):
        raise ValueError(f"keep must be 'last' or 'best', got {keep!r}")
    if keep == "best" and validation is None:
        raise ValueError("keep='best' needs a validation set to choose by")
    factors = named_schedule(schedule)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError("the model has no parameter that requires gradients: freeze fewer of them")
    stepper = _optimizer(optimizer, parameters, lr=lr, momentum=momentum, weight_decay=weight_decay)
    if not {id(p) for group in stepper.param_groups for p in group["params"]} & set(map(id, parameters)):
        raise ValueError("the optimizer holds none of the model's parameters: make it of model.parameters()")
    by_closure = isinstance(stepper, torch.optim.LBFGS)
    if optimizer == "lbfgs" and batches is None and batch_size < size:
        raise ValueError(f"lbfgs needs full batches: batch_size is {batch_size}, there are {size} examples")
    if record and (max_gradient_norm is not None or keep == "best" or step not in (None, gradient_step)):
        raise ValueError("record=True repeats plain steps to the last: without clipping, keep='best' and step")
    learner = Learner(
        model,
        MeanLoss(loss),
        stepper,
        max_gradient_norm=max_gradient_norm,
        gradient_norm=gradient_norm,
        l2=weight_decay if by_closure else 0.0,
    )
    training = _Training(
        learner,
        data,
        BatchOrder(size, batch_size=batch_size, num_epochs=num_epochs, num_steps=num_steps, given=batches),
        step or (closure_step if by_closure else gradient_step),
        generator_of(generator),
        schedule=factors,
        example_weights=example_weights,
        measure_updates=measure_updates,
        validate=_validate(model, loss, validation),
        keep_best=keep == "best",
        on_epoch_end=on_epoch_end,
        rule=rule_of(stepper) if record else None,
        key={
            "optimizer": (type(stepper) if stepper is optimizer else optimizer, stepper.state_dict()),
            "validation": validation if keep == "best" else None,
        },
    )
    with seeded_by(training.generator, parameters[0].device):
        return iterate(
            training,
            name="training",
            total=training.order.num_steps,
            progress=progress,
            callback=callback,
            checkpoint=checkpoint,
        )


# ------------------------------------------------------------------------------------- the loop
@dataclass
class TrainingState:
    """What a training has met so far: one entry for each step or epoch; see `TrainingHistory`.

    Attributes:
        model: as it is now.
        optimizer: likewise.
        generator: of the order of examples.
        dropout: the global random state, from which dropout draws.
        batches: of the epoch at work.
        best: weights and buffers of the best epoch so far; empty before it.
        num_epochs: finished.
        arrived: whether the gradient was small enough, so that no further step is taken.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    dropout: _GlobalRandomState
    batches: list[Tensor] = field(default_factory=list)
    step_losses: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    update_norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    records: list[Any] = field(default_factory=list)
    best: dict[str, Tensor] = field(default_factory=dict)
    best_epoch: int | None = None
    num_epochs: int = 0
    gradient_norm: float = math.nan
    arrived: bool = False
    done: bool = False

    @property
    def num_steps(self) -> int:
        """Steps taken so far."""
        return len(self.step_losses)

    @property
    def status(self) -> str:
        """The loss of the last batch."""
        return f"loss {self.step_losses[-1]:.4g}" if self.step_losses else ""


@dataclass(frozen=True)
class _GlobalRandomState:
    """The global random state of the CPU and of the model's device, as part of a state."""

    device: torch.device

    def state_dict(self) -> dict[str, Tensor | None]:
        on_gpu = self.device.type == "cuda"
        return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state(self.device) if on_gpu else None}

    def load_state_dict(self, stored: Mapping[str, Tensor | None]) -> None:
        torch.set_rng_state(stored["cpu"].cpu())  # type: ignore[union-attr]
        if stored["cuda"] is not None:
            torch.cuda.set_rng_state(stored["cuda"].cpu(), self.device)


@dataclass
class _Training:
    """Epochs of steps, with what happens around them; see the arguments of `train`."""

    learner: Learner
    data: Batches
    order: BatchOrder
    take_step: Step
    generator: torch.Generator
    schedule: Schedule | None
    example_weights: Tensor | None
    measure_updates: bool
    validate: Callable[[nn.Module], float] | None
    keep_best: bool
    on_epoch_end: OnEpochEnd | None
    rule: UpdateRule | None
    key: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.device = self.learner.parameters[0].device
        self.rates = [float(group["lr"]) for group in self.learner.optimizer.param_groups]
        self.start = None if self.rule is None else flatten(self.learner.parameters).detach().clone()

    def depends_on(self) -> Mapping[str, Any]:
        """Return what the weights at the end depend on."""
        return {
            **self.key,
            "model": self.learner.model,
            "data": self.data,
            "loss": self.learner.loss.loss,
            "step": self.take_step,
            "max_gradient_norm": self.learner.max_gradient_norm,
            "gradient_norm": self.learner.gradient_norm,
            "schedule": self.schedule,
            "example_weights": self.example_weights,
            "batches": vars(self.order),
            "keep": self.keep_best,
            "generator": self.generator,
        }

    def init(self) -> TrainingState:
        """Return the state before the first step."""
        self.learner.model.train()
        self.first_order = self.generator.get_state()
        return TrainingState(
            self.learner.model, self.learner.optimizer, self.generator, _GlobalRandomState(self.device)
        )

    def step(self, state: TrainingState) -> TrainingState:
        """Take one step, and what follows on the last one of an epoch."""
        first = state.num_epochs * self.order.steps_per_epoch
        if state.num_steps == first:
            state.batches = self.order.epoch(state.num_epochs, state.generator)
            state.model.train()
        self._move(state, state.batches[state.num_steps - first])
        ended = state.num_steps == first + len(state.batches)
        if ended or (state.arrived and state.num_steps > first):
            self._end_epoch(state, first)
        state.done = state.arrived or state.num_steps == self.order.num_steps
        return state

    def _move(self, state: TrainingState, indices: Tensor) -> None:
        learner = self.learner
        if self.schedule is not None:
            factor = real("what schedule returns", self.schedule(state.num_steps, self.order.num_steps))
            for group, rate in zip(learner.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * factor
        before = flatten(learner.parameters).detach().clone() if self.measure_updates else None
        inputs, targets = self.data.together(indices)
        weights = None if self.example_weights is None else self.example_weights[indices].to(self.device)
        info = self.take_step(learner, TrainingBatch(inputs, targets, weights))
        if not math.isfinite(info.loss):
            raise self._diverged(state, info.loss)
        state.gradient_norm = info.gradient_norm
        state.arrived = learner.arrived(info.gradient_norm)
        if state.arrived:
            return
        state.step_losses.append(info.loss)
        state.sizes.append(len(indices))
        state.learning_rates.append(float(learner.optimizer.param_groups[0]["lr"]))
        if before is not None:
            state.update_norms.append(float((flatten(learner.parameters).detach() - before).norm()))

    def _end_epoch(self, state: TrainingState, first: int) -> None:
        total = 0.0
        for loss, size in zip(state.step_losses[first:], state.sizes[first:], strict=True):
            total += loss * size
        state.losses.append(total / sum(state.sizes[first:]))
        if self.validate is not None:
            value = self.validate(state.model)
            best = min((v for v in state.validation if math.isfinite(v)), default=math.inf)
            state.validation.append(value)
            if self.keep_best and value < best:
                state.best_epoch = state.num_epochs
                state.best = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
        if self.on_epoch_end is not None:
            state.records.append(self.on_epoch_end(state.num_epochs, state.losses[-1]))
        state.num_epochs += 1

    def result(self, state: TrainingState) -> TrainingHistory:
        """Return the history; the model is left with the weights that are kept, in eval mode."""
        if not all(bool(parameter.isfinite().all()) for parameter in self.learner.parameters):
            raise self._diverged(state, math.nan)  # the last step can do it, too
        if state.best:
            state.model.load_state_dict(state.best)
        state.model.zero_grad()
        state.model.eval()
        group, rates = state.optimizer.param_groups[0], tuple(state.learning_rates)
        run = None
        if self.rule is not None and self.start is not None:
            probe = DataProbe.of(self.data.together, self.data.num_examples)
            batches = self._batches(state.num_steps)
            run = TrainingRun(self.start, batches, rates, self.rule, self.example_weights, probe)
        return TrainingHistory(
            losses=tuple(state.losses),
            step_losses=tuple(state.step_losses),
            learning_rates=rates,
            batch_size=self.order.batch_size,
            num_examples=self.order.num_examples,
            momentum=group.get("momentum"),
            weight_decay=self.learner.l2 or group.get("weight_decay"),
            gradient_norm=state.gradient_norm,
            update_norms=tuple(state.update_norms),
            validation=tuple(state.validation),
            best_epoch=state.best_epoch,
            records=tuple(state.records),
            run=run,
        )

    def _batches(self, num_steps: int) -> tuple[Tensor, ...]:
        """Return the batches of all steps, drawn once more."""
        again = torch.Generator(self.generator.device)
        again.set_state(self.first_order)
        batches = [batch for epoch in range(self.order.num_epochs) for batch in self.order.epoch(epoch, again)]
        return tuple(batches[:num_steps])

    def _diverged(self, state: TrainingState, value: float) -> TrainingDivergedError:
        if state.num_steps == 0:
            return TrainingDivergedError(
                f"the loss is {value} before the first step: look for NaN or huge values in the inputs or "
                "targets, or in the initial weights"
            )
        # After the last step no epoch is open: the one that has ended did it.
        epoch = min(state.num_steps // self.order.steps_per_epoch, self.order.num_epochs - 1)
        lr = float(state.optimizer.param_groups[0]["lr"])
        return TrainingDivergedError(
            f"training diverged: the loss became {value} in epoch {epoch} (step {state.num_steps}) with "
            f"{type(state.optimizer).__name__.lower()} at lr={lr:.3g}. Lower the learning rate, for example to "
            f"lr={lr / 10:.3g}, or momentum; or warm up longer."
        )


# -------------------------------------------------------------------------------- its arguments
def _check(num_epochs: int | None, num_steps: int | None, batch_size: int, *, given: bool) -> None:
    if num_epochs is not None and num_steps is not None:
        raise ValueError(f"give num_epochs or num_steps, not both (got {num_epochs} and {num_steps})")
    if num_epochs is None and num_steps is None and not given:
        raise ValueError("say how long to train: num_epochs or num_steps")
    for name, count in (("num_epochs", num_epochs), ("num_steps", num_steps), ("batch_size", batch_size)):
        if count is not None:
            whole(name, count)


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
    else:
        lr = positive("lr", lr)
        if not 0 <= real("momentum", momentum) < 1 or not 0 <= real("weight_decay", weight_decay) < math.inf:
            raise ValueError(
                f"momentum lies from 0 to 1 and weight_decay is not negative, got {momentum} and {weight_decay}"
            )
    if not isinstance(optimizer, str) and weight_decay:
        raise ValueError("weight_decay is for optimizers by name: set it in the optimizer that you pass")
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if callable(optimizer):
        try:
            return optimizer(parameters, lr=lr)
        except TypeError as error:
            raise TypeError(
                f"the optimizer is called with (parameters, lr=lr), which does not do ({error}): give it its "
                "other settings by functools.partial(Ginger, rank=4, ...)"
            ) from error
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


def _validate(model: nn.Module, loss: Loss, validation: Any) -> Callable[[nn.Module], float] | None:
    if validation is None or callable(validation):
        return validation
    read = opened(model, loss, validation, "validation")[2]
    return lambda model: evaluate(model, loss, read).loss
