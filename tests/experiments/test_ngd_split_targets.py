"""The targets that split a training run at smoke scale: Figs. 4, 5 and 6 of the NGD paper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from curvlab.reporting import load_claims
from curvlab.runs import load_config
from experiments.ngd.fig4_split import main as fig4
from experiments.ngd.fig5_learning_rates import main as fig5
from experiments.ngd.fig6_raised_sgd import main as fig6
from experiments.ngd.split import BEFORE, panel_settings
from experiments.ngd.split_plot import draw


def test_fig4_end_to_end(run_target: Callable[..., Path]) -> None:
    # A branch that hardly moves shows from where it starts: from the very state at the split.
    results = run_target(fig4, "ngd/fig4_split", "branches.sgd.lr=1.0e-4")
    (folder,) = (results / "ngd" / "fig4").iterdir()
    table = pd.read_csv(folder / "table.csv")
    assert len(table) == 2 * (15 + 4 * 6)  # seeds, epochs before and of each branch after
    branches = table[table.branch != BEFORE]
    assert set(branches.branch) == {"sgd", "ngd", "ngd-unrescaled", "exact-ngd"}
    assert sorted(branches.epoch.unique()) == [16, 17, 18, 19, 20, 21]
    split = table[table.epoch == 15].set_index("seed")
    for seed, own in table[table.branch == "sgd"].groupby("seed"):
        np.testing.assert_allclose(own.train_loss, split.train_loss[seed], rtol=5e-3)
    assert table[table.llc.notna()].groupby("branch").epoch.unique().map(list).to_dict() == {
        BEFORE: [10, 15],
        **{branch: [17, 19, 21] for branch in branches.branch.unique()},
    }
    assert not table[table.llc.isna()].valid.any()
    np.testing.assert_allclose(table.step_norm, table.lr * table.update_norm, rtol=1e-5)
    summary = pd.read_csv(folder / "summary.csv").set_index("branch")
    # Without rescaling Kaldi's NGD only shrinks the gradient.
    assert summary.update_norm_ratio["ngd-unrescaled"] < summary.update_norm_ratio["sgd"]
    assert {result.claim.id for result in load_claims(folder)} == {
        "update-norm-steady-ffnn-8",
        "update-norm-fluctuates-ffnn-8",
        "llc-rises-ffnn-8",
        "llc-rises-faster-ffnn-8",
    }
    assert (folder / "figure.png").is_file()


def test_fig5_and_fig6_share_what_they_can(run_target: Callable[..., Path]) -> None:
    results = run_target(fig5, "ngd/fig5_learning_rates")
    store = results.parent / "store"
    trained = set((store / "ngd" / "trained").glob("*.pt"))
    assert len(trained) == 2 * (1 + 7)  # seeds; one run up to the split, seven branches
    run_target(fig6, "ngd/fig6_raised_sgd")
    added = set((store / "ngd" / "trained").glob("*.pt")) - trained
    assert len(added) == 2  # SGD at the raised rate is all that fig5 lacks
    tables = {
        item: pd.read_csv(results / "ngd" / item / "smoke" / "table.csv").set_index(["branch", "seed", "epoch"])
        for item in ("fig5", "fig6")
    }
    pd.testing.assert_frame_equal(tables["fig5"].loc[[BEFORE]], tables["fig6"].loc[[BEFORE]])
    pd.testing.assert_series_equal(
        tables["fig5"].loc["ngd-high"].train_loss, tables["fig6"].loc["ngd-raised"].train_loss
    )
    for item, count in (("fig5", 3), ("fig6", 5)):
        folder = results / "ngd" / item / "smoke"
        assert len(load_claims(folder)) == count
        assert (folder / "figure.png").is_file()


def test_a_panel_changes_its_own_settings_only() -> None:
    cfg = load_config("ngd/fig4_split", ["preset=laptop"])
    small, large = panel_settings(cfg, "ffnn-6-6"), panel_settings(cfg, "ffnn-256-256")
    assert set(small.branches) == {"sgd", "exact-ngd"}
    assert set(large.branches) == {"sgd", "ngd", "ngd-unrescaled"}
    assert small.before.optimizer.lr == small.branches.sgd.lr == 0.1
    assert large.before.optimizer.lr == large.branches.sgd.lr == 0.03
    assert (small.before.training.num_epochs, large.before.training.num_epochs) == (300, 10)
    assert small.before.training.batch_size == large.before.training.batch_size == 128
    assert small.before.optimizer.name == "sgd"  # what the panel does not name is shared


NGD_RATES = {"low": 1e-4, "middle": 1e-3, "high": 1e-2}
PAPER_RATES = {
    "fig4_split": {"sgd": 1e-2, "ngd": 1e-2, "ngd-unrescaled": 1e-2},
    "fig5_learning_rates": {"sgd": 1e-4}
    | {f"ngd-{name}{reading}": lr for name, lr in NGD_RATES.items() for reading in ("", "-unrescaled")},
    "fig6_raised_sgd": {"sgd": 1e-4, "ngd": 1e-4, "ngd-unrescaled": 1e-4, "sgd-raised": 1e-2, "ngd-raised": 1e-2},
}


@pytest.mark.parametrize("preset", ["embedded", "laptop", "paper"])
@pytest.mark.parametrize("target", PAPER_RATES)
def test_learning_rates_are_the_papers_times_one_factor(target: str, preset: str) -> None:
    cfg = load_config(f"ngd/{target}", [f"preset={preset}"])
    first, *_ = cfg.panels
    settings = panel_settings(cfg, first)
    rates = {name: node.lr for name, node in settings.branches.items()}
    assert rates == pytest.approx({name: cfg.lr_factor * lr for name, lr in PAPER_RATES[target].items()})
    for panel, claimed in cfg.claimed.items():
        own = panel_settings(cfg, panel)
        assert own.before.optimizer.lr == own.branches.sgd.lr
        assert set([claimed] if isinstance(claimed, str) else claimed) <= set(own.branches)


def test_the_plot_needs_no_valid_estimate() -> None:
    rows = [
        {"panel": "m", "branch": branch, "seed": seed, "epoch": epoch, "valid": False, "llc": np.nan}
        for branch, epochs in ((BEFORE, (1, 2, 3)), ("sgd", (4, 5)))
        for seed in (0, 1)
        for epoch in epochs
    ]
    columns = ("train_loss", "validation_loss", "update_norm", "step_norm", "wbic")
    table = pd.DataFrame(rows).assign(**dict.fromkeys(columns, 1.0))
    figure = draw(table)
    assert len(figure.axes) == 6
