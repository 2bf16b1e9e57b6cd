"""Measures and verdicts of Figs. 4, 5 and 6 of the NGD paper on tables that are made up."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from curvlab.lab import ClaimResult, Computed, all_targets
from experiments.ngd.branching.measures import BEFORE, BranchResults

SPLIT, LAST = 10, 20  # epochs
SEEDS = (0, 1, 2)
Curve = Callable[[int], float]  # of the epochs since the split


def level(value: float) -> Curve:
    return lambda _: value


def made_up(
    llc: dict[str, Curve],
    *,
    norm: dict[str, Curve] | None = None,
    loss: dict[str, Curve] | None = None,
    lr: dict[str, float] | None = None,
) -> pd.DataFrame:
    """Return a table whose curves are level where nothing is said: LLC 100, norm 1, loss 1, lr 0.1."""
    rows = []
    for branch in (BEFORE, *llc):
        for seed in SEEDS:
            for epoch in range(1, SPLIT + 1) if branch == BEFORE else range(SPLIT + 1, LAST + 1):
                since = epoch - SPLIT
                size, value = (curves.get(branch, level(1.0))(since) for curves in (norm or {}, loss or {}))
                rate = (lr or {}).get(branch, 0.1)
                row = {"task": "m", "branch": branch, "seed": seed, "epoch": epoch, "lr": rate, "valid": True}
                row |= {"llc": llc.get(branch, level(100.0))(since) + 0.1 * seed, "problem": ""}
                row["llc_raw"] = row["llc"] - 20 + since  # a descent of 20 at the split, which falls
                row |= {"update_norm": size, "step_norm": rate * size}
                rows.append(row | {"train_loss": value, "validation_loss": 2 * value})
    return pd.DataFrame(rows)


def verdicts(results: list[ClaimResult]) -> dict[str, str]:
    return {result.claim.id.removesuffix("-m"): result.verdict for result in results}


@pytest.fixture
def judge(
    computed_of: Callable[..., Computed], judged: Callable[[str, Computed], list[ClaimResult]]
) -> Callable[..., list[ClaimResult]]:
    """Return a function that judges these branches of a table."""

    def judge(key: str, table: pd.DataFrame, *branches: str) -> list[ClaimResult]:
        config = {"tasks": {"m": {"judged_branches": list(branches)}}}
        return judged(key, computed_of({"table": table}, config))

    return judge


Judge = Callable[..., list[ClaimResult]]


def rising(by: float) -> Curve:
    """Return an LLC that starts at 100 and has changed by `by` at the end, in a line."""
    return lambda since: 100 + by * since / (LAST - SPLIT)


def test_measures_of_known_curves() -> None:
    table = made_up(
        {"sgd": level(100.0), "ngd": rising(20)},
        norm={"ngd": lambda since: 3.0 if since % 2 else 1.0},
        loss={"ngd": lambda since: 1 - 0.05 * since},
        lr={"ngd": 0.2},
    )
    found = BranchResults.of(table)
    assert found.by_seed("m", "ngd", "llc_slope")[0] == pytest.approx(2.0)
    assert found.by_seed("m", "ngd", "llc_raw_slope")[0] == pytest.approx(3.0)
    assert found.by_seed("m", "ngd", "llc_raw_split")[0] == pytest.approx(80.0)
    # Relative to the mean over seeds at the split, 100, 100.1, 100.2: one seed's own may be near 0.
    assert found.by_seed("m", "ngd", "llc_change").tolist() == pytest.approx([20 / 100.1] * 3)
    assert found.by_seed("m", "ngd", "llc_growth")[0] == pytest.approx(2.0)
    assert found.by_seed("m", "ngd", "llc_end")[0] == pytest.approx(116.0)  # mean of epochs 6 to 10: 112 to 120
    assert found.by_seed("m", "ngd", "update_norm_ratio")[0] == pytest.approx(2.0)
    assert found.by_seed("m", "ngd", "step_norm_ratio")[0] == pytest.approx(4.0)
    # Nine changes of alternating sign, five down: mean -ln(3)/9.
    changes = np.array([-1, 1] * 4 + [-1]) * np.log(3)
    assert found.by_seed("m", "ngd", "fluctuation")[0] == pytest.approx(changes.std(ddof=1))
    assert found.by_seed("m", "ngd", "train_loss_ratio")[0] == pytest.approx(0.5)
    assert found.by_seed("m", "sgd", "llc_change")[0] == pytest.approx(0.0, abs=1e-12)
    row = found.summary.set_index("branch").loc["ngd"]
    assert row.llc_split == pytest.approx(100.1)
    assert row.llc_split_low < 100.1 < row.llc_split_high


def test_estimates_that_are_not_valid_do_not_count() -> None:
    table = made_up({"sgd": level(100.0), "ngd": rising(20)})
    after = (table.branch == "ngd") & (table.epoch > 15)
    table.loc[after, ["llc", "valid"]] = [-500.0, False]
    found = BranchResults.of(table)
    assert found.by_seed("m", "ngd", "llc_slope")[0] == pytest.approx(2.0)
    assert found.by_seed("m", "ngd", "llc_end").empty
    at_split = (table.branch == BEFORE) & (table.epoch == SPLIT)
    table.loc[at_split, "valid"] = False
    assert BranchResults.of(table).by_seed("m", "ngd", "llc_slope").empty  # epochs 11 to 15 of 20 are left
    table = made_up({"sgd": level(100.0), "ngd": rising(20)})
    table.loc[at_split, "valid"] = False
    without_split = BranchResults.of(table)
    assert without_split.by_seed("m", "ngd", "llc_split").empty
    assert without_split.by_seed("m", "ngd", "llc_slope")[0] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("sgd", "ngd", "expected"),
    [
        (0, 20, ["reproduced", "reproduced"]),
        (30, 20, ["reproduced", "not reproduced"]),
        (-30, -20, ["not reproduced", "reproduced"]),
        (0, -20, ["not reproduced", "not reproduced"]),
    ],
)
def test_fig4_verdicts_on_the_llc(judge: Judge, sgd: float, ngd: float, expected: list[str]) -> None:
    results = verdicts(judge("ngd/fig4", made_up({"sgd": rising(sgd), "ngd": rising(ngd)}), "ngd"))
    assert [results["llc-rises"], results["llc-rises-faster"]] == expected


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (lambda since: 1.0 + 0.1 * (since % 2), ["reproduced", "reproduced"]),
        (lambda since: 1.7 + 0.1 * (since % 2), ["direction only", "reproduced"]),
        (level(5.0), ["not reproduced", "not reproduced"]),
        (level(0.1), ["not reproduced", "not reproduced"]),
    ],
)
def test_fig4_verdicts_on_the_update_norm(judge: Judge, norm: Curve, expected: list[str]) -> None:
    llc = dict.fromkeys(("sgd", "ngd", "ngd-unrescaled"), level(100.0))
    norms = {"sgd": lambda since: 1.0 + 0.01 * (since % 2), "ngd": norm, "ngd-unrescaled": norm}
    found = judge("ngd/fig4", made_up(llc, norm=norms), "ngd")
    assert found[0].claim.statement.endswith("(m, ngd-unrescaled).")  # rescaling keeps the length by itself
    results = verdicts(found)
    assert [results["update-norm-steady"], results["update-norm-fluctuates"]] == expected


def test_fig4_without_valid_estimates_is_out_of_reach(judge: Judge) -> None:
    table = made_up(dict.fromkeys(("sgd", "ngd", "ngd-unrescaled"), level(100.0))).assign(
        valid=False, problem="the chains have not mixed"
    )
    results = {result.claim.id: result for result in judge("ngd/fig4", table, "ngd")}
    for name in ("llc-rises-m", "llc-rises-faster-m"):
        assert results[name].verdict == "out of reach"
        assert "the chains have not mixed" in results[name].explanation
    assert results["update-norm-steady-m"].verdict == "reproduced"  # needs no LLC


RATES = ["ngd-low", "ngd-middle", "ngd-high"]


@pytest.mark.parametrize(
    ("ends", "sgd", "expected"),
    [
        ((5, 10, 20), 0, ["reproduced", "reproduced", "reproduced"]),
        ((5, 20, 10), 0, ["not reproduced", "not reproduced", "reproduced"]),
        ((20, 10, 5), 30, ["not reproduced", "not reproduced", "not reproduced"]),
        ((5, 10, 20), -30, ["reproduced", "reproduced", "not reproduced"]),
    ],
)
def test_fig5_verdicts(judge: Judge, ends: tuple[float, ...], sgd: float, expected: list[str]) -> None:
    llc = {"sgd": rising(sgd)} | {name: rising(by) for name, by in zip(RATES, ends, strict=True)}
    results = judge("ngd/fig5", made_up(llc), *RATES)
    assert [result.verdict for result in results] == expected


def test_fig5_faster_is_not_higher(judge: Judge) -> None:
    # The larger rate rises at once, then falls back below the smaller one.
    llc = {"sgd": level(100.0), "low": rising(20), "high": lambda since: 130.0 if since <= 5 else 104.0}
    results = verdicts(judge("ngd/fig5", made_up(llc), "low", "high"))
    assert results["llc-rises-faster"] == "reproduced"
    assert results["llc-plateaus-higher"] == "not reproduced"


def test_fig5_names_the_reason_without_an_llc(judge: Judge) -> None:
    table = made_up(dict.fromkeys(["sgd", *RATES], level(100.0)))
    table.loc[table.branch == "ngd-high", "valid"] = False
    table.loc[~table.valid, "problem"] = "a chain diverged"
    results = judge("ngd/fig5", table, *RATES)
    assert [result.verdict for result in results] == ["out of reach", "out of reach", "reproduced"]
    assert "30 of 120 estimates are not valid" in results[0].explanation
    assert "a chain diverged" in results[0].explanation


def fig6_table(*, llc: float, norm: Curve, loss: float, lr: float = 10.0) -> pd.DataFrame:
    return made_up(
        {"sgd": level(100.0), "sgd-raised": rising(llc)},
        norm={"sgd-raised": norm},
        loss={"sgd-raised": lambda since: 1 - (1 - loss) * since / (LAST - SPLIT)},
        lr={"sgd-raised": lr},
    )


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (
            fig6_table(llc=0, norm=lambda since: 3 / since**0.5, loss=0.2),
            ["reproduced", "reproduced", "reproduced", "reproduced", "reproduced"],
        ),
        (
            fig6_table(llc=30, norm=lambda since: 1 + since, loss=0.8),
            ["reproduced", "not reproduced", "not reproduced", "direction only", "direction only"],
        ),
        (
            fig6_table(llc=-30, norm=level(0.7), loss=1.5, lr=0.2),
            ["direction only", "reproduced", "reproduced", "not reproduced", "not reproduced"],
        ),
    ],
)
def test_fig6_verdicts(judge: Judge, table: pd.DataFrame, expected: list[str]) -> None:
    results = judge("ngd/fig6", table, "sgd-raised")
    assert [result.verdict for result in results] == expected


@pytest.mark.parametrize("key", ["ngd/fig4", "ngd/fig5", "ngd/fig6"])
def test_the_plot_needs_no_valid_estimate(key: str, computed_of: Callable[..., Computed]) -> None:
    table = made_up({"sgd": level(100.0)}).assign(valid=False, llc=np.nan, wbic=1.0)
    figures = all_targets()[key].load("draw")(computed_of({"table": table}))
    assert len(figures["figure.png"].axes) == 6
