"""Functions brought down: K copies of parameters on shared batches, or one closure to a gradient norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from curvlab.arguments import positive
from curvlab.iterate import Checkpoint, iterate
from curvlab.shown import Shown, Summary, counted
from curvlab.training.schedules import BatchOrder, Schedule, ScheduleName, named_schedule
from curvlab.training.steps import gradient_norm as norm_of
from curvlab.training.steps import step_by_closure
from curvlab.training.train import TrainingDivergedError

# (positions (K, P), indices (B,) of the batch's examples) -> losses (K,), gradients (K, P)
EnsembleGradient: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
EnsembleOptimizer: TypeAlias = Literal["sgd", "adam"]


# ------------------------------------------------------------------------ K copies on shared batches
@dataclass(frozen=True, repr=False)
class Ensemble(Shown):
    """K trained copies of a model.

    Attributes:
        parameters: (K, P), parameters that require gradients in `named_parameters()` order.
        losses: (K, num_epochs), mean loss of each epoch's batches, as met on the way, with the copy's weights.
        learning_rates: of each step, the same for all copies.
    """

    parameters: Tensor
    losses: Tensor
    learning_rates: tuple[float, ...]

    def summary(self) -> Summary:
        """Return the range of the copies' losses in the last epoch, and how long it took."""
        last = self.losses[:, -1]
        return Summary(
            "ensemble: loss",
            f"from {float(last.min()):.4g} to {float(last.max()):.4g}",
            f"{len(last):,} copies in the last of {counted(self.losses.shape[1], 'epoch')}",
            (counted(len(self.learning_rates), "step"),),
        )


@dataclass
class DescentState:
    """Where K copies are.

    Attributes:
        positions: (K, P), as the one parameter of the optimizer.
        optimizer: of all copies: SGD and Adam work number by number, so that they do not see each other.
        total: (K,), the sum of the losses of the epoch's examples so far.
        means: (K,) for each finished epoch.
        learning_rates: of the steps taken.
    """

    positions: nn.ParameterList
    optimizer: torch.optim.Optimizer
    total: Tensor
    means: list[Tensor] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    done: bool = False

    @property
    def num_steps(self) -> int:
        """Steps taken so far."""
        return len(self.learning_rates)

    @property
    def copies(self) -> Tensor:
        """(K, P), where they are now, without graph."""
        return self.positions[0].detach()


def descend(
    start: Tensor,
    gradient: EnsembleGradient,
    order: BatchOrder,
    *,
    lr: float,
    optimizer: EnsembleOptimizer = "sgd",
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    schedule: ScheduleName | Schedule = "constant",
    progress: bool | str = True,
    callback: Callable[[DescentState], object] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    depends_on: Mapping[str, Any] | None = None,
) -> Ensemble:
    """Return where K copies end that all see the same batches.

    Args:
        start: (K, P), not changed.
        gradient: the K losses of a batch, and their gradients.
        order: the batches, which are given.
        lr: learning rate.
        optimizer: "sgd" or "adam".
        momentum: of SGD.
        weight_decay: L2, loss + weight_decay / 2 ||w||².
        schedule: as for `train`.
        progress: as for `train`.
        callback: called with the `DescentState` after each step.
        checkpoint: as for `train`.
        depends_on: what `gradient` is made of, by name: the checkpoint's.

    Raises:
        TrainingDivergedError: the loss of a copy was not finite.

    Cost: one call of `gradient` for each step. Memory: 3 K P numbers with SGD, 4 K P with Adam.
    """
    positive("lr", lr)
    if optimizer not in ("sgd", "adam"):
        raise ValueError(
            f"unknown optimizer '{optimizer}': choose sgd or adam for copies that are trained at once"
        )
    method = _Descent(
        start, gradient, order, lr, optimizer, momentum, weight_decay, named_schedule(schedule), depends_on or {}
    )
    return iterate(
        method,
        name="descent",
        total=order.num_steps,
        progress=progress,
        callback=callback,
        checkpoint=checkpoint,
    )


@dataclass(frozen=True)
class _Descent:
    """See the arguments of `descend`."""

    start: Tensor
    gradient: EnsembleGradient
    order: BatchOrder
    lr: float
    optimizer: str
    momentum: float
    weight_decay: float
    schedule: Schedule | None
    given: Mapping[str, Any]

    def depends_on(self) -> Mapping[str, Any]:
        return {
            **self.given,
            "start": self.start,
            "optimizer": (self.optimizer, self.lr, self.momentum, self.weight_decay),
            "schedule": self.schedule,
            "batches": vars(self.order),
        }

    def init(self) -> DescentState:
        positions = nn.ParameterList([nn.Parameter(self.start.clone())])
        optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(positions, self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
            if self.optimizer == "sgd"
            else torch.optim.Adam(positions, self.lr, weight_decay=self.weight_decay)
        )
        return DescentState(positions, optimizer, torch.zeros(len(self.start), dtype=torch.float64))

    def step(self, state: DescentState) -> DescentState:
        epoch = len(state.means)
        indices = self.order.given[state.num_steps]
        losses, state.positions[0].grad = self.gradient(state.copies, indices.to(self.start.device))
        values = losses.double().cpu()
        if not bool(values.isfinite().all()):
            raise self._diverged(values, epoch)
        factor = 1.0 if self.schedule is None else self.schedule(state.num_steps, self.order.num_steps)
        state.optimizer.param_groups[0]["lr"] = self.lr * factor
        state.optimizer.step()
        state.learning_rates.append(self.lr * factor)
        state.total += values * len(indices)
        first = epoch * self.order.steps_per_epoch
        if state.num_steps == first + self.order.steps_per_epoch:
            state.means.append(state.total / sum(map(len, self.order.given[first : state.num_steps])))
            state.total = torch.zeros_like(state.total)
        state.done = state.num_steps == self.order.num_steps
        return state

    def result(self, state: DescentState) -> Ensemble:
        return Ensemble(state.copies, torch.stack(state.means, dim=1), tuple(state.learning_rates))

    def _diverged(self, values: Tensor, epoch: int) -> TrainingDivergedError:
        copies = (~values.isfinite()).nonzero().flatten()[:5].tolist()
        return TrainingDivergedError(
            f"training diverged: the loss of copies {copies} is not finite in epoch {epoch} at lr={self.lr:.3g}. "
            f"Lower the learning rate, for example to lr={self.lr / 10:.3g}."
        )


