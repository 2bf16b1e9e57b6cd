"""What an optimizer does with a gradient, as a function of its state: for derivatives of whole trainings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

State: TypeAlias = tuple[Tensor, ...]  # the parameters (P,), then the optimizer's own vectors (P,)


class UpdateRule(Protocol):
    """One step of an optimizer, differentiable in the state and in the gradient, coordinate by coordinate."""

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

    @property
    def num_buffers(self) -> int:
        """The velocity."""
        return 1

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

    @property
    def num_buffers(self) -> int:
        """The two moving averages."""
        return 2

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
