"""What a stochastic estimator of one number returns."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from curvlab.shown import Shown, Summary, counted


@dataclass(frozen=True, repr=False)
class Estimate(Shown):
    """A number, its standard error and its price.

    Attributes:
        value: the estimate, e.g. of tr(A).
        stderr: standard error over independent probes; nan when there is only one.
        num_matvecs: products paid for, counted per vector.
    """

    value: float
    stderr: float
    num_matvecs: int

    def summary(self) -> Summary:
        """Return value, standard error and cost."""
        one = math.isnan(self.stderr)
        error = "no error: a single probe" if one else "standard error over independent probes"
        value = f"{self.value:.5g}" if one else f"{self.value:.5g} ± {self.stderr:.2g}"
        return Summary("estimate", value, error, (counted(self.num_matvecs, "product"),))

    @classmethod
    def from_samples(cls, samples: Tensor, num_matvecs: int) -> Estimate:
        """Return the mean of independent (n,) samples, stderr = sd / sqrt(n), summed in fp64."""
        samples = samples.double()
        stderr = float(samples.std()) / math.sqrt(len(samples)) if len(samples) > 1 else math.nan
        return cls(value=float(samples.mean()), stderr=stderr, num_matvecs=num_matvecs)