# --------------------------------------------------------------------- one closure to a gradient norm
@dataclass(frozen=True)
class Minimum:
    """Where a minimisation ended.

    Attributes:
        value: the lowest value met.
        gradient_norm: ‖∇f‖ at the parameters as they are now.
        num_steps: optimizer steps taken.
        converged: whether the gradient norm is at most the one asked for.
    """

    value: float
    gradient_norm: float
    num_steps: int
    converged: bool


@dataclass
class MinimisationState:
    """How far a minimisation is.

    Attributes:
        parameters: of the function.
        optimizers: of these.
        stage: the optimizer at work.
        num_steps: steps taken by all of them, and evaluations that ended one.
        taken: steps of the optimizer at work.
        lowest: value met.
        gradient_norm: at the last step, before it.
    """

    parameters: nn.ParameterList
    optimizers: list[torch.optim.Optimizer]
    stage: int = 0
    num_steps: int = 0
    taken: int = 0
    lowest: float = math.inf
    gradient_norm: float = math.inf
    done: bool = False

    @property
    def status(self) -> str:
        """The gradient norm."""
        return f"gradient norm {self.gradient_norm:.2g}"


def minimize(
    closure: Callable[[], Tensor],
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    gradient_norm: float | Sequence[float],
    max_steps: int,
    progress: bool | str = True,
    callback: Callable[[MinimisationState], object] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    depends_on: Mapping[str, Any] | None = None,
) -> Minimum:
    """Let `optimizer` move `parameters` until ‖∇f‖ <= gradient_norm: for problems that have no batches.

    Args:
        closure: zeroes the gradients, computes f, calls backward() and returns f.
        parameters: of f.
        optimizer: of those parameters; its `step` takes a closure, e.g. torch.optim.LBFGS (with tolerance_grad and
            tolerance_change of 0: its own would end the search before a small gradient norm is reached). Several
            are used one after another.
        gradient_norm: where to stop; for several optimizers one for each.
        max_steps: optimizer steps at most, of each optimizer.
        progress: as for `train`.
        callback: called with the `MinimisationState` after each step.
        checkpoint: file in which parameters and the optimizers' states are kept, saved after a step when a minute
            has passed: the same call goes on there and ends at the same numbers. A step of L-BFGS is `max_iter`
            iterations, and starts again when it is killed.
        depends_on: what f is made of, by name: the checkpoint's.

    Cost: the optimizer's evaluations of f and its gradient, and one more when max_steps end the search.
    """
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    norms = [gradient_norm] if isinstance(gradient_norm, int | float) else list(gradient_norm)
    if len(optimizers) != len(norms):
        raise ValueError(f"there are {len(optimizers)} optimizers and {len(norms)} gradient norms: one for each")
    method = _Minimisation(closure, list(parameters), optimizers, norms, max_steps, depends_on or {})
    return iterate(method, name="minimisation", progress=progress, callback=callback, checkpoint=checkpoint)


@dataclass(frozen=True)
class _Minimisation:
    """See the arguments of `minimize`."""

    closure: Callable[[], Tensor]
    parameters: list[nn.Parameter]
    optimizers: list[torch.optim.Optimizer]
    norms: list[float]
    max_steps: int
    given: Mapping[str, Any]

    def depends_on(self) -> Mapping[str, Any]:
        return {
            **self.given,
            "start": self.parameters,
            "optimizer": [(type(optimizer), optimizer.state_dict()) for optimizer in self.optimizers],
            "gradient_norm": self.norms,
        }

    def init(self) -> MinimisationState:
        done = self.max_steps < 1
        return MinimisationState(nn.ParameterList(self.parameters), self.optimizers, done=done)

    def step(self, state: MinimisationState) -> MinimisationState:
        wanted = self.norms[state.stage]

        def watched() -> Tensor:
            value = self.closure()
            state.lowest = min(state.lowest, float(value.detach()))
            return value

        state.gradient_norm = step_by_closure(
            self.optimizers[state.stage], watched, self.parameters, gradient_norm_at_end=wanted
        )
        arrived, lost = state.gradient_norm <= wanted, not math.isfinite(state.gradient_norm)
        state.num_steps += 1
        state.taken += not arrived
        if arrived or lost or state.taken == self.max_steps:
            if state.stage + 1 == len(self.optimizers):
                state.done = True
            else:
                state.stage, state.taken = state.stage + 1, 0
        return state

    def result(self, state: MinimisationState) -> Minimum:
        if state.gradient_norm <= self.norms[-1]:  # the last step found so, and did not move
            return Minimum(state.lowest, state.gradient_norm, state.taken, converged=True)
        lowest = min(state.lowest, float(self.closure().detach()))
        norm = norm_of(self.parameters)
        return Minimum(lowest, norm, state.taken, converged=norm <= self.norms[-1])
