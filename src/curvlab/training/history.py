"""What a training went through: its numbers, its length along the gradient, and all that it takes to repeat it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from curvlab.arguments import real
from curvlab.described import seeded_reading
from curvlab.problem.batch import Batch
from curvlab.shown import Shown, Summary, counted

State: TypeAlias = tuple[Tensor, ...]  # the parameters (P,), then the optimizer's own vectors (P,)


# --------------------------------------------------------------------- what the optimizer does
class UpdateRule(Protocol):
    """One step of an optimizer, differentiable in the state and in the gradient, coordinate by coordinate.

    torch.optim's own `differentiable=True` is not used: it differentiates the root of Adam's mean square, whose
    derivative at 0 is infinite, and it changes its tensors in place, which `vmap` over tangents refuses.
    """

    @property
    def num_buffers(self) -> int:
        """Vectors that the optimizer keeps beside the parameters; all of them start at 0."""
        ...

    def update(self, state: State, gradient: Tensor, *, lr: float, step: int) -> State:
        """Return the state after step number `step` (from 1), with new tensors."""
        ...


@dataclass(frozen=True)
class SGDRule:
    """`torch.optim.SGD`: v <- momentum v + g + weight_decay θ, θ <- θ - lr v.

    Attributes:
        momentum: of the velocity, which starts at 0.
        weight_decay: L2, loss + weight_decay / 2 ‖θ‖².
        nesterov: θ <- θ - lr (g + weight_decay θ + momentum v) instead.
    """

    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    num_buffers = 1  # the velocity

    def update(self, state: State, gradient: Tensor, *, lr: float, step: int) -> State:
        """Return parameters and velocity."""
        position, velocity = state
        slope = gradient + self.weight_decay * position
        velocity = self.momentum * velocity + slope
        return position - lr * (slope + self.momentum * velocity if self.nesterov else velocity), velocity


@dataclass(frozen=True)
class AdamRule:
    """`torch.optim.Adam` (Kingma & Ba 2015), or `AdamW` (Loshchilov & Hutter 2019).

    Attributes:
        betas: of the two moving averages.
        eps: added to the root of the second one.
        weight_decay: L2; with `decoupled` θ <- (1 - lr weight_decay) θ instead.
        decoupled: as AdamW has it.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    num_buffers = 2  # the two moving averages

    def update(self, state: State, gradient: Tensor, *, lr: float, step: int) -> State:
        """Return parameters, mean and mean square."""
        position, mean, square = state
        if self.decoupled:
            position = position * (1 - lr * self.weight_decay)
        else:
            gradient = gradient + self.weight_decay * position
        mean = self.betas[0] * mean + (1 - self.betas[0]) * gradient
        square = self.betas[1] * square + (1 - self.betas[1]) * gradient.square()
        # Where a gradient has always been 0 (dead units) the root has no derivative. A change δ of the gradient
        # moves the step by δ/eps to first order there, which a derivative of 0 of the root gives.
        seen = square > 0
        root = torch.where(seen, torch.where(seen, square, 1.0).sqrt(), 0.0)
        scale = lr / (1 - self.betas[0] ** step)
        return position - scale * mean / (root / math.sqrt(1 - self.betas[1] ** step) + self.eps), mean, square

    def rates(self, state: State, *, lr: float, step: int) -> Tensor:
        """Return lr / (sqrt(v̂) + eps) of each parameter in a step, by the state after it; 0 without a gradient."""
        square = state[2]
        root = square.sqrt() / math.sqrt(1 - self.betas[1] ** step)
        return torch.where(square > 0, lr / (root + self.eps), 0.0)


def rule_of(optimizer: torch.optim.Optimizer) -> UpdateRule:
    """Return what SGD, Adam or AdamW do with a gradient, or raise a ValueError that says what can be recorded."""
    group, kind = optimizer.param_groups[0], type(optimizer)
    if kind not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        raise ValueError(f"record=True knows the steps of SGD, Adam and AdamW, not of {kind.__name__}")
    unusual = [name for name in ("dampening", "amsgrad", "maximize") if group.get(name)]
    unusual += ["several groups of parameters"] if len(optimizer.param_groups) > 1 else []
    unusual += ["steps taken before"] if optimizer.state else []
    if unusual:
        raise ValueError(f"record=True cannot repeat an optimizer with {', '.join(unusual)}: use one without")
    if kind is torch.optim.SGD:
        return SGDRule(group["momentum"], group["weight_decay"], group["nesterov"])
    decoupled = kind is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))
    return AdamRule(group["betas"], group["eps"], group["weight_decay"], decoupled)


# ------------------------------------------------------------------------------------ the run
_NUM_PROBED = 32


