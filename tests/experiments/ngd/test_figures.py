"""ngd-fig1, fig2, fig3, fig7 and fig8 at smoke scale, and what is made of their tables."""

from __future__ import annotations

import json
import math
from itertools import product

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from curvlab.lab import all_targets, load_config, task_settings
from curvlab.lab.claims import load_claims
from curvlab.lab.runs.store import plain
from curvlab.lab.tables import read_table
from experiments.ngd.fig1 import relative_difference
from experiments.ngd.fig1.cutoffs import sampler_settings
from experiments.ngd.fig1.tuned_and_matched import (
    Compared,
    chosen_rates,
    draw_tuned_and_matched,
)
from experiments.ngd.fig3 import interpolated
from experiments.ngd.matched_loss import matched_differences
from experiments.ngd.overfitting import changes_by_last_epoch, last_epoch_table, mean_change, since_minimum
from tests.refusals import refuses


def test_matched_loss_compares_at_equal_loss() -> None:
    # Both follow llc = -10 ln(loss), NGD plus 3; at equal epochs NGD, which fits faster, is far higher.
    losses = {"sgd": [1.0, 0.5, 0.2], "ngd": [0.4, 0.1, 0.05]}
    rows = [
        (name, loss, 3 * (name == "ngd") - 10 * math.log(loss)) for name, own in losses.items() for loss in own
    ]
    table = pd.DataFrame(rows, columns=["optimizer", "train_loss", "llc"])
    table = table.assign(task="m", seed=0, valid=True, trace=1.0)
    found = matched_differences(table).set_index("quantity")
    assert found.loc["llc", "difference"] == pytest.approx(3)
    assert found.loc["llc", ["loss_low", "loss_high"]].tolist() == pytest.approx([0.2, 0.4])
    assert found.loc["trace", "difference"] == pytest.approx(0)
    apart = table.assign(train_loss=table.train_loss / 100 ** (table.optimizer == "ngd"))
    assert matched_differences(apart).difference.isna().all()


# ----------------------------- ngd-fig3 at smoke scale


def test_fig3_end_to_end(run_smoke) -> None:
    folder = run_smoke("ngd/fig3")
    table = read_table(folder, "table")
    assert table.groupby("sweep").size().to_dict() == {"alpha": 3 * 2, "epsilon": 3 * 2, "sgd": 2}
    assert table.llc.notna().equals(table.converged & table.valid)
    # The settings that both sweeps share are one and the same network.
    shared = [table[(table.sweep == sweep) & (table.value == value)] for sweep, value in SHARED.items()]
    assert shared[0].train_loss.tolist() == shared[1].train_loss.tolist()
    equal = read_table(folder, "equal_loss")
    ends = table[table.sweep != "epsilon"].groupby("seed").train_loss.max()
    for seed, own in equal.groupby("seed"):
        assert own.level.tolist() == pytest.approx([ends[seed]] * 4)
        assert (own.loss_after <= own.level + 1e-6).all()
        assert ((own.loss_before > own.level) | (own.loss_before == own.loss_after)).all()
    # Between the LLCs of the two checkpoints beside the level, as far as the logarithm of the loss is.
    to_level, to_end = (equal.loss_before / other for other in (equal.level, equal.loss_after))
    weights = to_level.map(math.log) / to_end.map(math.log)
    assert (equal.llc.notna() == equal.valid).all()
    assert weights.dropna().between(0, 1.001).all()


def test_the_llc_at_a_level_is_interpolated_in_the_logarithm_of_the_loss() -> None:
    own = {"train_loss": [0.4, 0.1], "valid": [True, True], "llc": [10.0, 20.0], "curvature_cutoff": 0.5}
    beside = pd.DataFrame(own, index=[3, 5])
    assert [interpolated(beside, loss)["llc"] for loss in (0.2, 0.4, 0.1)] == pytest.approx([15.0, 10.0, 20.0])
    assert math.isnan(interpolated(beside.assign(valid=[True, False]), 0.2).get("llc", math.nan))


SHARED = {"alpha": 0.1, "epsilon": 1e-10}


# -------------- ngd-fig7 and ngd-fig8 at smoke scale, and changes over synthetic tables


