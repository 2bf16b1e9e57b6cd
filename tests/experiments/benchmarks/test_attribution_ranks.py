"""Ranks of halves: they have all of an LDS, and intervals of differences draw halves and queries together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from curvlab.influence import linear_datamodelling_score, subset_weights
from experiments.benchmarks.attribution.ranks import (
    OTHER,
    SAME,
    correlations,
    lds_interval,
    predicted_changes,
    rank_table,
)

HALVES, QUERIES, EXAMPLES = 40, 12, 60


@pytest.fixture
def subsets() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.rand(HALVES, EXAMPLES).argsort(1) < EXAMPLES // 2


def test_ranks_give_the_lds_and_its_interval(subsets: torch.Tensor) -> None:
    scores = torch.randn(QUERIES, EXAMPLES, dtype=torch.float64)
    truth = (subset_weights(subsets) - 1) @ scores.T / EXAMPLES
    losses = truth + 0.5 * truth.std() * torch.randn_like(truth)
    changes = predicted_changes({"scores": scores}, subsets)
    torch.testing.assert_close(changes, truth)
    assert predicted_changes({"predicted": losses}, subsets) is losses
    ranks = rank_table("net", {SAME: losses, OTHER: -losses}, {"ours": changes})
    assert len(ranks) == HALVES * QUERIES
    expected = [spearmanr(changes[:, m], losses[:, m]).statistic for m in range(QUERIES)]
    np.testing.assert_allclose(correlations(ranks, "ours", SAME), expected)
    np.testing.assert_allclose(correlations(ranks, "ours", OTHER), -np.array(expected))
    # The library's interval of one score draws the same two things, with other random numbers.
    library = linear_datamodelling_score(scores, subsets, losses)
    interval = lds_interval(ranks, {"ours": 1}, SAME)
    assert (interval.low, interval.high) == pytest.approx((library.low, library.high), abs=0.01)
    assert "40 halves x 12 queries" in interval.kind
    # The same halves and queries for all terms: what both have in common falls out.
    nothing = lds_interval(ranks.assign(theirs=ranks.ours), {"ours": 1, "theirs": -1}, SAME)
    assert (nothing.low, nothing.high) == (0, 0)


def test_intervals_know_that_there_are_few_halves(subsets: torch.Tensor) -> None:
    """All queries alike: drawing queries alone would say that nothing is uncertain."""
    torch.manual_seed(0)
    one = torch.randn(HALVES, 1)
    losses, ours = one.expand(-1, QUERIES), (one + torch.randn(HALVES, 1)).expand(-1, QUERIES)
    ranks = rank_table("net", {SAME: losses}, {"ours": ours})
    assert np.ptp(correlations(ranks, "ours", SAME)) < 1e-12
    interval = lds_interval(ranks, {"ours": 1}, SAME)
    assert interval.high - interval.low > 0.2


def test_a_constant_prediction_ranks_nothing() -> None:
    losses = torch.randn(HALVES, QUERIES)
    ranks = rank_table("net", {SAME: losses}, {"ours": torch.zeros_like(losses)})
    assert (correlations(ranks, "ours", SAME) == 0).all()
