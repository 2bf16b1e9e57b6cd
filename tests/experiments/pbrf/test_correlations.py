"""The claims of pbrf-tab6, tab7 and tab8 on tables that are made up."""

from __future__ import annotations

import pandas as pd
import pytest

EXPLAINING = {
    "carried_on": 0.95,
    "minimum": 0.95,
    "small_weight": 0.99,
    "linearised": 0.6,
    "linearised_minimum": 0.9,
}


def made_up(
    pearson: dict[str, float], curvature: str, *, seeds: int = 3, residual: float = 1e-6, **lissa: float
) -> dict[str, pd.DataFrame]:
    """Some seeds, all alike but for a thousandth; `lissa` changes what LiSSA at one scaling says of a response."""
    estimates = {"exact": pearson, "LiSSA, σ = 10": dict.fromkeys(pearson, float("nan")), "own length": pearson}
    estimates |= {"LiSSA, σ = 25": pearson | lissa, "LiSSA, σ = 50": dict.fromkeys(pearson, 0.0)}
    rows = [
        {"task": "mlp", "seed": seed, "curvature": curvature, "estimate": estimate, "response": response}
        | {"coefficient": coefficient}
        | {"way": way, "value": value + 0.001 * seed, "low": value - 0.1, "high": value + 0.1, "points": 20}
        for seed in range(seeds)
        for estimate, values in estimates.items()
        for response, value in values.items()
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


def words(found, names: set[str]) -> dict[str, str]:
    return {name: result.verdict for name, result in found.items() if name in names}


PAPER = {"pbrf", "pbrf-ranks", "above-cold", "above-warm", "cold", "warm"}
OURS = {"exact", "own-length", "minimum", "small-weight", "smallest-scaling"}


def test_the_central_claim_is_judged_by_its_bounds(verdicts) -> None:
    sixth = verdicts("pbrf/tab6", made_up(AS_PRINTED, "gauss_newton"))
    assert words(sixth, PAPER | OURS) == dict.fromkeys(PAPER | OURS, "reproduced")
    assert sixth["above-cold"].value == pytest.approx(0.95)
    for name in PAPER:  # of reproduced claims, too; LiSSA that is finite, at its best scaling
        assert sixth[name].explanation.startswith("By LiSSA, σ = 25:")
    seventh = verdicts("pbrf/tab7", made_up(AS_PRINTED | {"cold": -0.01}, "hessian"))
    assert set(seventh) == PAPER | OURS - {"minimum", "small-weight"}
    assert {result.verdict for result in seventh.values()} == {"reproduced"}
    assert "180 to 180 of 1000 eigenvalues" in seventh["pbrf"].explanation


def test_lissa_and_the_exact_solve_are_judged_apart(verdicts) -> None:
    low = AS_PRINTED | {"proximal_bregman": 0.1}
    found = verdicts("pbrf/tab7", made_up(low, "hessian", residual=1e-3, proximal_bregman=0.95))
    assert found["pbrf"].verdict == "reproduced"  # whatever the residual of the exact solve
    assert found["exact"].verdict == "out of reach"
    assert "residual of 0.001" in found["exact"].explanation
    found = verdicts("pbrf/tab7", made_up(low, "hessian", proximal_bregman=0.95))
    assert (found["exact"].verdict, found["own-length"].verdict) == ("not reproduced", "not reproduced")


def test_the_scaling_is_the_best_or_the_smallest_and_over_points_is_not_over_test(verdicts) -> None:
    tables = made_up(AS_PRINTED, "gauss_newton", proximal_bregman=0.6)  # at 25, the smallest that is finite
    rows = tables["correlations"]
    rows.loc[(rows.estimate == "LiSSA, σ = 50") & (rows.response == "proximal_bregman"), "value"] = 0.95
    warm = (rows.response == "warm") & (rows.estimate == "LiSSA, σ = 50")
    rows.loc[warm & (rows.way == "over_points"), "value"] = [0.6, 0.61, 0.62] * 2
    found = verdicts("pbrf/tab6", tables)
    assert words(found, {"pbrf", "smallest-scaling"}) == {
        "pbrf": "reproduced",
        "smallest-scaling": "direction only",
    }
    assert (found["warm"].value, found["over-points"].value) == pytest.approx((0.001, 0.61), abs=2e-3)


def test_a_result_from_before_lissa_keeps_its_exact_claims(verdicts) -> None:
    tables, after = made_up(AS_PRINTED, "gauss_newton"), {"own-length", "smallest-scaling"}
    old = tables["correlations"].query("estimate == 'exact'").drop(columns="estimate")
    found = verdicts("pbrf/tab6", tables | {"correlations": old})
    assert set(words(found, PAPER | after).values()) == {"out of reach"}
    assert set(words(found, OURS - after).values()) == {"reproduced"}


def test_where_influence_predicts_nothing_small_correlations_are_no_finding(verdicts) -> None:
    nothing = AS_PRINTED | {"cold": 0.0, "warm": 0.0, "proximal_bregman": -0.01}
    found = verdicts("pbrf/tab6", made_up(nothing, "gauss_newton", proximal_bregman=0.1))
    assert words(found, {"cold", "warm"}) == dict.fromkeys(("cold", "warm"), "out of reach")
    assert words(found, {"pbrf", "pbrf-ranks"}) == dict.fromkeys(("pbrf", "pbrf-ranks"), "not reproduced")
    found = verdicts("pbrf/tab6", made_up(nothing | {"cold": 0.4}, "gauss_newton", proximal_bregman=0.1))
    assert found["above-cold"].verdict == "not reproduced"


def test_a_large_negative_correlation_is_not_small(verdicts) -> None:
    found = verdicts("pbrf/tab6", made_up(AS_PRINTED | {"cold": -0.9}, "gauss_newton"))
    assert (found["cold"].verdict, found["above-cold"].verdict) == ("not reproduced", "reproduced")


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_decide_nothing(verdicts, seeds: int) -> None:
    found = verdicts("pbrf/tab6", made_up(AS_PRINTED, "gauss_newton", seeds=seeds))
    assert {found[name].verdict for name in ("pbrf", "pbrf-ranks", "above-cold", "small-weight")} == {
        "not asked here"
    }


def test_without_points_at_a_minimum_the_claim_on_it_is_out_of_reach(verdicts) -> None:
    without = {name: value for name, value in AS_PRINTED.items() if name != "minimum"}
    found = verdicts("pbrf/tab6", made_up(without, "gauss_newton"))
    assert found["minimum"].verdict == "out of reach"
    assert "in 0 of 3 seeds" in found["minimum"].explanation


@pytest.mark.parametrize(
    ("two_stage", "warm", "pbrf", "expected"),
    [
        (0.7, 0.2, 0.9, ["reproduced", "reproduced", "reproduced"]),
        (0.9, 0.9, 0.91, ["direction only", "reproduced", "reproduced"]),
        (
            0.1,
            0.1,
            0.9,
            ["direction only", "direction only", "direction only"],
        ),  # two stages that fail are no finding
        (0.1, 0.1, 0.2, ["direction only", "out of reach", "direction only"]),
    ],
)
def test_two_stages_are_judged_by_differences(verdicts, two_stage, warm, pbrf, expected) -> None:
    found = verdicts(
        "pbrf/tab8", made_up({"two_stage": two_stage, "warm": warm, "proximal_bregman": pbrf}, "hessian")
    )
    assert [found[name].verdict for name in ("above-warm-start", "below-pbrf", "two-stages")] == expected
    assert found["above-warm-start"].value == pytest.approx(two_stage - warm)


def test_of_points_that_share_a_network_each_seed_counts_once(verdicts) -> None:
    tables = made_up({"two_stage": 0.7, "warm": 0.2, "proximal_bregman": 0.9}, "hessian")
    kept = [(0, [0.9] * 8), (1, [0.5]), (2, [0.7])]
    rows = [
        {"task": "mlp", "seed": seed, "kept": 1.0, "slow_two_stage": value} for seed, own in kept for value in own
    ]
    found = verdicts("pbrf/tab8", tables | {"points": pd.DataFrame(rows)})["sign-kept"]
    assert found.value == pytest.approx(0.7)
    assert found.interval.num_samples == 3
