"""What the smoke results of the five targets say, and the rules that no other target has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from curvlab.lab import Run, load_config
from curvlab.lab.reporting import load_claims
from experiments.rank1 import fisher, prop
from experiments.shared.task import Task

VERDICTS = {
    "fig1": {"converges": "reproduced"},
    "fig2": {"lemma-converges": "direction only", "lemma-converges-long": "out of reach"},
    "prop": {
        "equality": "refuted",
        "equality-isotropic": "reproduced",
        "largest-eigenvalue": "refuted",
        "not-psd": "reproduced",
        "sigma-bound": "reproduced",
    },
    "rate": {
        "steps-below-bound": "reproduced",
        "printed-bound": "refuted",
        "nonconvex-steps": "refuted",
        "estimate-indefinite": "reproduced",
    },
    "fisher": {
        "lemma-squared": "refuted",
        "lemma-unsquared": "reproduced",
        "softmax-sigma-printed": "refuted",
        "softmax-sigma": "reproduced",
        "softmax-steps-printed": "refuted",
        "softmax-steps": "reproduced",
        "least-squares-sigma": "reproduced",
    },
}
Result = Callable[..., pd.DataFrame]


@pytest.fixture
def table(smoke_result: Callable[[str], Path]) -> Result:
    """Return a function: a table of an item's smoke result."""
    return lambda item, name="summary": pd.read_csv(smoke_result(f"rank1/{item}") / f"{name}.csv")


@pytest.mark.parametrize("item", VERDICTS)
def test_statements_hold_or_fail_as_the_algebra_says(smoke_result: Callable[[str], Path], item: str) -> None:
    found = {result.claim.id: result.verdict for result in load_claims(smoke_result(f"rank1/{item}"))}
    assert VERDICTS[item].items() <= found.items()


def test_fig1_has_the_estimate_exact_and_the_rates_of_the_rule(table: Result) -> None:
    assert table("fig1", "table").error_of_D.max() < 1e-12  # n = 1: every draw of D is f''
    rated = table("fig1").dropna(subset="expected rate")
    assert len(rated) == 6
    assert (rated["measured rate"] / rated["expected rate"] - 1).abs().max() < 0.05


def test_fig2_falls_in_every_step_with_the_lemmas_rule(table: Result) -> None:
    summary = table("fig2")
    ours = summary[summary.method == "uniform direction"]
    lemma = ours[(ours.sigma_scale == 1) & (ours.rule != "constant")]
    assert len(lemma) == 3  # given with m = 1 and 4, measured
    assert (lemma.share_rising == 0).all()
    assert (ours.share_indefinite > 0.5).any()
    assert (ours[ours.safeguard.eq(True)].share_uphill == 0).all()


def test_prop_measures_what_the_formula_says(table: Result) -> None:
    summary = table("prop")
    assert summary.z.abs().max() < 4  # 400 draws of 28 settings
    assert (summary.measured > 0).all()


def test_a_second_computation_gives_the_same_table(tmp_path: Path) -> None:
    settings = ["preset=smoke", "tracker=none", "progress=false", "force=true", "spectra=[power]", "num_draws=40"]
    cfg = load_config(prop.TARGET, [*settings, f"results.root={tmp_path}", f"store.root={tmp_path / 'store'}"])
    tables = [prop.compute(Run(cfg, key="rank1/prop", title="twice"), cfg)["table"] for _ in range(2)]
    pd.testing.assert_frame_equal(*tables, check_exact=True)


def test_rate_is_definite_and_falls_where_f_is_convex(table: Result) -> None:
    convex = table("rate").query("objective.str.contains('quadratic|sqrt|logistic')")
    assert (convex.share_singular == 0).all()  # S + α_k I is definite
    assert (convex.share_rising == 0).all()
    growth = convex.dropna(subset="growth")
    assert (growth.growth < np.where(growth.n == 1, 1.5, 2)).all()


def test_fisher_is_the_hessian_of_linear_outputs(table: Result) -> None:
    bounds = table("fisher", "bounds")
    assert bounds[bounds.smoothness == 0].gap.max() < 1e-12


def test_fisher_needs_two_outputs_for_two_classes() -> None:
    run = SimpleNamespace(record_data=lambda name, checksum: None)
    settings = OmegaConf.create({"data": {"_target_": "curvlab.lab.data.load_breast_cancer"}})
    with pytest.raises(ValueError, match="data=breast_cancer has one output for two classes; softmax needs one"):
        fisher.network_rows(Task.load(run, "mlp_breast_cancer", settings))


def test_fisher_knows_its_objectives() -> None:
    cfg = OmegaConf.create({"rate_objectives": ["softmax"]})
    with pytest.raises(ValueError, match=r"unknown rate_objectives \['softmax'\]: choose among 'least squares, f"):
        fisher.rate_rows(SimpleNamespace(), cfg)
