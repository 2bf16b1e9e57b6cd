"""Have the chains mixed, how many independent draws are they worth, and do they still move?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from arviz_stats.base import array_stats
from torch import Tensor

_MIN_DRAWS = 8  # of a chain, four of each half: below, autocorrelations are none


@dataclass(frozen=True)
class Drift:
    """How much chains move from their first draw to their last, along a straight line.

    Attributes:
        change: over the whole trace, in the draws' unit.
        stderr: of it, from the draws' effective number.
    """

    change: float
    stderr: float

    @property
    def z(self) -> float:
        """The change in standard errors; nan where there is none."""
        return self.change / self.stderr if self.stderr > 0 else math.nan


def split_rhat(draws: Tensor) -> float:
    """Return rank-normalised split R-hat of (C, T) draws (Vehtari et al. 2021, Sec. 4).

    sqrt([(N-1)/N W + B/N] / W) with N = T/2, W the mean variance within half chains and B/N the variance of their
    means, of normal scores of the draws' ranks; the larger of that and of the same for the distances from the
    median, which sees chains that differ in width alone. 1 when all halves look alike. One chain is taken for the
    two that its halves are. nan with fewer than 8 draws of each chain or without any variance.
    """
    values = _usable(draws)
    if values is None:
        return math.nan
    if len(values) == 1:
        half = values.shape[1] // 2
        values = np.concatenate([values[:, :half], values[:, -half:]])
    return float(array_stats.rhat(values)) if values.shape[1] >= 4 else math.nan


def effective_sample_size(draws: Tensor, kind: Literal["mean", "bulk", "tail"] = "mean") -> float:
    """Return how many independent draws (C, T) are worth, chains taken together; at most C T log10(C T).

    C T / (1 + 2 sum of autocorrelations), on half chains, with the variance of R-hat in the denominator, so that
    chains in different places are worth little; the sum ends as in Geyer (1992). For the error of the mean
    (`mean`), of normal scores of ranks (`bulk`), and the smaller of those of the 5 % and 95 % quantiles (`tail`)
    (Vehtari et al. 2021, Sec. 4). nan where R-hat is.
    """
    values = _usable(draws)
    if values is None:
        return math.nan
    return float(array_stats.ess(values, method=kind, **({"prob": 0.05} if kind == "tail" else {})))


def drift(draws: Tensor) -> Drift:
    """Return the change over (C, T) draws along the least-squares line that all chains share.

    For T draws at equal distances from -1/2 to 1/2, t, with residuals r of effective number S, the variance is
    var(r)/S × T / sum t², about 12 times that of the mean. Chains are pooled: what they have in common counts, and
    S, which holds their autocorrelation and what is between them, says how much of it is chance. Where the draws
    are worth fewer than ten for each chain, S is chance itself, and too large on average.
    """
    values = _usable(draws)
    if values is None:
        return Drift(math.nan, math.nan)
    place = np.linspace(-0.5, 0.5, values.shape[1])
    spread = float(place @ place)
    change = float((values @ place).mean()) / spread
    residuals = values - change * place
    worth = float(array_stats.ess(residuals, method="mean"))
    return Drift(change, math.sqrt(float(residuals.var(ddof=1)) / worth * len(place) / spread))


def _usable(draws: Tensor) -> np.ndarray | None:
    values = draws.double().cpu().numpy()
    usable = values.shape[1] >= _MIN_DRAWS and bool(np.isfinite(values).all())
    return values if usable and np.ptp(values) > 0 else None