def test_fig7_and_fig8_have_one_set_of_units(run_smoke) -> None:
    fig7 = run_smoke("ngd/fig7")
    table = read_table(fig7, "table")
    assert len(table) == 2 * 2 * 4  # optimizers, seeds, checkpoints
    rises = since_minimum(table).query("quantity == 'validation_loss' and optimizer == 'sgd'").change
    assert (rises > 0.1).all()  # an overfitting regime, or the figure shows nothing
    fig8 = run_smoke("ngd/fig8")
    misses = [json.loads((folder / "run.json").read_text())["store"]["misses"] for folder in (fig7, fig8)]
    assert min(misses) == 0 < max(misses)  # the one that ran first has computed all that the other needs
    assert read_table(fig8, "table").equals(table)


@pytest.mark.parametrize("preset", ["embedded", "paper"])
def test_fig8_has_the_settings_of_fig7(preset: str) -> None:
    first, second = (load_config(all_targets()[key], [f"preset={preset}"]) for key in ("ngd/fig7", "ngd/fig8"))
    assert task_settings(first) == task_settings(second)
    assert first.seed == second.seed


LOSSES = (1.0, 0.8, 1.0, 1.2)  # validation, minimum at the second checkpoint


def overfitting_rows(
    llc: tuple[float, ...], trace: tuple[float, ...], losses: tuple[float, ...] = LOSSES
) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {"task": "m", "optimizer": name, "seed": seed, "epoch": epoch, "num_train": 100, "valid": True}
            | {"train_loss": 0.5 / epoch, "validation_loss": losses[index], "validation_accuracy": 0.5}
            | {"llc": llc[index] + 0.01 * seed, "trace": trace[index] + 0.01 * seed}
            | {"llc_raw": llc[index] - 0.5}
            | {"wbic": 50 / epoch + llc[index] * math.log(100) + 0.01 * seed}
            for name in ("sgd", "ngd")
            for seed in range(3)
            for index, epoch in enumerate((1, 2, 4, 8))
        ]
    )


UP, DOWN, HUMP = (1.0, 2.0, 3.0, 4.0), (4.0, 3.0, 2.0, 1.0), (9.0, 2.0, 3.0, 1.0)


def test_last_epoch_is_what_the_table_up_to_there_says() -> None:
    table = overfitting_rows(HUMP, UP)

    def llc_of_sgd(table: pd.DataFrame) -> pd.DataFrame:
        ends = last_epoch_table(table, changes_by_last_epoch(table))
        return ends.set_index(["optimizer", "quantity", "last_epoch"]).sort_index().loc[("sgd", "llc")]

    llc = llc_of_sgd(table)
    assert llc.seeds.to_dict() == {2: 0, 4: 3, 8: 3}  # at epoch 2 nothing has risen yet
    ratios = [[(end + seed / 100) / (2 + seed / 100) for seed in range(3)] for end in (3, 1)]
    assert llc.change[[4, 8]].tolist() == pytest.approx([math.prod(each) ** (1 / 3) - 1 for each in ratios])
    assert llc.sign.tolist() == ["none", "rises", "falls"]
    llc = llc_of_sgd(table.assign(valid=~((table.seed == 0) & (table.epoch == 4))))
    assert llc.seeds.to_dict() == {2: 0, 4: 2, 8: 3}
    assert llc.sign.tolist() == ["none", "none", "falls"]  # two seeds have no interval
    assert math.isnan(llc.low[4])


def test_a_change_is_of_logarithms_so_that_its_interval_stays_above_minus_one() -> None:
    change, interval = mean_change([-0.5, 0.5, -0.9])
    assert change == pytest.approx((0.5 * 1.5 * 0.1) ** (1 / 3) - 1)
    assert -1 < interval.low < change < interval.high
    assert (1 + interval.low) * (1 + interval.high) == pytest.approx((1 + change) ** 2)
    negative = overfitting_rows(UP, UP).assign(trace=lambda table: table.trace - 2.5)  # it has no logarithm
    assert since_minimum(negative).query("quantity == 'trace'").change.isna().all()


@pytest.mark.parametrize("key", ["ngd/fig7", "ngd/fig8"])
def test_without_valid_estimates_all_is_drawn(key: str, computed_of) -> None:
    table = overfitting_rows(UP, UP).assign(valid=False)
    target = all_targets()[key]
    tables = {"table": table, "summary": since_minimum(table)}
    assert target.load("draw")(computed_of(tables, plain(load_config(target, ["preset=smoke"]))))


