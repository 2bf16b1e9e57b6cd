"""The fair comparison of ngd-fig1: the choice of the learning rate, and what follows from synthetic tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from experiments.ngd.fig1_fair import EQUAL, MATCHED, TUNED, FairComparison
from experiments.ngd.fig1_fair_claims import judge_fair
from experiments.ngd.fig1_fair_plot import draw_fair
from experiments.ngd.fig1_llc_width import main as fig1
from experiments.ngd.matched_loss import matched_differences
from experiments.ngd.tuning import chosen_rates

MODEL = "1 hidden layer, width 8"


def grid(losses: dict[str, dict[float, list[float]]]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "model": MODEL,
                "optimizer": name,
                "lr": lr,
                "seed": seed,
                "validation_loss": loss,
                "train_loss": loss,
            }
            for name, own in losses.items()
            for lr, values in own.items()
            for seed, loss in enumerate(values)
        ]
    )


def test_the_smallest_mean_validation_loss_is_chosen() -> None:
    table = grid({"sgd": {0.1: [0.2, 0.4], 1.0: [0.1, 0.6]}, "ngd": {0.1: [0.5, 0.5], 1.0: [0.1, 0.2]}})
    assert chosen_rates(table) == {"sgd": 0.1, "ngd": 1.0}


def test_a_rate_at_which_a_seed_diverged_is_no_choice() -> None:
    table = grid(
        {"sgd": {0.1: [0.9, 0.9], 1.0: [0.1, math.nan]}, "ngd": {0.1: [math.nan] * 2, 1.0: [math.nan] * 2}}
    )
    assert chosen_rates(table) == {"sgd": 0.1}


def comparison(*, tuned: float, at_equal_loss: float, valid: bool = True) -> FairComparison:
    """Return NGD's LLC as a factor of SGD's at its own lr, and the same at equal loss; NGD fits twice as well."""
    tuning = grid({"sgd": {0.1: [0.2] * 3}, "ngd": {0.1: [0.2] * 3}}).assign(chosen=True)
    rows = []
    for name, factor in (("sgd", 1.0), ("ngd", at_equal_loss)):
        for seed in range(3):
            for epoch, loss in ((1, 0.2), (2, 0.1), (3, 0.05)):
                own_loss = loss / 2 if name == "ngd" else loss
                value = (10 + 0.1 * seed - 5 * math.log(own_loss)) * factor
                rows.append(
                    {"model": MODEL, "optimizer": name, "seed": seed, "epoch": epoch, "train_loss": own_loss}
                    | {"llc": value, "trace": value, "valid": valid, "converged": True, "problem": "mixed"}
                )
    equal = pd.DataFrame(rows)
    at_end = equal[(equal.epoch == 3) & (equal.optimizer == "sgd")]
    higher = at_end.assign(optimizer="ngd", llc=at_end.llc * tuned, trace=at_end.trace * tuned)
    return FairComparison(tuning, equal, pd.concat([at_end, higher]), matched_differences(equal))


def verdicts(fair: FairComparison) -> dict[str, str]:
    return {result.claim.id.rsplit("-1-hidden", 1)[0]: result.verdict for result in judge_fair(fair)}


def test_higher_at_equal_epochs_but_not_at_equal_loss() -> None:
    fair = comparison(tuned=1.2, at_equal_loss=0.9)
    assert verdicts(fair) == {
        "llc-higher-tuned": "reproduced",
        "trace-higher-tuned": "reproduced",
        "llc-higher-matched": "not reproduced",
        "trace-higher-matched": "not reproduced",
    }
    assert fair.relative_differences(MODEL, EQUAL, "llc").mean() > 0  # NGD fits better, which raises its LLC
    assert fair.relative_differences(MODEL, MATCHED, "llc") == pytest.approx([-0.1] * 3, rel=0.01)
    assert fair.relative_differences(MODEL, TUNED, "llc") == pytest.approx([0.2] * 3, rel=0.01)
    explanation = next(result.explanation for result in judge_fair(fair) if "matched" in result.claim.id)
    assert "At equal lr and epochs the difference is +" in explanation


def test_without_valid_estimates_only_the_trace_is_judged() -> None:
    fair = comparison(tuned=0.8, at_equal_loss=1.1, valid=False)
    assert verdicts(fair) == {
        "llc-higher-tuned": "out of reach",
        "trace-higher-tuned": "not reproduced",
        "llc-higher-matched": "out of reach",
        "trace-higher-matched": "reproduced",
    }
    settings = fair.settings()
    assert settings[settings.quantity == "llc"].relative_difference.isna().all()
    draw_fair(fair.tuning, fair.equal, settings)  # what is missing is left out, not an error


def test_models_of_the_fair_comparison_must_exist(run_target: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"fair.models has \['width 7'\], not among the models: choose of"):
        run_target(fig1, "ngd/fig1_llc_width", "fair.models=[width 7]")


def test_estimates_of_unconverged_training_do_not_count() -> None:
    fair = comparison(tuned=1.2, at_equal_loss=0.9)
    for table in (fair.tuned, fair.equal):
        wrong = (table.optimizer == "ngd") & (table.seed == 0)
        table.loc[wrong, ["llc", "converged"]] = [1e6, False]
    for setting in (TUNED, EQUAL):
        assert len(fair.relative_differences(MODEL, setting, "llc")) == 2
        assert max(fair.relative_differences(MODEL, setting, "llc")) < 10
