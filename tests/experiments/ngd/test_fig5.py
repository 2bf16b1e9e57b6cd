"""ngd-fig5 and ngd-fig6 at smoke scale: what they share is computed once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from curvlab.lab.reporting import load_claims
from experiments.ngd.branching.measures import BEFORE


def test_fig5_and_fig6_share_what_they_can(run_smoke: Callable[..., Path]) -> None:
    fig5 = run_smoke("ngd/fig5")
    store = fig5.parents[3] / "store" / "ngd" / "trained"
    trained = set(store.glob("*.pt"))
    assert len(trained) == 2 * (1 + 7)  # seeds; one run up to the split, seven branches
    fig6 = run_smoke("ngd/fig6")
    added = set(store.glob("*.pt")) - trained
    assert len(added) == 2  # SGD at the raised rate is all that fig5 lacks
    tables = {
        folder: pd.read_csv(folder / "table.csv").set_index(["branch", "seed", "epoch"]) for folder in (fig5, fig6)
    }
    pd.testing.assert_frame_equal(tables[fig5].loc[[BEFORE]], tables[fig6].loc[[BEFORE]])
    pd.testing.assert_series_equal(
        tables[fig5].loc["ngd-high"].train_loss, tables[fig6].loc["ngd-raised"].train_loss
    )
    for folder, count in ((fig5, 3), (fig6, 5)):
        assert len(load_claims(folder)) == count
        assert (folder / "figure.png").is_file()
