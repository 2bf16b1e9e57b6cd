import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from curvlab.lab.claims import Interval, bootstrap_interval, exact, t_interval
from tests.refusals import refuses


def test_t_interval_matches_the_table() -> None:
    # t quantile 0.975 with 2 degrees of freedom is 4.302653 (any printed table); s = 1, n = 3
    interval = t_interval([1.0, 2.0, 3.0])
    assert interval.low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-6)
    assert interval.high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-6)
    assert (interval.kind, interval.num_samples) == ("t 95 %, 3 seeds", 3)
    one = t_interval([1.0])
    assert [math.isnan(end) for end in (one.low, one.high)] == [True, True]
    assert one.kind == "t 95 %, 1 seed"


@pytest.mark.parametrize("kind", ["t 95 %, 2 seeds", "bootstrap 95 %, 2 points", "lower bounds in 1 of 2 seeds"])
def test_two_values_are_too_few(kind: str) -> None:
    assert Interval(0.0, 1.0, kind, 2).has_too_few_samples
    assert not Interval(0.0, 1.0, kind, 3).has_too_few_samples
    assert not Interval(0.0, 1.0, f"largest of {kind}", 2).has_too_few_samples


ONE_RUN = ["one run", "95 % over realizations", "one estimate", "largest of 3 draws of one sketch"]
ONE_RUN += ["smallest of 2 points of one sequence of batches", "deterministic, 1 seed", "exactly once"]
FIXED = ["deterministic, largest of 9", "exact, OPT, printed", "counted", "smallest of 5 printed rows", "count"]


@pytest.mark.parametrize("kind", ONE_RUN + FIXED)
def test_one_value_decides_where_no_other_seed_would_change_it(kind: str) -> None:
    assert exact(1.0, kind=kind).has_too_few_samples == (kind in ONE_RUN)


def test_the_forecast_is_of_as_many_values_as_the_first_two() -> None:
    # s of 1 and 2 is 1 / √2; t quantile 0.975 with 3 degrees of freedom is 3.182446 (any printed table); n = 4
    low, high = t_interval([1.0, 2.0, 70.0, -3.0]).forecast
    assert (low + high) / 2 == pytest.approx(1.5)
    assert high - low == pytest.approx(2 * 3.182446 / math.sqrt(2) / 2, abs=1e-6)
    assert t_interval([1.0, 2.0]).forecast is None


def test_a_rising_function_maps_all_ends() -> None:
    mapped = t_interval([0.0, 1.0, 2.0]).mapped(math.exp, ", of logarithms")
    plain = t_interval([0.0, 1.0, 2.0])
    ends = (mapped.low, mapped.high, *mapped.forecast)
    assert ends == pytest.approx([math.exp(end) for end in (plain.low, plain.high, *plain.forecast)])
    assert mapped.kind == "t 95 %, 3 seeds, of logarithms"
    assert t_interval([0.0, 1e3, 2e3]).mapped(math.exp).high == math.inf


def test_bootstrap_covers_the_truth() -> None:
    # 200 intervals for the median of 40 normals: nominal 95 %; 4.5 standard deviations below is 88 %.
    generator = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        found = bootstrap_interval(generator.normal(size=40), np.median, num_resamples=300, generator=generator)
        hits += found.low <= 0 <= found.high
    assert 0.88 <= hits / 200 < 1


def test_bootstrap_resamples_pairs_together() -> None:
    x = np.random.default_rng(0).normal(size=50)
    interval = bootstrap_interval(
        (x, 2 * x), lambda a, b: np.corrcoef(a, b)[0, 1], num_resamples=50, generator=np.random.default_rng(0)
    )
    assert interval.low == pytest.approx(1.0)
    assert interval.high == pytest.approx(1.0)


def test_bootstrap_depends_on_its_generator_only() -> None:
    values = np.random.default_rng(0).exponential(size=30)

    def found(statistic: Callable[..., Any], seed: int) -> Interval:
        return bootstrap_interval(values, statistic, num_resamples=100, generator=np.random.default_rng(seed))

    assert found(np.mean, 7) == found(np.mean, 7)
    assert found(np.mean, 7) != found(np.mean, 8)
    assert found(np.mean, 7).kind == "bootstrap 95 %, 30 points"
    # A statistic along an axis gives the interval of one that is called for each resample.
    assert found(np.median, 7) == found(lambda sample: float(np.median(sample)), 7)


def test_equal_points_give_a_point_and_nan_among_the_values_nan_ends() -> None:
    equal = bootstrap_interval(np.ones(10), np.mean, num_resamples=50, generator=np.random.default_rng(0))
    assert (equal.low, equal.high) == (1.0, 1.0)
    values = [1.0, 2.0, math.nan]
    found = bootstrap_interval(values, np.mean, num_resamples=50, generator=np.random.default_rng(0))
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert math.isnan(t_interval(values).low)


def test_refuses_bad_input() -> None:
    refuses("needs low <= high, got 2 and 1; swap them", Interval, 2.0, 1.0, "t", 3)
    refuses("needs a kind that says how it was found", Interval, 1.0, 2.0, " ", 3)
    generator = np.random.default_rng(0)
    refuses(
        r"need one length, got \[3, 2\]", bootstrap_interval, ([1, 2, 3], [1, 2]), np.mean, generator=generator
    )
    refuses(r"vector of independent values, got shape \(2, 2\)", t_interval, [[1, 2], [3, 4]])
    refuses(r"write 0\.95 for 95 %", t_interval, [1, 2], confidence=95)
