"""ngd-fig4 at smoke scale, and the settings of all targets that branch: Figs. 4, 5 and 6 of the NGD paper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from curvlab.lab import all_targets, load_config, task_settings
from curvlab.lab.reporting import load_claims
from experiments.ngd.branching.compute import judged_branches
from experiments.ngd.branching.measures import BEFORE


def test_fig4_end_to_end(run_smoke: Callable[..., Path]) -> None:
    # A branch that hardly moves shows from where it starts: from the very state at the split.
    folder = run_smoke("ngd/fig4", "branches.sgd.lr=1.0e-4")
    table = pd.read_csv(folder / "table.csv")
    assert len(table) == 2 * (10 + 4 * 4)  # seeds, epochs before and of each branch after
    branches = table[table.branch != BEFORE]
    assert set(branches.branch) == {"sgd", "ngd", "ngd-unrescaled", "exact-ngd"}
    assert sorted(branches.epoch.unique()) == [11, 12, 13, 14]
    split = table[table.epoch == 10].set_index("seed")
    for seed, own in table[table.branch == "sgd"].groupby("seed"):
        np.testing.assert_allclose(own.train_loss, split.train_loss[seed], rtol=5e-3)
    assert table[table.llc.notna()].groupby("branch").epoch.unique().map(list).to_dict() == {
        BEFORE: [10],
        **{branch: [12, 14] for branch in branches.branch.unique()},
    }
    assert not table[table.llc.isna()].valid.any()
    np.testing.assert_allclose(table.step_norm, table.lr * table.update_norm, rtol=1e-5)
    summary = pd.read_csv(folder / "summary.csv").set_index("branch")
    # Without rescaling Kaldi's NGD only shrinks the gradient.
    assert summary.update_norm_ratio["ngd-unrescaled"] < summary.update_norm_ratio["sgd"]
    assert {result.claim.id for result in load_claims(folder)} == {
        "update-norm-steady-ffnn-8-digits-200",
        "update-norm-fluctuates-ffnn-8-digits-200",
        "llc-rises-ffnn-8-digits-200",
        "llc-rises-faster-ffnn-8-digits-200",
    }
    assert (folder / "figure.png").is_file()


def test_a_task_changes_its_own_settings_only() -> None:
    tasks = task_settings(load_config(all_targets()["ngd/fig4"], ["preset=laptop"]))
    small, large = tasks["ffnn_6_6_digits_640"], tasks["ffnn_128_128_fashion_mnist_10000"]
    assert set(small.branches) == {"sgd", "exact-ngd"}
    assert set(large.branches) == {"sgd", "ngd", "ngd-unrescaled"}
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
FACTORS = {
    "embedded": {"fig4": 50, "fig5": 50, "fig6": 50},
    "laptop": {"fig4": 1, "fig5": 10, "fig6": 10},
    "paper": {"fig4": 1, "fig5": 1, "fig6": 1},
}


@pytest.mark.parametrize("preset", FACTORS)
@pytest.mark.parametrize("item", PAPER_RATES)
def test_learning_rates_are_the_papers_times_one_factor(item: str, preset: str) -> None:
    cfg = load_config(all_targets()[f"ngd/{item}"], [f"preset={preset}"])
    tasks = task_settings(cfg)
    rates = {name: node.lr for name, node in cfg.branches.items()}  # a task may leave some of them out
    factor = FACTORS[preset][item]
    assert rates == pytest.approx({name: factor * lr for name, lr in PAPER_RATES[item].items()})
    judged = judged_branches(cfg)
    assert judged  # or nothing would be judged at all
    for name, own in tasks.items():
        assert own.before.optimizer.lr == own.branches.sgd.lr
        assert set(judged.get(name.replace("_", "-"), [])) <= set(own.branches)
