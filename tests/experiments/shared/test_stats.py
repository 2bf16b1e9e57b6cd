"""Statistics against numpy's and scipy's own, and at their edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats

from curvlab.lab import t_interval
from experiments.shared import stats


def test_means_have_the_t_interval_of_what_is_averaged() -> None:
    values = np.array([1.0, 4.0, 16.0])
    value, interval = stats.mean(values, unit="points")
    assert (value, interval) == (7.0, t_interval(values, unit="points"))

    value, interval = stats.geometric_mean(values)
    logs = t_interval(np.log(values))
    assert value == pytest.approx(4.0)
    assert [interval.low, interval.high] == pytest.approx([math.exp(logs.low), math.exp(logs.high)])
    assert interval.kind == "t 95 %, 3 seeds, of logarithms"
    assert interval.num_samples == 3

    value, interval = stats.mean_correlation([0.99, 0.999, 0.9999])
    assert value == pytest.approx(np.mean([0.99, 0.999, 0.9999]))
    assert interval.low < value < interval.high < 1
    assert np.tanh(np.arctanh([0.99, 0.999, 0.9999]).mean()) == pytest.approx(
        np.tanh((np.arctanh(interval.low) + np.arctanh(interval.high)) / 2)
    )


def test_edges_of_means() -> None:
    value, interval = stats.geometric_mean([0.0, 1.0, 2.0])
    assert value == 0
    assert math.isnan(interval.low)
    assert math.isnan(stats.geometric_mean([3.0])[1].high), "one seed says nothing about the next one"
    assert stats.mean_correlation([1.0, 1.0])[1].high <= 1


def test_slope_is_that_of_the_power_law_and_skips_what_has_no_logarithm() -> None:
    x = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    y = 3 * x**-0.7
    assert stats.log_log_slope(x, y) == pytest.approx(-0.7)
    y[[1, 3]] = 0.0, np.nan
    assert stats.log_log_slope(torch.tensor(x), y) == pytest.approx(-0.7)
    assert math.isnan(stats.log_log_slope(x, y, least=4))
    assert math.isnan(stats.log_log_slope([2.0, 2.0], [1.0, 3.0]))


def test_correlations_are_scipys_and_nan_where_there_is_none() -> None:
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(2, 30, 4))
    assert stats.pearson(x[:, 0], y[:, 0]) == pytest.approx(scipy_stats.pearsonr(x[:, 0], y[:, 0])[0])
    assert stats.spearman(x[:, 0], y[:, 0]) == pytest.approx(scipy_stats.spearmanr(x[:, 0], y[:, 0])[0])
    found = stats.column_correlations(torch.tensor(x), torch.tensor(y))
    assert found.tolist() == pytest.approx([stats.pearson(a, b) for a, b in zip(x.T, y.T, strict=True)])
    for none in ([1.0, 1.0, 1.0], [1.0, np.inf, 2.0]):
        assert math.isnan(stats.pearson(none, [1.0, 2.0, 3.0]))
        assert math.isnan(stats.spearman([1.0, 2.0, 3.0], none))


def test_jackknife_of_a_mean_is_its_standard_error() -> None:
    values = np.array([1.0, 2.0, 5.0, 9.0])
    without = [np.delete(values, place).mean() for place in range(4)]
    assert stats.jackknife_error(without) == pytest.approx(scipy_stats.sem(values))
