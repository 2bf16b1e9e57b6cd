"""Where each method puts every half, as ranks: all that an LDS, or a difference of two, is made of."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import rankdata
from torch import Tensor

from curvlab.influence import subset_weights
from curvlab.influence.bank import weighted_correlations
from curvlab.lab import Interval

SAME, OTHER = "same order", "other orders"
NUM_RESAMPLES = 2000


def predicted_changes(result: dict[str, Any], subsets: Tensor) -> Tensor:
    """Return the change of each test loss that a method predicts for each subset, (S, M).

    sum_i (w_i - 1) / N · score_i, unless it predicts for subsets itself.
    """
    if "scores" not in result:
        predicted: Tensor = result["predicted"]
        return predicted
    scores = result["scores"].double()
    return (subset_weights(subsets).double() - 1).to(scores.device) @ scores.T / scores.shape[1]


def rank_table(task: str, measured: dict[str, Tensor], predicted: dict[str, Tensor]) -> pd.DataFrame:
    """Return a row for each half and query: the rank of the half among all, as measured and by each method.

    Args:
        task: of the rows.
        measured: losses after retraining, (S, M), by kind of order (`SAME`, `OTHER`).
        predicted: (S, M), by method.
    """
    num_halves, num_queries = next(iter(measured.values())).shape
    half, query = np.indices((num_halves, num_queries)).reshape(2, -1)
    every = measured | predicted
    columns = {name: rankdata(values.double().cpu(), axis=0).ravel() for name, values in every.items()}
    return pd.DataFrame({"task": task, "half": half, "query": query} | columns)


def correlations(ranks: pd.DataFrame, method: str, orders: str) -> np.ndarray:
    """Return Spearman's correlation of a method's ranks with the measured ones, for each query, (M,)."""
    predicted, measured = (_square(ranks, name) for name in (method, orders))
    return weighted_correlations(predicted, measured, np.ones((1, len(predicted))))[0]


def lds_interval(ranks: pd.DataFrame, terms: dict[str, float], orders: str) -> Interval:
    """Return the 95 % interval of a sum of signed LDS, {method: sign}, over halves and queries.

    Both are drawn anew, the same for every term: a half that is hard to rank is so for all, and falls out of a
    difference. Ranks stay those among all halves, as in `linear_datamodelling_score`. Percentiles.
    """
    measured = _square(ranks, orders)
    (num_halves, num_queries), total = measured.shape, np.zeros(NUM_RESAMPLES)
    halves, queries = _draws(num_halves, num_queries)
    for method, sign in terms.items():
        drawn = weighted_correlations(_square(ranks, method), measured, halves)
        total += sign * (drawn * queries).mean(1)
    low, high = np.quantile(total, [0.025, 0.975])
    kind = f"bootstrap 95 %, {num_halves} halves x {num_queries} queries, one network"
    return Interval(float(low), float(high), kind, num_queries)


def _square(ranks: pd.DataFrame, name: str) -> np.ndarray:
    """Return a column as (S, M), less its mean over the halves."""
    values = ranks.pivot(index="half", columns="query", values=name).to_numpy()
    return values - values.mean(0)


@lru_cache(maxsize=4)
def _draws(*sizes: int) -> list[np.ndarray]:
    """Return for each size how often each of so many things is drawn in each resample, (NUM_RESAMPLES, size)."""
    generator = np.random.default_rng(0)
    return [generator.multinomial(n, np.full(n, 1 / n), size=NUM_RESAMPLES).astype(float) for n in sizes]
