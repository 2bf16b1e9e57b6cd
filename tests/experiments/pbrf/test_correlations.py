"""The claims of pbrf-tab6, tab7 and tab8 on tables that are made up."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from experiments.pbrf.correlation_interval import correlation_interval

EXPLAINING = {
    "carried_on": 0.95,
    "minimum": 0.95,
    "small_weight": 0.99,
    "linearised": 0.6,
    "linearised_minimum": 0.9,
}


def made_up(
    pearson: dict[str, float], curvature: str, *, seeds: int = 3, residual: float = 1e-6
) -> dict[str, pd.DataFrame]:
    """Some seeds, all alike but for a thousandth."""
    rows = [
        {"task": "mlp", "seed": seed, "curvature": curvature, "response": response, "coefficient": coefficient}
        | {"way": way, "value": value + 0.001 * seed, "low": value - 0.1, "high": value + 0.1, "points": 20}
        for seed in range(seeds)
        for response, value in pearson.items()
        for coefficient in ("pearson", "spearman")
        for way in ("over_test", "over_points", "pooled")
    ]
    table = [{"task": "mlp", "curvature": curvature, "response": response} for response in pearson]
    networks = [
        {"task": "mlp", "seed": seed, "P": 1000, f"{curvature} residual": residual}
        | ({"num_below": 180.0, "nearest": 1e-5} if curvature == "hessian" else {})
        for seed in range(seeds)
    ]
    points = [
        {"task": "mlp", "seed": 0, "point": point, "weight over damping": 2.0, "carried_on gradient norm": 0.05}
        | {"carried_on distance": 0.9, "carried_on fall": 0.9, "small_weight gradient norm": 1e-5}
        for point in range(4)
    ]
    tables = {"table": table, "correlations": rows, "networks": networks, "points": points}
    return {name: pd.DataFrame(entries) for name, entries in tables.items()}


@pytest.fixture
def verdicts(computed_of, judged):
    """Return a function that judges made-up tables: the results by the claim's id without its task."""

    def judge(key: str, tables: dict[str, pd.DataFrame]):
        return {result.claim.id.removesuffix("-mlp"): result for result in judged(key, computed_of(tables))}

    return judge


AS_PRINTED = {"cold": 0.0, "warm": 0.1, "proximal_bregman": 0.95} | EXPLAINING


def test_the_central_claim_is_judged_by_its_bounds(verdicts) -> None:
    sixth = verdicts("pbrf/tab6", made_up(AS_PRINTED, "gauss_newton"))
    names = {"pbrf", "pbrf-ranks", "above-cold", "above-warm", "cold", "warm", "minimum", "small-weight"}
    assert {name: result.verdict for name, result in sixth.items()} == dict.fromkeys(names, "reproduced")
    assert sixth["above-cold"].value == pytest.approx(0.95)
    for result in sixth.values():  # of reproduced claims, too
        assert "over points" in result.explanation or "over test examples" in result.explanation
    seventh = verdicts("pbrf/tab7", made_up(AS_PRINTED | {"cold": -0.01}, "hessian"))
    assert set(seventh) == names - {"minimum", "small-weight"}
    assert {result.verdict for result in seventh.values()} == {"reproduced"}
    assert "180 to 180 of 1000 eigenvalues" in seventh["pbrf"].explanation


def test_where_influence_predicts_nothing_small_correlations_are_no_finding(verdicts) -> None:
    nothing = AS_PRINTED | {"cold": 0.0, "warm": 0.0, "proximal_bregman": 0.0}
    found = {
        name: result.verdict for name, result in verdicts("pbrf/tab6", made_up(nothing, "gauss_newton")).items()
    }
    assert (found["cold"], found["warm"]) == ("out of reach", "out of reach")
    assert (found["pbrf"], found["pbrf-ranks"]) == ("not reproduced", "not reproduced")
    turned = nothing | {"cold": 0.4, "warm": 0.4}
    found = {
        name: result.verdict for name, result in verdicts("pbrf/tab6", made_up(turned, "gauss_newton")).items()
    }
    assert (found["above-cold"], found["above-warm"]) == ("not reproduced", "not reproduced")


def test_a_large_negative_correlation_is_not_small(verdicts) -> None:
    found = verdicts("pbrf/tab6", made_up(AS_PRINTED | {"cold": -0.9}, "gauss_newton"))
    assert (found["cold"].verdict, found["above-cold"].verdict) == ("not reproduced", "reproduced")


def test_a_hessian_that_was_not_solved_to_rounding_decides_nothing(verdicts) -> None:
    found = verdicts("pbrf/tab7", made_up(AS_PRINTED, "hessian", residual=1e-3))
    assert {result.verdict for result in found.values()} == {"out of reach"}


def test_intervals_of_correlations_stay_below_one() -> None:
    interval = correlation_interval([0.9, 0.99, 0.999])
    z = np.arctanh([0.9, 0.99, 0.999])
    half = stats.t.ppf(0.975, 2) * z.std(ddof=1) / 3**0.5
    assert (interval.low, interval.high) == pytest.approx((np.tanh(z.mean() - half), np.tanh(z.mean() + half)))
    assert interval.high < 1
    assert correlation_interval([1.0, 1.0, 1.0]).low == pytest.approx(1)
    assert correlation_interval([0.5, 0.6]).has_too_few_samples


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_decide_nothing(verdicts, seeds: int) -> None:
    found = verdicts("pbrf/tab6", made_up(AS_PRINTED, "gauss_newton", seeds=seeds))
    assert {found[name].verdict for name in ("pbrf", "pbrf-ranks", "above-cold", "small-weight")} == {"undecided"}


def test_influence_that_was_not_solved_decides_nothing(verdicts) -> None:
    found = verdicts("pbrf/tab6", made_up(AS_PRINTED, "gauss_newton", residual=0.2))
    assert {result.verdict for result in found.values()} == {"out of reach"}
    assert "residual of 0.2" in found["pbrf"].explanation
    found = verdicts("pbrf/tab6", made_up(AS_PRINTED, "gauss_newton", residual=float("nan")))
    assert {result.verdict for result in found.values()} == {"out of reach"}


def test_without_points_at_a_minimum_the_claim_on_it_is_out_of_reach(verdicts) -> None:
    without = {name: value for name, value in AS_PRINTED.items() if name != "minimum"}
    found = verdicts("pbrf/tab6", made_up(without, "gauss_newton"))
    assert found["minimum"].verdict == "out of reach"
    assert "in 0 of 3 seeds" in found["minimum"].explanation


def test_two_stages_are_judged_by_differences(verdicts) -> None:
    results = verdicts("pbrf/tab8", made_up({"two_stage": 0.7, "warm": 0.2, "proximal_bregman": 0.9}, "hessian"))
    assert results["above-warm-start"].value == pytest.approx(0.5)
    assert {result.verdict for result in results.values()} == {"reproduced"}
    results = verdicts("pbrf/tab8", made_up({"two_stage": 0.9, "warm": 0.9, "proximal_bregman": 0.7}, "hessian"))
    assert {name: result.verdict for name, result in results.items()} == {
        "above-warm-start": "direction only",
        "below-pbrf": "not reproduced",
    }
    results = verdicts("pbrf/tab8", made_up({"two_stage": 0.1, "warm": 0.1, "proximal_bregman": 0.2}, "hessian"))
    assert results["below-pbrf"].verdict == "out of reach"
