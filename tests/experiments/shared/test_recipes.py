"""Correlations of influences that may have overflowed."""

from __future__ import annotations

import torch

from experiments.shared.recipes import correlation


def test_correlation_of_what_overflowed_is_zero() -> None:
    left = torch.tensor([[1.0, float("inf"), 1.0], [2.0, 1.0, 1.0], [4.0, 2.0, 1.0]])
    right = torch.tensor([[2.0, 1.0, 1.0], [4.0, 1.0, 2.0], [8.0, 2.0, 3.0]])
    torch.testing.assert_close(correlation(left, right), torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64))