# -------------------------------------------------------------------------------------------------------- ngd-fig1
PLACE = {"task": "m", "width": 8}


def test_fig1_counts_converged_and_valid_estimates_and_tunes_with_equal_budgets(run_smoke) -> None:
    folder = run_smoke("ngd/fig1")
    table = read_table(folder, "table")
    assert len(table) == 2 * 2  # optimizers, seeds
    assert table.llc.notna().equals(table.converged & table.valid)
    assert table.estimate.tolist() == pytest.approx((table.llc_raw + table.descent).tolist(), rel=1e-3)
    tuning = read_table(folder, "tuning")
    assert tuning.groupby("optimizer").size().tolist() == [2 * 2] * 2  # learning rates, seeds
    assert set(tuning.epochs) == {25}
    assert len(read_table(folder, "settings")) == 2 * 3  # quantities, settings
    cutoffs = read_table(folder, "cutoffs")
    assert len(cutoffs) == (3 + 2) * 2 * 2  # localizations and step sizes, optimizers, seeds
    nbeta = 200 / math.log(200)
    assert cutoffs.curvature_cutoff.tolist() == pytest.approx((cutoffs.localization / nbeta).tolist())


def test_rates_that_diverge_are_no_choice(run_smoke) -> None:
    folder = run_smoke("ngd/fig1", "tuned_and_matched.lrs=[0.02,1e30]", "tuned_and_matched.seeds=[0]")
    table = read_table(folder, "tuning")
    assert table[table.lr > 1].train_loss.isna().all()
    assert table[table.chosen].lr.unique().tolist() == [0.02]


def test_widths_that_are_compared_must_exist(run_smoke) -> None:
    said = r"ffnn_1_layer_digits_200 has \[7\], not among its widths: choose of \[8, 16\]"
    refuses(said, run_smoke, "ngd/fig1", "tuned_and_matched.widths=[7]", "widths=[8,16]")


def grid(losses: dict[str, dict[float, list[float]]]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {**PLACE, "optimizer": name, "lr": lr, "seed": seed, "validation_loss": loss, "train_loss": loss}
            for name, own in losses.items()
            for lr, values in own.items()
            for seed, loss in enumerate(values)
        ]
    )


def test_the_smallest_mean_validation_loss_is_chosen() -> None:
    table = grid({"sgd": {0.1: [0.2, 0.4], 1.0: [0.1, 0.6]}, "ngd": {0.1: [0.5, 0.5], 1.0: [0.1, 0.2]}})
    assert chosen_rates(table) == {"sgd": 0.1, "ngd": 1.0}
    nan = math.nan
    table = grid({"sgd": {0.1: [0.9, 0.9], 1.0: [0.1, nan]}, "ngd": {0.1: [nan] * 2, 1.0: [nan] * 2}})
    assert chosen_rates(table) == {"sgd": 0.1}  # a rate at which a seed diverged is no choice


# ------------------------------------------------------------------------------- further settings
def compared(*, tuned: float, at_equal_loss: float, valid: bool = True) -> Compared:
    """Return NGD's LLC as a factor of SGD's at its own lr, and the same at equal loss; NGD fits twice as well."""
    tuning = grid({"sgd": {0.1: [0.2] * 3}, "ngd": {0.1: [0.2] * 3}}).assign(chosen=True)
    rows = []
    for name, seed, epoch in product(("sgd", "ngd"), range(3), (1, 2, 3)):
        loss = 0.4 / 2**epoch / (1 + (name == "ngd"))
        value = (10 + 0.1 * seed - 5 * math.log(loss)) * (at_equal_loss if name == "ngd" else 1.0)
        row = {**PLACE, "optimizer": name, "seed": seed, "epoch": epoch, "train_loss": loss}
        rows.append(row | {"llc": value, "trace": value, "valid": valid, "converged": True, "problem": "mixed"})
    equal = pd.DataFrame(rows)
    at_end = equal[(equal.epoch == 3) & (equal.optimizer == "sgd")]
    higher = at_end.assign(optimizer="ngd", llc=at_end.llc * tuned, trace=at_end.trace * tuned)
    return Compared(tuning, equal, pd.concat([at_end, higher]), matched_differences(equal, by=tuple(PLACE)))


