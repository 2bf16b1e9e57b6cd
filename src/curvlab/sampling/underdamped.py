"""Underdamped Langevin dynamics of several chains; with infinite friction SGLD with averaged noises."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvlab.arguments import real
from curvlab.sampling.sgld import SGLD, RMSProp, SGLDState
from curvlab.training import EnsembleLosses


class UnderdampedLangevin(SGLD):
    """Langevin dynamics with momenta, by the BAOAB splitting (Leimkuhler & Matthews 2013), one gradient a step.

    With U(w) = nbeta L_B(w) + localization/2 |w - w0|², h = sqrt(step_size) and c = exp(-friction h), a step is

        p <- p - h grad U(w);  w <- w + h/2 p;  p <- c p + sqrt(1 - c²) xi;  w <- w + h/2 p,

    xi standard normal. It samples the density of `SGLD`. On the exact loss of a quadratic its variances are exact
    at any stable step, where those of SGLD are too large by 1/(1 - step_size κ/4), κ an eigenvalue of the Hessian
    of U; the limit of stability, step_size κ < 4, is the same.

    friction = inf (c = 0) is w <- w - step_size/2 grad U(w) + sqrt(step_size) (xi + xi')/2, with xi' the noise of
    the next step: Leimkuhler and Matthews' method, SGLD with the average of consecutive noises.

    With less friction a flat direction moves as by SGLD of the step size m step_size, m = (1 + c)/(1 - c), the
    `reach`. The noise s² of a batch's gradient of U raises the temperature along its direction by the factor
    1 + m step_size s²/4, to first order: m times that of SGLD with equal step_size, and as much as that of SGLD
    with equal reach. So less friction pays where the curvature limits the step, not where the batches do.

    Args:
        losses: model, loss and data.
        step_size: ε = h².
        nbeta: inverse temperature times number of examples.
        localization: γ, pull towards w0.
        batch_size: examples of a chain's batch, drawn with replacement; from N on, all data at every step.
        friction: of the momenta, in units of 1/time; a step takes the time sqrt(step_size). Below
            2 sqrt(localization) flat directions swing.
    """

    def __init__(
        self,
        losses: EnsembleLosses,
        *,
        step_size: float,
        nbeta: float,
        localization: float,
        batch_size: int,
        friction: float,
    ) -> None:
        super().__init__(
            losses, step_size=step_size, nbeta=nbeta, localization=localization, batch_size=batch_size
        )
        if not real("friction", friction) > 0:
            raise ValueError(
                f"friction must be positive, got {friction}: without friction chains keep their energy. "
                "math.inf averages consecutive noises."
            )
        self.friction, self._kept = friction, math.exp(-friction * math.sqrt(step_size))

    @property
    def reach(self) -> float:
        """The number m = (1 + c)/(1 - c): flat directions move as by SGLD of the step size m step_size."""
        return (1 + self._kept) / (1 - self._kept)

    def depends_on(self) -> Mapping[str, Any]:
        """Return all that chains depend on beside their seeds."""
        return {**super().depends_on(), "friction": self.friction}

    def init(self, generators: Sequence[torch.Generator]) -> SGLDState:
        """Return the state with every chain at w0, and normal momenta."""
        state = super().init(generators)
        momenta = torch.empty_like(state.positions)
        for row, generator in zip(momenta, generators, strict=True):
            row.normal_(0.0, math.sqrt(self.step_size), generator=generator)
        return SGLDState(state.positions, state.generators, state.draws, 0, momenta=momenta)

    @torch.no_grad()
    def _move(self, state: SGLDState, gradients: Sequence[Tensor], noise: Tensor) -> None:
        positions, momenta = state.positions, state.momenta
        if momenta is None:
            raise ValueError("the state has no momenta: begin with `init` of this sampler.")
        # Momenta times h have the unit of positions, and the noise that `Draws` has: sqrt(step_size).
        self._descend(momenta, positions, gradients, self.step_size)
        positions.add_(momenta, alpha=0.5)
        momenta.mul_(self._kept).add_(noise, alpha=math.sqrt(1 - self._kept**2))
        positions.add_(momenta, alpha=0.5)


def langevin_sampler(
    losses: EnsembleLosses,
    *,
    friction: float | None,
    preconditioner: RMSProp | None = None,
    num_burnin_steps: int = 0,
    **settings: Any,
) -> SGLD:
    """Return `UnderdampedLangevin` with this friction, or `SGLD` where it is None.

    Args:
        losses: model, loss and data.
        friction: see `UnderdampedLangevin`; None: overdamped.
        preconditioner: of `SGLD` alone.
        num_burnin_steps: likewise.
        settings: `step_size`, `nbeta`, `localization`, `batch_size`.
    """
    if friction is None:
        return SGLD(losses, preconditioner=preconditioner, num_burnin_steps=num_burnin_steps, **settings)
    if preconditioner is not None:
        raise ValueError("a preconditioner is for SGLD alone: leave friction out, or the preconditioner.")
    return UnderdampedLangevin(losses, friction=friction, **settings)
