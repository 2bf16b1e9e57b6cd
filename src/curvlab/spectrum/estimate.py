"""What a stochastic estimator of one number returns."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Estimate:
    """A number, its standard error and its price.

    Attributes:
        value: the estimate, e.g. of tr(A).
        stderr: standard error over independent probes; nan when there is only one.
        num_matvecs: products paid for, counted per vector.
    """

    value: float
    stderr: float
    num_matvecs: int

    @classmethod
    def from_samples(cls, samples: Tensor, num_matvecs: int) -> Estimate:
        """Return the mean of independent (n,) samples, stderr = sd / sqrt(n), summed in fp64."""
        samples = samples.double()
        stderr = float(samples.std()) / math.sqrt(len(samples)) if len(samples) > 1 else math.nan
        return cls(value=float(samples.mean()), stderr=stderr, num_matvecs=num_matvecs)
