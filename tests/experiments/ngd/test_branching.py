"""Measures of Figs. 4, 5 and 6 on made-up tables, and their settings and smoke runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from curvlab.lab import all_targets, load_config, task_settings
from curvlab.lab.claims import load_claims
from curvlab.lab.runs.store import Store
from curvlab.lab.tables import read_table
from experiments.ngd.branching import BEFORE, Branches, branches_of

SPLIT, LAST = 10, 20  # epochs
SEEDS = (0, 1, 2)
Curve = Callable[[int], float]  # of the epochs since the split


def level(value: float) -> Curve:
    return lambda _: value


def rising(by: float) -> Curve:
    """Return an LLC that starts at 100 and has changed by `by` at the end, in a line."""
    return lambda since: 100 + by * since / (LAST - SPLIT)


Curves = Mapping[str, Curve]
NONE: Mapping[str, Any] = {}


def made_up(
    llc: Curves, *, norm: Curves = NONE, loss: Curves = NONE, lr: Mapping[str, float] = NONE
) -> pd.DataFrame:
    """Return a table whose curves are level where nothing is said: LLC 100, norm 1, loss 1, lr 0.1."""
    rows = []
    for branch in (BEFORE, *llc):
        for seed in SEEDS:
            for epoch in range(1, SPLIT + 1) if branch == BEFORE else range(SPLIT + 1, LAST + 1):
                since, rate = epoch - SPLIT, lr.get(branch, 0.1)
                size, value = (curves.get(branch, level(1.0))(since) for curves in (norm, loss))
                row = {"task": "m", "branch": branch, "seed": seed, "epoch": epoch, "lr": rate, "valid": True}
                row |= {"llc": llc.get(branch, level(100.0))(since) + 0.1 * seed, "problem": ""}
                row["llc_raw"] = row["llc"] - 20 + since  # a descent of 20 at the split, which falls
                row |= {"update_norm": size, "step_norm": rate * size}
                rows.append(row | {"train_loss": value, "validation_loss": 2 * value})
    return pd.DataFrame(rows)


def test_measures_of_known_curves() -> None:
    table = made_up(
        {"sgd": level(100.0), "ngd": rising(20)},
        norm={"ngd": lambda since: 3.0 if since % 2 else 1.0},
        loss={"ngd": lambda since: 1 - 0.05 * since},
        lr={"ngd": 0.2},
    )
    found = Branches.of(table)
    own = found.measures.query("branch == 'ngd' and seed == 0").iloc[0]
    # Nine changes of alternating sign, five down: mean -ln(3)/9.
    changes = np.array([-1, 1] * 4 + [-1]) * np.log(3)
    expected = {
        "llc_slope": 2.0,
        "llc_raw_slope": 3.0,
        "llc_raw_split": 80.0,
        "llc_change": 20 / 100.1,  # relative to the mean over seeds at the split: one seed's own may be near 0
        "llc_growth": 2.0,
        "llc_end": 116.0,  # mean of epochs 6 to 10: 112 to 120
        "update_norm_ratio": 2.0,
        "step_norm_ratio": 4.0,
        "fluctuation": changes.std(ddof=1),
        "train_loss_ratio": 0.5,
    }
    assert own[list(expected)].to_dict() == pytest.approx(expected)
    assert found.by_seed("m", "sgd", "llc_change")[0] == pytest.approx(0.0, abs=1e-12)
    row = found.summary.set_index("branch").loc["ngd"]
    assert row.llc_split == pytest.approx(100.1)
    assert row.llc_split_low < 100.1 < row.llc_split_high


def test_updates_are_compared_with_as_many_epochs_before_the_split() -> None:
    norm = {BEFORE: lambda since: 1.0 if since > -3 else 100.0, "ngd": level(2.0)}
    table = made_up({"ngd": level(100.0)}, norm=norm)
    own = Branches.of(table[table.epoch <= SPLIT + 3]).measures.iloc[0]
    assert (own.update_norm_ratio, own.step_norm_ratio) == pytest.approx((2.0, 2.0))


def test_estimates_that_are_not_valid_do_not_count() -> None:
    table = made_up({"sgd": level(100.0), "ngd": rising(20)})
    at_split = (table.branch == BEFORE) & (table.epoch == SPLIT)
    without_split = Branches.of(table.assign(valid=~at_split))
    assert without_split.by_seed("m", "ngd", "llc_split").empty
    assert without_split.by_seed("m", "ngd", "llc_slope")[0] == pytest.approx(2.0)
    after = (table.branch == "ngd") & (table.epoch > 15)
    table.loc[after, ["llc", "valid"]] = [-500.0, False]
    found = Branches.of(table)
    assert found.by_seed("m", "ngd", "llc_slope")[0] == pytest.approx(2.0)
    assert found.by_seed("m", "ngd", "llc_end").empty
    table.loc[at_split, "valid"] = False
    assert Branches.of(table).by_seed("m", "ngd", "llc_slope").empty  # epochs 11 to 15 of 20 are left


def test_a_peak_after_the_split_is_a_rise() -> None:
    """The step rises in the first epoch, the LLC to the first checkpoint; what follows does not count."""
    norm = {"ngd": lambda since: 2.0 if since == 1 else 0.1}
    table = made_up({"ngd": lambda since: 180.0 if since <= 4 else 60.0}, norm=norm)
    without = (table.branch == "ngd") & ~table.epoch.isin([14, 20])
    table.loc[without, ["llc", "llc_raw", "valid"]] = [np.nan, np.nan, False]
    own = Branches.of(table).measures.query("seed == 0").iloc[0]
    assert own.llc_growth == pytest.approx(80 / 4)
    assert own.update_norm_first == pytest.approx(2.0)
    assert own.update_norm_ratio < 1


@pytest.mark.parametrize("key", ["ngd/fig4", "ngd/fig5", "ngd/fig6"])
def test_the_plot_needs_no_valid_estimate(key: str, computed_of) -> None:
    table = made_up({"sgd": level(100.0)}).assign(valid=False, llc=np.nan, wbic=1.0)
    figures = all_targets()[key].load("draw")(computed_of({"table": table}))
    assert [len(figure.axes) for figure in figures.values()] == [2, 2]


def test_each_curve_has_the_name_and_the_values_of_its_branch(computed_of) -> None:
    llc = {"sgd": rising(30), "ngd": rising(-20)}
    table = made_up(llc, norm={"sgd": level(2.0), "ngd": level(3.0)}).assign(wbic=1.0)
    figure = all_targets()["ngd/fig4"].load("draw")(computed_of({"table": table}))["figure.png"]
    ends = [{line.get_label(): line.get_ydata()[-1] for line in axis.get_lines()} for axis in figure.axes]
    rates = {name: table[table.branch == name].lr.iloc[0] for name in llc}
    names = [f"{name.upper()}, rate {rate:g}" for name, rate in rates.items()]
    assert [ends[0][name] for name in names] == [2.0, 3.0]
    assert [ends[1][name] for name in names] == pytest.approx([130.1, 80.1])
    shown = [handle.get_label() for handle in figure.legends[0].legend_handles]
    assert set(shown) >= {f"before the split: SGD, rate {rates['sgd']:g}", *names}


# ------------------------------------------------------------------------------- runs and settings
def test_branches_leave_the_very_state_at_the_split(run_smoke: Callable[..., Path]) -> None:
    folder = run_smoke("ngd/fig4")
    table = read_table(folder, "table")
    assert len(table) == 2 * (10 + 3 * 4)  # seeds, epochs before and of each branch after
    branches = table[table.branch != BEFORE]
    assert sorted(branches.epoch.unique()) == [11, 12, 13, 14]
    split = table[table.epoch == 10].set_index("seed")
    for seed, own in table[table.branch == "sgd"].groupby("seed"):
        np.testing.assert_allclose(own.train_loss, split.train_loss[seed], rtol=5e-3)
    assert table[table.llc.notna()].groupby("branch").epoch.unique().map(list).to_dict() == {
        BEFORE: [10],
        **{branch: [12, 14] for branch in ("sgd", "ngd", "ngd-unrescaled")},
    }
    assert not table[table.llc.isna()].valid.any()
    np.testing.assert_allclose(table.step_norm, table.lr * table.update_norm, rtol=1e-5)
    summary = read_table(folder, "summary").set_index("branch")
    # Without rescaling Kaldi's NGD only shrinks the gradient.
    assert summary.update_norm_ratio["ngd-unrescaled"] < summary.update_norm_ratio["sgd"]


def test_a_branch_without_an_llc_is_judged_by_its_update_size(run_smoke: Callable[..., Path]) -> None:
    folders = run_smoke("ngd/fig4"), run_smoke("ngd/fig4", "unsampled=[ngd-unrescaled]")
    whole, without = (read_table(folder, "table") for folder in folders)
    left_out = without.branch == "ngd-unrescaled"
    assert whole[left_out].llc.notna().any()
    assert without[left_out].llc.isna().all()
    pd.testing.assert_frame_equal(without[~left_out], whole[~left_out])
    norms = [[r for r in load_claims(folder) if r.claim.id.startswith("update-norm-")] for folder in folders]
    assert norms[0] == norms[1]
    assert any(result.claim.words.get("branch") == "ngd-unrescaled" for result in norms[0])


def test_fig5_and_fig6_share_what_they_can(run_smoke: Callable[..., Path]) -> None:
    def trained(key: str) -> set[Path]:
        """The stored trainings that a target uses, seen in a second run."""
        used: list[Path] = []
        path_of = Store._path

        def seen(own: Store, name: str, config: Mapping[str, Any]) -> Path:
            used.append(path_of(own, name, config))
            return used[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Store, "_path", seen)
            run_smoke(key, "tracker=none", drawn=False)
        return {path for path in used if path.parent.name == "trained"}

    folders = [run_smoke(key) for key in ("ngd/fig5", "ngd/fig6")]
    assert len(trained("ngd/fig6") - trained("ngd/fig5")) == 2  # SGD at the raised rate is all that fig5 lacks
    tables = [read_table(folder, "table").set_index(["branch", "seed", "epoch"]) for folder in folders]
    pd.testing.assert_frame_equal(*(table.loc[[BEFORE]] for table in tables))
    pd.testing.assert_series_equal(tables[0].loc["ngd-high"].train_loss, tables[1].loc["ngd-raised"].train_loss)


def test_a_task_changes_its_own_settings_only() -> None:
    tasks = task_settings(load_config(all_targets()["ngd/fig4"], ["preset=laptop"]))
    small, large = tasks["ffnn_6_6_digits_640"], tasks["ffnn_128_128_fashion_mnist_10000"]
    assert list(branches_of(small)) == ["sgd", "exact-ngd"]
    assert list(branches_of(large)) == ["sgd", "ngd", "ngd-unrescaled"]
    assert small.before.optimizer.lr == small.branches.sgd.lr == 0.1
    assert large.before.optimizer.lr == large.branches.sgd.lr == 0.01
    assert (small.before.training.num_epochs, large.before.training.num_epochs) == (300, 60)
    assert small.before.training.batch_size == large.before.training.batch_size == 128
    assert small.before.optimizer.name == "sgd"  # what the task does not name is shared


NGD_RATES = {"low": 1e-4, "middle": 1e-3, "high": 1e-2}
PAPER_RATES = {
    "fig4": {"sgd": 1e-2, "ngd": 1e-2, "ngd-unrescaled": 1e-2},
    "fig5": {"sgd": 1e-4}
    | {f"ngd-{name}{reading}": lr for name, lr in NGD_RATES.items() for reading in ("", "-unrescaled")},
    "fig6": {"sgd": 1e-4, "ngd": 1e-4, "ngd-unrescaled": 1e-4, "sgd-raised": 1e-2, "ngd-raised": 1e-2},
}
FACTORS = {"embedded": [50, 50, 50], "laptop": [1, 10, 10], "paper": [1, 1, 1]}


@pytest.mark.parametrize("preset", FACTORS)
@pytest.mark.parametrize(("place", "item"), enumerate(PAPER_RATES))
def test_learning_rates_are_the_papers_times_one_factor(place: int, item: str, preset: str) -> None:
    cfg = load_config(all_targets()[f"ngd/{item}"], [f"preset={preset}"])
    rates = {name: node.lr for name, node in cfg.branches.items() if not name.startswith("exact-")}
    factor = FACTORS[preset][place]
    assert rates == pytest.approx({name: factor * lr for name, lr in PAPER_RATES[item].items()})
    for own in task_settings(cfg).values():
        assert own.before.optimizer.lr == own.branches.sgd.lr
