"""Claims that are judged in one row of a table: which row, and with which interval."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from curvlab.lab import Claim, Criterion
from experiments.shared.worst_case import farthest_ratio, judge_row, largest, smallest

CLAIM = Claim("bound", "It holds.", "a paper", "at most 1", "ratio", Criterion(at_most=1.0, exact=True))


def test_places_skip_what_is_missing() -> None:
    values = pd.Series([np.nan, 2.0, 0.25, 3.0], index=[7, 7, 8, 9])  # places, not labels
    assert (largest(values), smallest(values), farthest_ratio(values)) == (3, 2, 2)


def test_exact_values_refute_and_measured_ones_carry_their_error() -> None:
    table = pd.DataFrame({"num_trials": [10, 20]})
    values = pd.Series([0.5, 1.5])
    exact = judge_row(CLAIM, table, values, 1, "largest of 2", "1.5 is above 1.")
    assert exact.verdict == "refuted"
    assert exact.interval.kind == "exact, largest of 2"
    measured = judge_row(CLAIM, table, values, 1, "b", "Noise.", stderrs=pd.Series([0.1, 0.5]))
    assert measured.verdict == "undecided"
    assert measured.interval.low == pytest.approx(1.5 - 0.98)
    assert measured.interval.num_samples == 20
