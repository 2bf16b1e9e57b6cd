"""The claims of ngd-fig2 on a table that is made up, and the comparison at equal training loss."""

from __future__ import annotations

import math
from collections.abc import Callable

import pandas as pd
import pytest

from curvlab.lab import ClaimResult, Computed
from experiments.ngd.matched_loss import matched_differences

Judged = Callable[[str, Computed], list[ClaimResult]]


def test_matched_loss_compares_at_equal_loss() -> None:
    # Both follow llc = -10 ln(loss), NGD plus 3; at equal epochs NGD, which fits faster, is far higher.
    losses = {"sgd": [1.0, 0.5, 0.2], "ngd": [0.4, 0.1, 0.05]}
    rows = [
        {
            "task": "m",
            "seed": 0,
            "optimizer": name,
            "train_loss": loss,
            "valid": True,
            "llc": -10 * math.log(loss) + 3 * (name == "ngd"),
            "trace": 1.0,
        }
        for name, values in losses.items()
        for loss in values
    ]
    found = matched_differences(pd.DataFrame(rows)).set_index("quantity")
    assert found.loc["llc", "difference"] == pytest.approx(3)
    assert found.loc["llc", ["loss_low", "loss_high"]].tolist() == pytest.approx([0.2, 0.4])
    assert found.loc["trace", "difference"] == pytest.approx(0)
    apart = pd.DataFrame(
        [row | {"train_loss": row["train_loss"] / 100 ** (row["optimizer"] == "ngd")} for row in rows]
    )
    assert matched_differences(apart).difference.isna().all()


def test_fig2_verdicts(computed_of: Callable[..., Computed], judged: Judged) -> None:
    rows = [
        {"task": "m", "optimizer": name, "seed": seed, "epoch": epoch, "train_loss": 1 / epoch, "valid": True}
        | {
            "llc": 10.0 + seed / 10 + 5 * (name == "ngd"),
            "llc_raw": (10.0 + seed / 10) * (0.5 if name == "ngd" and epoch == 4 else 1.0),
            "trace": (100.0 + seed) / epoch * (1 - (name == "ngd") / 2),
        }
        for name in ("sgd", "ngd")
        for seed in range(3)
        for epoch in (1, 2, 4)
    ]
    table = pd.DataFrame(rows)

    def results_of(table: pd.DataFrame) -> list[ClaimResult]:
        return judged("ngd/fig2", computed_of({"table": table, "matched": matched_differences(table)}))

    results = {result.claim.id: result for result in results_of(table)}
    assert {key: result.verdict for key, result in results.items()} == {
        "trace-higher-m": "not reproduced",
        "llc-higher-m": "reproduced",
        "llc-plateaus-sgd-m": "reproduced",
        "llc-plateaus-ngd-m": "reproduced",
        "llc-higher-raw-m": "not reproduced",
        "llc-plateaus-sgd-raw-m": "reproduced",
        "llc-plateaus-ngd-raw-m": "not reproduced",
        "trace-decreases-m": "reproduced",
    }
    assert results["trace-higher-m"].value == pytest.approx(-0.5)
    for valid, plateau in ((False, "out of reach"), (table.optimizer == "ngd", "reproduced")):
        results = {result.claim.id: result.verdict for result in results_of(table.assign(valid=valid))}
        assert results["llc-higher-m"] == results["llc-plateaus-sgd-m"] == "out of reach"
        assert results["llc-plateaus-ngd-m"] == plateau
        assert results["trace-decreases-m"] == "reproduced"
