"""The one loop over batches that all training goes through."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from curvlab.checkpoint import Checkpoint
from curvlab.linalg import flatten
from curvlab.problem.examples import Pairs
from curvlab.seeding import seeded_by
from curvlab.training.batch_order import BatchOrder
from curvlab.training.own_batches import OwnBatches, select
from curvlab.training.schedules import Schedule
from curvlab.training.steps import Learner, Step, TrainingBatch

OnEpochEnd: TypeAlias = Callable[[int, float], Mapping[str, Any] | None]


class TrainingDivergedError(ArithmeticError):
    """The loss became infinite or NaN."""


@dataclass
class Trace:
    """What a training has met so far: one entry for each step or epoch (see `TrainingHistory`)."""

    step_losses: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    update_norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    records: list[Any] = field(default_factory=list)
    gradient_norm: float = math.nan
    arrived: bool = False


@dataclass
class TrainingLoop:
    """Epochs of steps, with what happens around them.

    Attributes:
        learner: model, loss and optimizer.
        data: the training set.
        order: batches of every epoch.
        step: what is done with a batch.
        schedule: factors of the learning rates; None leaves them to the optimizer.
        example_weights: (N,), or None.
        measure_updates: record ‖Δw‖ of every step.
        validate: value of the model, lower is better; None: no validation.
        keep_best: end with the weights of the epoch with the lowest value.
        on_epoch_end: called with (epoch from 0, its mean loss); what it returns is kept.
        on_step: called with the number of steps taken.
        checkpoint: where unfinished training is kept.
    """

    learner: Learner
    data: Pairs | OwnBatches
    order: BatchOrder
    step: Step
    schedule: Schedule | None = None
    example_weights: Tensor | None = None
    measure_updates: bool = False
    validate: Callable[[nn.Module], float] | None = None
    keep_best: bool = False
    on_epoch_end: OnEpochEnd | None = None
    on_step: Callable[[int], None] | None = None
    checkpoint: Checkpoint | None = None

    def __post_init__(self) -> None:
        self.trace = Trace()
        self.best_state: dict[str, Tensor] | None = None
        self.best_epoch: int | None = None
        self._device = self.learner.parameters[0].device
        self._rates = [float(group["lr"]) for group in self.learner.optimizer.param_groups]
        self._batches: list[Tensor] = []  # of the current epoch

    def run(
        self, generator: torch.Generator, progress: Callable[[Iterable[int]], Iterable[int]] | None = None
    ) -> Trace:
        """Train to the end, or go on from the checkpoint; leave the model in eval mode."""
        model = self.learner.model
        with seeded_by(generator, self._device):
            self._resume(generator)
            epochs = range(self.order.num_epochs)
            for epoch in epochs if progress is None else progress(epochs):
                if self.trace.arrived:
                    break
                if epoch >= len(self.trace.losses):  # not before the interruption
                    self._epoch(epoch, generator)
        if not all(bool(parameter.isfinite().all()) for parameter in self.learner.parameters):
            raise self._diverged(math.nan)  # the last step can do it, too
        if self.best_state is not None:
            model.load_state_dict(self.best_state)
        model.zero_grad()
        model.eval()
        return self.trace

    def _epoch(self, epoch: int, generator: torch.Generator) -> None:
        first = epoch * self.order.steps_per_epoch
        taken = len(self.trace.step_losses) - first
        if taken == 0:
            self._batches = self.order.epoch(epoch, generator)
        self.learner.model.train()
        for indices in self._batches[taken:]:
            self._take_step(indices)
            if self.trace.arrived:
                break
            if len(self.trace.step_losses) < first + len(self._batches):
                self._save_if_due(generator)
        if len(self.trace.step_losses) > first:  # it may have ended before its first step
            self._end_epoch(epoch, first)
        self._save_if_due(generator)

    def _take_step(self, indices: Tensor) -> None:
        learner, trace = self.learner, self.trace
        if self.schedule is not None:
            factor = self.schedule(len(trace.step_losses), self.order.num_steps)
            for group, rate in zip(learner.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor
        before = flatten(learner.parameters).detach().clone() if self.measure_updates else None
        info = self.step(learner, self._batch(indices))
        if not math.isfinite(info.loss):
            raise self._diverged(info.loss)
        trace.gradient_norm = info.gradient_norm
        trace.arrived = learner.arrived(info.gradient_norm)
        if trace.arrived:
            return
        trace.step_losses.append(info.loss)
        trace.sizes.append(len(indices))
        trace.learning_rates.append(float(learner.optimizer.param_groups[0]["lr"]))
        if before is not None:
            trace.update_norms.append(float((flatten(learner.parameters).detach() - before).norm()))
        if self.on_step is not None:
            self.on_step(len(trace.step_losses))

    def _batch(self, indices: Tensor) -> TrainingBatch:
        inputs, targets = select(self.data, indices, self._device)
        weights = None if self.example_weights is None else self.example_weights[indices].to(self._device)
        return TrainingBatch(inputs, targets, weights)

    def _end_epoch(self, epoch: int, first: int) -> None:
        trace, total = self.trace, 0.0
        for loss, size in zip(trace.step_losses[first:], trace.sizes[first:], strict=True):
            total += loss * size
        trace.losses.append(total / sum(trace.sizes[first:]))
        if self.validate is not None:
            value = self.validate(self.learner.model)
            best = min((v for v in trace.validation if math.isfinite(v)), default=math.inf)
            trace.validation.append(value)
            if self.keep_best and value < best:
                self.best_epoch = epoch
                state: Mapping[str, Tensor] = self.learner.model.state_dict()
                self.best_state = {name: tensor.clone() for name, tensor in state.items()}
        if self.on_epoch_end is not None:
            trace.records.append(self.on_epoch_end(epoch, trace.losses[-1]))

    def _save_if_due(self, generator: torch.Generator) -> None:
        if self.checkpoint is None or not self.checkpoint.due(len(self.trace.step_losses)):
            return
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        self.checkpoint.save(
            {
                "trace": vars(self.trace),
                "model": self.learner.model.state_dict(),
                "optimizer": self.learner.optimizer.state_dict(),
                "best_state": self.best_state,
                "best_epoch": self.best_epoch,
                "batches": self._batches,
                "generator": generator.get_state(),
                "cpu_random": torch.get_rng_state(),
                "cuda_random": cuda,
            }
        )

    def _resume(self, generator: torch.Generator) -> None:
        stored = None if self.checkpoint is None else self.checkpoint.load()
        if stored is None:
            return
        self.trace = Trace(**stored["trace"])
        self.learner.model.load_state_dict(stored["model"])
        self.learner.optimizer.load_state_dict(stored["optimizer"])
        self.best_state, self.best_epoch = stored["best_state"], stored["best_epoch"]
        self._batches = stored["batches"]
        generator.set_state(stored["generator"])
        torch.set_rng_state(stored["cpu_random"])
        if stored["cuda_random"] is not None:
            torch.cuda.set_rng_state(stored["cuda_random"], self._device)

    def _diverged(self, value: float) -> TrainingDivergedError:
        step = len(self.trace.step_losses)
        if step == 0:
            return TrainingDivergedError(
                f"the loss is {value} before the first step: look for NaN or huge values in the inputs or "
                "targets, or in the initial weights"
            )
        # After the last step no epoch is open: the one that has ended did it.
        epoch = min(step // self.order.steps_per_epoch, self.order.num_epochs - 1)
        optimizer = self.learner.optimizer
        lr = float(optimizer.param_groups[0]["lr"])
        return TrainingDivergedError(
            f"training diverged: the loss became {value} in epoch {epoch} (step {step}) with "
            f"{type(optimizer).__name__.lower()} at lr={lr:.3g}. Lower the learning rate, for example to "
            f"lr={lr / 10:.3g}, or momentum; or warm up longer."
        )
