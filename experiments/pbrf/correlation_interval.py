"""Intervals of correlations over seeds, which stay between -1 and 1."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from curvlab.lab import Interval, t_interval

LARGEST = 1 - 1e-12  # a correlation of 1 has no z


def correlation_interval(values: ArrayLike) -> Interval:
    """Return the t interval of Fisher's z = artanh(r) over n seeds, (n,), in r; of fewer than two seeds nan.

    A t interval of the correlations themselves passes 1 where they are near it.
    """
    correlations = np.clip(np.asarray(values, dtype=float), -LARGEST, LARGEST)
    found = t_interval(np.arctanh(correlations))
    low, high = (float(np.tanh(end)) for end in (found.low, found.high))
    return Interval(low, high, f"{found.kind}, of Fisher's z", found.num_samples)
