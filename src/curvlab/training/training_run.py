"""All that a training run depends on, so that it can be walked through again; and how far it goes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlab.seeding import seeded_by
from curvlab.training.batch_order import BatchOrder
from curvlab.training.history import TrainingHistory
from curvlab.training.update_rules import SGDRule, UpdateRule


@dataclass(frozen=True)
class RunLength:
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
        if not 0 <= self.momentum < 1 or self.weight_decay < 0:
            raise ValueError(
                f"momentum must be in [0, 1) and weight_decay at least 0, got {self.momentum} and "
                f"{self.weight_decay}"
            )
        if not all(rate >= 0 for rate in self.learning_rates) or not self.time > 0:
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
        if run.momentum is None:
            raise ValueError(
                "the history is not of SGD (it has no momentum), so its learning rates are no distances along the "
                "gradient: pass a damping, or RunLength with the effective rate of each step"
            )
        return cls(run.learning_rates, run.momentum, run.weight_decay or 0.0)

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


@dataclass(frozen=True)
class TrainingRun:
    """A training by single steps on given batches, complete enough to differentiate through it.

    Attributes:
        start: (P,), parameters that require gradients before the first step, in `named_parameters()` order.
        batches: indices of each step's examples.
        learning_rates: of each step.
        rule: what the optimizer does with a gradient.
        example_weights: (N,), see `MeanLoss`; None: all 1.
    """

    start: Tensor
    batches: tuple[Tensor, ...]
    learning_rates: tuple[float, ...]
    rule: UpdateRule
    example_weights: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.batches) != len(self.learning_rates) or not self.batches:
            raise ValueError(
                f"there are {len(self.batches)} batches and {len(self.learning_rates)} learning rates: every step "
                "needs one of each"
            )

    @classmethod
    def recorded(
        cls,
        history: TrainingHistory,
        start: Tensor,
        *,
        batches: Iterable[Tensor] | None = None,
        generator: torch.Generator | None = None,
        rule: UpdateRule | None = None,
        example_weights: Tensor | None = None,
    ) -> TrainingRun:
        """Return the run that `train` reported.

        Args:
            history: what `train` returned.
            start: (P,), `flatten` of the trainable parameters, taken before the training.
            batches: those that `train` was given; or
            generator: in the state in which `train` got it, to draw the same batches again.
            rule: of the optimizer; None: SGD with the history's momentum and weight decay.
            example_weights: those that `train` was given.
        """
        if (batches is None) == (generator is None):
            raise ValueError(
                "give either the batches of the training, or a generator in the state it started from"
            )
        if rule is None:
            if history.momentum is None:
                raise ValueError(
                    "the history is not of SGD (it has no momentum): pass the optimizer's rule, such as AdamRule()"
                )
            rule = SGDRule(history.momentum, history.weight_decay or 0.0)
        drawn = list(batches) if batches is not None else _drawn(history, generator)  # type: ignore[arg-type]
        return cls(start.detach().clone(), tuple(drawn), history.learning_rates, rule, example_weights)

    @property
    def num_steps(self) -> int:
        """T, steps taken."""
        return len(self.batches)

    def length(self) -> RunLength:
        """Return how far the run goes; only for SGD."""
        if not isinstance(self.rule, SGDRule):
            raise ValueError(
                f"only a run of SGD has a length along the gradient, not one of {type(self.rule).__name__}: its "
                "exact derivative is unrolled_response"
            )
        return RunLength(self.learning_rates, self.rule.momentum, self.rule.weight_decay)


def _drawn(history: TrainingHistory, generator: torch.Generator) -> list[Tensor]:
    """Return the batches as `TrainingLoop.run` draws them."""
    order = BatchOrder(history.num_examples, batch_size=history.batch_size, num_steps=history.num_steps)
    with seeded_by(generator):
        return [batch for epoch in range(order.num_epochs) for batch in order.epoch(epoch, generator)]
