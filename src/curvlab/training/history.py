"""What a training went through."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TrainingHistory:
    """A record that is complete enough to differentiate through the training later.

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

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken."""
        return len(self.learning_rates)

    @property
    def final_lr(self) -> float:
        """Learning rate of the last step; nan when no step was needed."""
        return self.learning_rates[-1] if self.learning_rates else math.nan
