"""Which retraining a score is to predict: its length is the damping."""

from __future__ import annotations

from dataclasses import dataclass

from curvlab.arguments import real
from curvlab.training import RunLength


@dataclass(frozen=True)
class Retraining:
    """The retraining that influence is asked about, on a part of the data; see its class methods.

    A training of length τ, the sum of its learning rates over 1 - momentum, moves along an eigenvector of
    curvature μ by (1 - e^{-τμ}) / μ per unit of gradient, which a damping of weight decay + 1/τ imitates (Bae et
    al. 2024). Halves that take as many epochs as the whole take half as many steps, so τ is half as long, and the
    wrong τ costs rank correlation: bench-board measures how much.

    >>> run = RunLength.constant(0.1, 300)
    >>> round(Retraining.as_many_steps().time(run), 6), round(Retraining.as_many_epochs(0.5).time(run), 6)
    (30.0, 15.0)

    Attributes:
        share: of the run's steps; not read where `length` is given.
        length: τ itself, the sum of its learning rates over 1 - momentum; None: that of the share of the run.
    """

    share: float = 1.0
    length: float | None = None

    def __post_init__(self) -> None:
        if not 0 < real("share", self.share) <= 1:
            raise ValueError(
                f"the share of the data that is kept must be above 0 and at most 1, got {self.share}: "
                "0.5 for halves"
            )
        if self.length is not None and not 0 < self.length < float("inf"):
            raise ValueError(
                f"the length, a sum of learning rates, must be positive and finite, got {self.length}"
            )

    @classmethod
    def as_many_steps(cls) -> Retraining:
        """Return a retraining of as many steps as the run, whatever the subset: a half is seen twice as often."""
        return cls()

    @classmethod
    def as_many_epochs(cls, fraction: float) -> Retraining:
        """Return a retraining of as many epochs as the run, on a fraction of the data: 1 / (fraction τ)."""
        return cls(share=fraction)

    def time(self, run: RunLength) -> float:
        """Return τ, the retraining's length along a constant gradient; unit: squared parameter per loss.

        A share of the run has every (1 / share)-th of its learning rates, and its momentum from rest.
        """
        if self.length is not None:
            return self.length
        steps = len(run.learning_rates)
        fewer = round(self.share * steps)
        if fewer < 1:
            raise ValueError(f"{self.share} of {steps} steps is no step: keep more of the data, or give a length")
        rates = tuple(run.learning_rates[int((step + 0.5) * steps / fewer)] for step in range(fewer))
        return RunLength(rates, run.momentum).time
