"""Learning rates along a training, as factors of the rate that the optimizer was given."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

Schedule: TypeAlias = Callable[[int, int], float]  # (step from 0, number of steps) -> factor of lr
ScheduleName: TypeAlias = Literal["constant", "cosine"]


def cosine(step: int, num_steps: int) -> float:
    """Return ½ (1 + cos(π step / num_steps)): from 1 towards 0."""
    return 0.5 * (1.0 + math.cos(math.pi * step / num_steps))


def cosine_after_warmup(warmup_steps: int) -> Schedule:
    """Return a schedule that rises linearly to 1 over `warmup_steps`, then falls to 0 along a cosine."""

    def factor(step: int, num_steps: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return cosine(step - warmup_steps, num_steps - warmup_steps)

    return factor


def named_schedule(schedule: ScheduleName | Schedule) -> Schedule | None:
    """Return a schedule by name, or the function that was passed; None leaves the optimizer's rates alone."""
    if callable(schedule):
        return schedule
    if schedule not in ("constant", "cosine"):
        raise ValueError(f"unknown schedule '{schedule}': choose constant or cosine, or pass a function")
    return cosine if schedule == "cosine" else None