@dataclass(frozen=True)
class DataProbe:
    """What tells a run's data from other data, at the cost of reading 32 examples.

    Attributes:
        num_examples: N.
        numbers: (K, 2, 2), fp64: of inputs and targets of up to 32 examples, evenly spaced, a sum over fixed waves
            and the norm; nan where the same example reads differently twice, as with augmentation.
    """

    num_examples: int
    numbers: Tensor

    @classmethod
    def of(cls, read: Callable[[Tensor], Batch], num_examples: int) -> DataProbe:
        """Read examples, `read` of their indices (1,), with the random states as they were."""
        places = torch.linspace(0, num_examples - 1, min(_NUM_PROBED, num_examples)).round().long().split(1)
        with seeded_reading():
            once, again = (torch.stack([_numbers(*read(place)) for place in places]) for _ in range(2))
        return cls(num_examples, torch.where(once == again, once, math.nan))

    def differs(self, other: DataProbe, dtypes: tuple[torch.dtype, ...]) -> str:
        """Return what is another in other data, in words, or ""; to half the digits of the coarsest dtype."""
        if other.num_examples != self.num_examples:
            return "another number of examples"
        scale = self.numbers[..., 1:].abs() * max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5
        differ = ((other.numbers - self.numbers).abs() > scale).flatten(1).any(1)  # nan compares as equal
        return f"{int(differ.sum())} of {len(differ)} examples that were read differ" if bool(differ.any()) else ""

    def check(self, read: Callable[[Tensor], Batch], num_examples: int, dtypes: tuple[torch.dtype, ...]) -> None:
        """Raise a ValueError where other data is read."""
        if found := self.differs(DataProbe.of(read, num_examples), dtypes):
            raise ValueError(
                f"these are not the data of the run ({found}): {num_examples:,} examples, the run had "
                f"{self.num_examples:,}. Pass them as `train` had them, in the same order; for the damping alone "
                "pass the run's length, run=RunLength.of(run)"
            )


def _numbers(inputs: Any, targets: Tensor) -> Tensor:
    """Return waves and norm of the inputs (each of a mapping, by name) and of the targets, (2, 2)."""
    parts = [inputs] if isinstance(inputs, Tensor) else [inputs[name] for name in sorted(inputs)]
    return torch.stack([sum(map(_projected, parts), torch.zeros(2).double()), _projected(targets)])


def _projected(values: Tensor) -> Tensor:
    flat = values.detach().flatten().double().cpu()
    # The same places have the same waves whatever the length: padding with zeros changes nothing.
    waves = torch.arange(1.0, len(flat) + 1, dtype=torch.float64).square().sin() + 1.5
    return torch.stack([waves @ flat, flat.norm()])


@dataclass(frozen=True, repr=False)
class TrainingRun(Shown):
    """A training by single steps on given batches, complete enough to differentiate through it.

    `train(..., record=True)` returns it as `TrainingHistory.run`.

    Attributes:
        start: (P,), parameters that require gradients before the first step, in `named_parameters()` order.
        batches: indices of each step's examples.
        learning_rates: of each step.
        rule: what the optimizer does with a gradient.
        example_weights: (N,), see `MeanLoss`; None: all 1.
        data: what tells its data from other data; None: nothing is compared.
    """

    start: Tensor
    batches: tuple[Tensor, ...]
    learning_rates: tuple[float, ...]
    rule: UpdateRule
    example_weights: Tensor | None = None
    data: DataProbe | None = None

    def __post_init__(self) -> None:
        if len(self.batches) != len(self.learning_rates) or not self.batches:
            raise ValueError(
                f"there are {len(self.batches)} batches and {len(self.learning_rates)} learning rates: every step "
                "needs one of each"
            )

    @classmethod
    def of(cls, run: TrainingHistory | TrainingRun) -> TrainingRun:
        """Return the run that a history has recorded, or the run itself."""
        found = run.run if isinstance(run, TrainingHistory) else run
        if not isinstance(found, cls | None):
            raise TypeError(f"run is what train(..., record=True) returned, got {type(run).__name__}")
        if found is None:
            raise ValueError(
                "the history has no record of the run's start and batches: train with train(..., record=True)"
            )
        return found

    @property
    def num_steps(self) -> int:
        """T, steps taken."""
        return len(self.batches)

    def summary(self) -> Summary:
        """Return its length and rule."""
        return Summary("training run", counted(self.num_steps, "step"), f"of {self.rule}")

    def check_data(self, read: Callable[[Tensor], Batch], num_examples: int, dtype: torch.dtype) -> None:
        """Raise a ValueError unless `read`, of indices (1,), gives the run's examples."""
        if self.data is not None:
            self.data.check(read, num_examples, (dtype, self.start.dtype))

    def length(self) -> RunLength:
        """Return how far the run goes; only for SGD."""
        if not isinstance(self.rule, SGDRule):
            raise ValueError(
                f"only a run of SGD has a length along the gradient, not one of {type(self.rule).__name__}: its "
                "exact derivative is unrolled_response"
            )
        return RunLength(self.learning_rates, self.rule.momentum, self.rule.weight_decay)