def test_settings_without_valid_estimates_are_drawn() -> None:
    found = compared(tuned=0.8, at_equal_loss=1.1, valid=False)
    settings = found.settings()
    assert settings[settings.quantity == "llc"].relative_difference.isna().all()
    draw_tuned_and_matched(found, settings)  # what is missing is left out, not an error


def test_a_seed_that_lacks_a_width_shifts_no_other() -> None:
    """Width 16 differs by 60 %, width 32 by 100 %; the seed without width 32 must not count as 60 % of both."""
    rng = np.random.default_rng(0)
    rows = [
        {"optimizer": name, "width": width, "seed": seed, "llc": mean + noise}
        for width, means in {16: (5.0, 8.0), 32: (10.0, 20.0)}.items()
        for name, mean in zip(("sgd", "ngd"), means, strict=True)
        for seed, noise in enumerate(rng.normal(0, 0.1, 5))
    ]
    table = pd.DataFrame(rows)
    table.loc[(table.width == 32) & (table.optimizer == "sgd") & (table.seed > 2), "llc"] = math.nan
    value, interval = relative_difference(table, "ngd", "llc")
    means = table.groupby(["optimizer", "width"]).llc.mean()
    assert value == pytest.approx(means["ngd"].sum() / means["sgd"].sum() - 1)
    assert interval.num_samples == 3
    assert interval.kind == "t 95 % (Welch), 3 to 5 seeds a width"
    # One width: the ratio of two means, its error by differentials; checked by resampling normal means.
    one = table[table.width == 16]
    value, interval = relative_difference(one, "ngd", "llc")
    stats = one.groupby("optimizer").llc.agg(["mean", "sem"])
    draws = {name: rng.normal(row["mean"], row["sem"], 200_000) for name, row in stats.iterrows()}
    spread = float((draws["ngd"] / draws["sgd"]).std())
    assert 2.2 < (interval.high - interval.low) / 2 / spread < 2.8  # t quantiles of 4 to 8 degrees of freedom
    table.loc[(table.width == 32) & (table.optimizer == "sgd") & (table.seed > 0), "llc"] = math.nan
    assert math.isnan(relative_difference(table, "ngd", "llc")[1].low)


# ------------------------------------------------------------------------------- cut-offs


def test_the_quadratic_part_is_half_the_trace_over_the_cut_off(smoke_result) -> None:
    folder = smoke_result("ngd/fig1")
    table = read_table(folder, "quadratic")
    assert len(table) == 2 * 2 * 21  # optimizers, seeds, cut-offs
    wide = table.pivot(index=["optimizer", "seed"], columns="curvature_cutoff", values="llc")
    assert (wide.diff(axis=1).iloc[:, 1:] < 0).all(axis=None)  # a higher cut-off counts fewer directions
    assert wide.to_numpy().min() > 0
    assert wide.to_numpy().max() < (64 * 8 + 8 + 8 * 10 + 10) / 2  # at most half of all directions
    claims = {result.claim.id: result for result in load_claims(folder)}
    over = (wide.loc["ngd"] - wide.loc["sgd"]) / wide.loc["sgd"].mean()
    found = claims["quadratic-higher-every-cutoff-ffnn-1-layer-digits-200-width-8"]
    assert found.value == pytest.approx(over.mean().min(), rel=1e-5)


def test_chains_are_longer_where_flat_directions_relax_more_slowly() -> None:
    llc = OmegaConf.create({"num_draws": 200, "num_burnin_steps": 90, "step_size": 1e-4, "localization": 100})
    chosen = OmegaConf.create({"localizations": [30, 300], "step_sizes": [5e-5, 2e-4]})
    found = sampler_settings(llc, chosen)
    names = ("localization", "step_size", "num_burnin_steps", "num_draws")
    assert [(sweep, *(own[name] for name in names)) for sweep, own in found] == [
        ("localization", 30, 1e-4, 300, 667),
        ("localization", 300, 1e-4, 90, 200),
        ("step_size", 100, 5e-5, 180, 400),
        ("step_size", 100, 2e-4, 90, 200),
    ]
