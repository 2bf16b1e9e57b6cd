"""The claims of pbrf-tab6, tab7 and tab8 on tables that are made up."""

from __future__ import annotations

import pandas as pd
import pytest


def made_up(pearson: dict[str, float], curvature: str) -> dict[str, pd.DataFrame]:
    """Three seeds, all alike but for a hundredth."""
    rows = [
        {"task": "mlp", "seed": seed, "curvature": curvature, "response": response, "coefficient": coefficient}
        | {"way": "over_test", "value": value + 0.01 * seed, "low": value - 0.1, "high": value + 0.1, "points": 20}
        for seed in range(3)
        for response, value in pearson.items()
        for coefficient in ("pearson", "spearman")
    ]
    table = [
        {"task": "mlp", "curvature": curvature, "response": response}
        | {f"{name} {way}": 0.0 for name in ("pearson", "spearman") for way in ("over_points", "pooled")}
        for response in pearson
    ]
    return {"table": pd.DataFrame(table), "correlations": pd.DataFrame(rows)}


def test_the_central_claim_is_judged_by_its_bounds(computed_of, judged) -> None:
    values = {"cold": 0.0, "warm": 0.1, "proximal_bregman": 0.95, "linearised": 0.95}
    as_printed = computed_of(made_up(values, "gauss_newton"))
    verdicts = {result.claim.id: result.verdict for result in judged("pbrf/tab6", as_printed)}
    names = ("pbrf-mlp", "pbrf-ranks-mlp", "linearised-mlp", "cold-mlp", "warm-mlp")
    assert verdicts == dict.fromkeys(names, "reproduced")
    values = {"cold": 0.95, "warm": 0.95, "proximal_bregman": 0.0, "linearised": 0.0}
    turned = computed_of(made_up(values, "hessian"))
    verdicts = {result.claim.id: result.verdict for result in judged("pbrf/tab7", turned)}
    assert set(verdicts.values()) == {"not reproduced"}


def test_two_stages_are_judged_by_differences(computed_of, judged) -> None:
    as_printed = computed_of(made_up({"two_stage": 0.7, "warm": 0.2, "proximal_bregman": 0.9}, "hessian"))
    results = {result.claim.id: result for result in judged("pbrf/tab8", as_printed)}
    assert results["above-warm-start-mlp"].value == pytest.approx(0.5)
    assert {result.verdict for result in results.values()} == {"reproduced"}
    turned = computed_of(made_up({"two_stage": 0.9, "warm": 0.9, "proximal_bregman": 0.7}, "hessian"))
    verdicts = {result.claim.id: result.verdict for result in judged("pbrf/tab8", turned)}
    assert verdicts == {"above-warm-start-mlp": "direction only", "below-pbrf-mlp": "not reproduced"}
