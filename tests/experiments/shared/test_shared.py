"""Statistics, recipes, worst cases and spectra that targets share."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from scipy import stats as scipy_stats
from torch import nn

from curvlab.lab import Claim, Criterion, t_interval
from curvlab.lab.data import TokenSplits
from experiments.shared import stats
from experiments.shared.spectrum import constants, gauss_newton, spectrum, trace
from experiments.shared.stats import correlation
from experiments.shared.task import TrainedTask
from experiments.shared.worst_case import farthest_ratio, judge_row, largest, smallest


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

    values = [0.7, 0.8, 0.85]
    value, interval = stats.mean_correlation(values)
    assert (value, interval) == stats.mean(values)
    value, interval = stats.mean_correlation([0.9, 0.99, 1.0])
    assert value == pytest.approx(np.mean([0.9, 0.99, 1.0]))
    assert (interval.low, interval.high) == (t_interval([0.9, 0.99, 1.0]).low, 1)
    assert stats.mean_correlation([-1.0, -0.9])[1].low == -1


def test_edges_of_means() -> None:
    value, interval = stats.geometric_mean([0.0, 1.0, 2.0])
    assert value == 0
    assert math.isnan(interval.low)
    assert math.isnan(stats.geometric_mean([3.0])[1].high), "one seed says nothing about the next one"
    assert math.isnan(stats.mean_correlation([0.3])[1].high)


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
    for a, b in ((x[:, 0], y[:, 0]), (x[:, 0].round(), y[:, 0].round())):  # the second with ties
        assert stats.pearson(a, b) == pytest.approx(scipy_stats.pearsonr(a, b)[0])
        assert stats.spearman(a, b) == pytest.approx(scipy_stats.spearmanr(a, b)[0])
    found = stats.column_correlations(torch.tensor(x), torch.tensor(y))
    assert found.tolist() == pytest.approx([stats.pearson(a, b) for a, b in zip(x.T, y.T, strict=True)])
    x[0, 2] = np.nan
    expected = [scipy_stats.spearmanr(a, b)[0] for a, b in zip(x.T, y.T, strict=True)]
    assert stats.row_correlations(x.T, y.T, ranked=True) == pytest.approx(expected, nan_ok=True)
    for none in ([1.0, 1.0, 1.0], [1.0, np.inf, 2.0]):
        assert math.isnan(stats.pearson(none, [1.0, 2.0, 3.0]))
        assert math.isnan(stats.spearman([1.0, 2.0, 3.0], none))


def test_jackknife_of_a_mean_is_its_standard_error() -> None:
    values = np.array([1.0, 2.0, 5.0, 9.0])
    without = [np.delete(values, place).mean() for place in range(4)]
    assert stats.jackknife_error(without) == pytest.approx(scipy_stats.sem(values))


# ------------------------------------- Correlations of influences that may have overflowed
def test_correlation_of_what_overflowed_is_zero() -> None:
    left = torch.tensor([[1.0, float("inf"), 1.0], [2.0, 1.0, 1.0], [4.0, 2.0, 1.0]])
    right = torch.tensor([[2.0, 1.0, 1.0], [4.0, 1.0, 2.0], [8.0, 2.0, 3.0]])
    torch.testing.assert_close(correlation(left, right), torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64))


# -------- Claims that are judged in one row of a table: which row, and with which interval
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


# --- Measurements of a spectrum against the dense matrix; constants in units of predictions
SETTINGS = OmegaConf.create(
    {
        "spectrum": {"trace_probes": 8, "rtol": 0.01},
        "constant": {"num_leading": 4, "num_random": 4, "num_examples": 8, "num_batches": 16, "batch_size": 16},
    }
)


def small_task(**changes: Any) -> TrainedTask:
    torch.manual_seed(0)
    inputs, targets = torch.randn(40, 5), torch.randint(3, (40,))
    splits = SimpleNamespace(task="classification", num_outputs=3)
    values: dict[str, Any] = {"run": None, "name": "linear", "settings": OmegaConf.create({}), "splits": splits}
    values |= {
        "data_key": {},
        "trained_key": {"seed_name": "linear", "model": "linear"},
        "model": nn.Linear(5, 3).eval(),
    }
    values |= {"train": (inputs, targets), "train_indices": torch.arange(40), "num_parameters": 18}
    values |= {"train_loss": 1.0, "test_loss": float("nan"), "test_accuracy": None}
    return TrainedTask(**(values | changes))


def test_trace_and_largest_eigenvalue_are_those_of_the_dense_matrix(stub_run) -> None:
    run = stub_run
    task = small_task(run=run)
    found = spectrum(task, SETTINGS)
    assert run.keys["spectrum/largest"] == {"seed_name": "linear", "model": "linear", "rtol": 0.01}
    dense = gauss_newton(task).to_dense().double()
    assert found["largest_eigenvalue"] == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=0.02)
    assert found["trace"] == pytest.approx(float(dense.trace()), rel=1e-6)
    assert found["trace_stderr"] == 0
    run.stored.clear()  # of the same key
    many = small_task(run=run, splits=SimpleNamespace(task="classification", num_outputs=1000))
    by_probes = trace(many, SETTINGS)  # cheaper than a gradient for each of 1,000 classes
    assert 0 < abs(by_probes["trace"] - float(dense.trace())) < 5 * by_probes["trace_stderr"]


def test_constants_of_language_models_count_tokens(stub_run) -> None:
    """The same examples as sequences of four predictions each: C is four times larger, |B| being in tokens."""
    images = small_task(run=stub_run)
    repeated = (images.train[0][:, None].expand(-1, 4, -1), images.train[1][:, None].expand(-1, 4))
    splits = TokenSplits.__new__(TokenSplits)
    object.__setattr__(splits, "task", "classification")
    sequences = small_task(run=stub_run, train=repeated, splits=splits)
    assert [sequences.predictions_per_example, images.predictions_per_example] == [4, 1]
    trace = float(gauss_newton(images).to_dense().trace())
    found = []
    for task in (images, sequences):  # whose keys are equal
        stub_run.stored.clear()
        found.append(constants(task, **SETTINGS.constant, trace=trace))
    assert found[1]["largest"] == pytest.approx(4 * found[0]["largest"], rel=1e-4)
