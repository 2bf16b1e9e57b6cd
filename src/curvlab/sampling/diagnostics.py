"""Have the chains mixed, and how many independent draws are they worth?"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor


def split_rhat(draws: Tensor) -> float:
    """Return R-hat of (C, T) draws, chains cut into halves (Gelman et al., Bayesian Data Analysis, 2013, 11.4).

    sqrt([(N-1)/N W + B/N] / W) with N = T/2, W the mean variance within half chains and B/N the variance of
    their means. 1 when all halves look alike; nan with fewer than 4 draws of each chain or without any variance.
    """
    halves = _halves(draws)
    if halves is None:
        return math.nan
    within = float(halves.var(axis=1, ddof=1).mean())
    between = float(halves.mean(axis=1).var(ddof=1))
    length = halves.shape[1]
    return math.sqrt((length - 1) / length + between / within) if within > 0 else math.nan


def effective_sample_size(draws: Tensor) -> float:
    """Return how many independent draws (C, T) are worth, chains taken together; at most C T log10(C T).

    C T / (1 + 2 sum of autocorrelations), on half chains, with the variance of R-hat in the denominator, so that
    chains in different places are worth little; the sum runs to the first negative pair and its pairs are made
    to decrease (Geyer 1992), as in Stan's reference manual. nan where R-hat is.
    """
    halves = _halves(draws)
    if halves is None:
        return math.nan
    count, length = halves.shape
    covariances = _autocovariances(halves)  # (2C, N)
    within = float(covariances[:, 0].mean()) * length / (length - 1)
    if not within > 0:
        return math.nan
    variance = within * (length - 1) / length + float(halves.mean(axis=1).var(ddof=1))
    correlations = 1 - (within - covariances.mean(axis=0) * length / (length - 1)) / variance
    correlations[0] = 1.0
    total, smallest = -1.0, math.inf
    for lag in range(0, length - 1, 2):
        pair = float(correlations[lag] + correlations[lag + 1])
        if pair < 0:
            break
        smallest = min(smallest, pair)
        total += 2 * smallest
    num_draws = count * length
    return num_draws / max(total, 1 / math.log10(max(num_draws, 11)))


def _halves(draws: Tensor) -> np.ndarray | None:
    values = draws.double().cpu().numpy()
    length = values.shape[1] // 2
    if length < 2 or not np.isfinite(values).all():
        return None
    return np.concatenate([values[:, :length], values[:, -length:]])


def _autocovariances(values: np.ndarray) -> np.ndarray:
    length = values.shape[1]
    centred = values - values.mean(axis=1, keepdims=True)
    spectrum = np.fft.rfft(centred, n=2 * length, axis=1)
    return np.fft.irfft(spectrum * spectrum.conj(), axis=1)[:, :length] / length
