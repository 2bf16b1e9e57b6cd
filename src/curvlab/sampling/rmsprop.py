"""RMSProp's diagonal preconditioner for SGLD (Li et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RMSProp:
    """G = diag(1/(damping + sqrt(V))), V <- decay V + (1 - decay) g², g the gradient of a batch's mean loss.

    Li, Chen, Carlson & Carin (2016), Eqs. 4 and 5; V starts at the first batch's g². While V changes from step to
    step, the density that is sampled is the wrong one by a term Γ(w), the derivatives of G, which they drop. Here
    V of each chain is learned in the first half of the burn-in and then stands still: with a constant G there is
    no Γ, and after the second half the draws are from the density of `SGLD` up to the step size. (Learned to the
    end of the burn-in, flat directions kept the wrong density, and an estimate was 11 % too high in a trial.) At a
    minimum g is a batch's noise alone, V its variance.

    devinterp's `rmsprop_sgld` has the same G (their eps 0.1 is our damping, their alpha our decay), but goes on
    changing it while it draws, and adds Γ on request only.

    Attributes:
        decay: of the moving average.
        damping: λ, in units of the gradient of the mean loss; entries of gradients well below it take equal steps.
    """

    decay: float = 0.99
    damping: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1 or not self.damping > 0:
            raise ValueError(
                f"decay lies between 0 and 1 and damping is positive, got {self.decay} and {self.damping}: "
                "without damping a parameter of no gradient would take infinite steps."
            )

    def learn_(self, second_moments: Sequence[Tensor], gradients: Sequence[Tensor], *, first: bool) -> None:
        """Bring a step's gradients into V, in place; both by parameter, (C, ...)."""
        for moment, gradient in zip(second_moments, gradients, strict=True):
            if first:
                moment.copy_(gradient.square())
            else:
                moment.mul_(self.decay).addcmul_(gradient, gradient, value=1 - self.decay)

    def diagonal(self, second_moments: Tensor) -> Tensor:
        """Return the diagonal of G, shaped as V."""
        return torch.reciprocal(second_moments.sqrt().add_(self.damping))