@dataclass(frozen=True, repr=False)
class TrainingHistory(Shown):
    """What `train` returns.

    Attributes:
        losses: mean training loss of each epoch's batches, as met on the way; one number for each epoch.
        step_losses: loss of each step's batch, before the step.
        learning_rates: of each step (of the first parameter group).
        batch_size: examples of a step.
        num_examples: N, size of the training set.
        momentum: of the optimizer; None where it has no such setting.
        weight_decay: likewise.
        gradient_norm: ‖∇L_B‖ at the last step; nan where neither clipping nor a limit asked for it.
        update_norms: ‖w after - w before‖ of each step; empty unless asked for.
        validation: value after each epoch; empty without validation.
        best_epoch: the epoch (from 0) whose weights were kept; None unless keep="best".
        records: what `on_epoch_end` returned, for each epoch; empty without it.
        run: with `record`, all that `unrolled_response` needs; else None.
    """

    losses: tuple[float, ...]
    step_losses: tuple[float, ...]
    learning_rates: tuple[float, ...]
    batch_size: int
    num_examples: int
    momentum: float | None = None
    weight_decay: float | None = None
    gradient_norm: float = math.nan
    update_norms: tuple[float, ...] = ()
    validation: tuple[float, ...] = ()
    best_epoch: int | None = None
    records: tuple[Mapping[str, Any] | None, ...] = ()
    run: TrainingRun | None = None

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken."""
        return len(self.learning_rates)

    def summary(self) -> Summary:
        """Return the training loss of the first and the last epoch, and how long it took."""
        found = f"from {self.losses[0]:.4g} to {self.losses[-1]:.4g}" if self.losses else "of no step"
        examples = f"{counted(self.num_examples, 'example')} in batches of {self.batch_size:,}"
        length = (counted(self.num_steps, "step"), counted(len(self.losses), "epoch"))
        return Summary("training: loss", found, examples, length)


# ---------------------------------------------------------------------------------- its length
@dataclass(frozen=True, repr=False)
class RunLength(Shown):
    """How far SGD goes along a constant gradient: what a run says about curvature it cannot resolve.

    A run of T steps moves along an eigenvector of curvature μ by (1 - e^{-time μ}) / μ per unit of gradient, which
    a damping of 1 / time imitates (Bae et al. 2024).

    Attributes:
        learning_rates: of each step.
        momentum: of SGD; 0 without.
        weight_decay: L2, which is curvature that every direction has.
    """

    learning_rates: tuple[float, ...]
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1 or not 0 <= self.weight_decay < math.inf:
            raise ValueError(
                f"momentum must be in [0, 1) and weight_decay at least 0, got {self.momentum} and "
                f"{self.weight_decay}"
            )
        if not all(real("a learning rate", rate) >= 0 for rate in self.learning_rates) or not self.time > 0:
            raise ValueError("a run needs at least one step with a positive learning rate, and none below 0")

    @classmethod
    def constant(cls, lr: float, num_steps: int, *, momentum: float = 0.0, weight_decay: float = 0.0) -> RunLength:
        """Return the length of `num_steps` steps at one learning rate."""
        return cls((lr,) * num_steps, momentum, weight_decay)

    @classmethod
    def of(cls, run: TrainingHistory | RunLength | TrainingRun) -> RunLength:
        """Return the length of a training by SGD, as `train` reports it."""
        if isinstance(run, RunLength):
            return run
        if isinstance(run, TrainingRun):
            return run.length()
        if not isinstance(run, TrainingHistory):
            raise TypeError(f"run is what train(...) returned, or a RunLength, got {type(run).__name__}")
        if run.momentum is None:
            raise ValueError(
                "the history is not of SGD (it has no momentum), so its learning rates are no distances along the "
                "gradient: pass a damping, or RunLength with the effective rate of each step"
            )
        return cls(run.learning_rates, run.momentum, run.weight_decay or 0.0)

    def summary(self) -> Summary:
        """Return time and damping."""
        about = f"damping {self.damping:.3g}; {counted(len(self.learning_rates), 'step')} of SGD"
        settings = (f"momentum {self.momentum:g}", f"weight decay {self.weight_decay:g}")
        return Summary("run length", f"{self.time:.4g}", about, settings)

    @property
    def effective_rates(self) -> tuple[float, ...]:
        """How far each step's gradient moves the end of the run: c_t = η_t + m c_{t+1}."""
        found: list[float] = []
        for rate in reversed(self.learning_rates):
            found.append(rate + self.momentum * (found[-1] if found else 0.0))
        return tuple(reversed(found))

    @property
    def time(self) -> float:
        """The sum of the effective rates: ηT / (1 - m) for runs much longer than 1 / (1 - m) steps.

        The displacement per unit of a constant gradient, from rest; unit: squared parameter per loss.
        """
        return sum(self.effective_rates)

    @property
    def damping(self) -> float:
        """weight_decay + 1 / time: G + damping I stands for the whole run, with no number to choose."""
        return self.weight_decay + 1 / self.time
