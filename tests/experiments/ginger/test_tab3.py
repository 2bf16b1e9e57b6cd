"""ginger-tab3 and ginger-tab4 at smoke scale, which share their trainings, and their claims on made-up tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from curvlab.lab import ClaimResult, Computed
from curvlab.lab.reporting import load_claims
from experiments.ginger.race.sensitivity import CELL, without_diverged
from experiments.ginger.race.variation import between_cells

Judge = Callable[[str, pd.DataFrame], dict[str, ClaimResult]]


def test_tab3_and_tab4_end_to_end(run_smoke: Callable[..., Path]) -> None:
    folders = [run_smoke("ginger/tab3"), run_smoke("ginger/tab4")]
    tables = [pd.read_csv(folder / "table.csv") for folder in folders]
    pd.testing.assert_frame_equal(tables[0], tables[1])
    cells = tables[0].groupby(list(CELL), dropna=False).size()
    assert cells.groupby("sweep").size().to_dict() == {"grid": 4, "damping": 2, "damping, clipped": 2}
    assert (cells == 3).all()
    grid = tables[0][tables[0].sweep == "grid"]
    assert grid.damping.nunique() == grid.lr.nunique() == 1  # as tuned, for all
    assert len(load_claims(folders[0])) == 4
    assert len(load_claims(folders[1])) == 3
    assert all((folder / "figure.png").is_file() for folder in folders)


@pytest.fixture
def judge(computed_of: Callable[..., Computed], judged: Callable[[str, Computed], list[ClaimResult]]) -> Judge:
    """Return a function that judges one of the two targets on a made-up table."""

    def judge(key: str, table: pd.DataFrame) -> dict[str, ClaimResult]:
        computed = computed_of({"table": table}, {"tuned_rank": 4})
        return {result.claim.id.removesuffix("-m"): result for result in judged(key, computed)}

    return judge


def cells(grid: float = 0.004, damping: float = 0.03, *, unclipped: float = 0.1) -> pd.DataFrame:
    """Return accuracies around 0.9 and losses of their error, with these spreads over grid and damping."""
    places = [("grid", decay, rank, 0.1, 0.9) for decay in (0.9, 0.99, 0.999) for rank in (2, 4, 8)]
    places[0] = (*places[0][:4], 0.9 + grid)
    for sweep in ("damping", "damping, clipped"):
        places += [(sweep, 0.99, 4, 1e-5, unclipped if sweep == "damping" else 0.85)]
        places += [(sweep, 0.99, 4, 0.1, 0.9), (sweep, 0.99, 4, 1.0, 0.9 - damping)]
    names = ("sweep", "decay", "rank", "damping", "test_accuracy")
    rows = [
        {
            **dict(zip(names, place, strict=True)),
            "task": "m",
            "seed": seed,
            "clip": np.nan,
            "lr": 0.1,
            "at_edge": False,
        }
        | {"accuracy": place[-1], "min_train_loss": (1 - place[-1]) ** 3, "diverged": place[-1] < 0.2}
        for place in places
        for seed in range(3)
    ]
    return pd.DataFrame(rows)


def test_tables_as_printed_reproduce_the_claims(judge: Judge) -> None:
    assert {name: result.verdict for name, result in judge("ginger/tab3", cells()).items()} == {
        "insensitive": "reproduced",
        "tuned-above-default": "reproduced",
        "damping-decides": "reproduced",
        "small-damping-needs-clipping": "reproduced",
    }
    assert {name: result.verdict for name, result in judge("ginger/tab4", cells()).items()} == {
        "printed-insensitive": "not reproduced",
        "insensitive-loss": "reproduced",
        "damping-decides-loss": "reproduced",
    }


def test_each_claim_can_fail(judge: Judge) -> None:
    sensitive = judge("ginger/tab3", cells(grid=0.05, damping=0.01, unclipped=0.9))
    assert sensitive["insensitive"].verdict == "not reproduced"
    assert sensitive["damping-decides"].verdict == "not reproduced"
    assert "to 95.00 % (decay 0.9, rank 2)" in sensitive["insensitive"].explanation
    assert judge("ginger/tab3", cells(grid=0.015))["insensitive"].verdict == "direction only"
    assert judge("ginger/tab3", cells(unclipped=0.9))["small-damping-needs-clipping"].verdict == "not reproduced"
    worse = cells()
    preferred = (worse.decay == 0.9) & (worse["rank"] == 2)
    worse.loc[preferred, "test_accuracy"] = 0.89  # validation prefers what is worse on the test set
    assert judge("ginger/tab3", worse)["tuned-above-default"].verdict == "not reproduced"
    losses = judge("ginger/tab4", cells(grid=0.09, damping=0.01, unclipped=0.9))
    assert losses["insensitive-loss"].verdict == "not reproduced"
    assert losses["damping-decides-loss"].verdict == "not reproduced"


def test_grids_that_lack_a_cell_leave_claims_out_of_reach(judge: Judge) -> None:
    table = cells()
    table = table[(table["rank"] != 4) | (table.sweep != "grid")]
    table = table[(table.sweep == "grid") | ((table.sweep == "damping") & (table.damping == 1e-5))]
    results = judge("ginger/tab3", table)
    names = ("tuned-above-default", "damping-decides", "small-damping-needs-clipping")
    assert [results[name].verdict for name in names] == ["out of reach"] * 3
    assert judge("ginger/tab4", table)["damping-decides-loss"].verdict == "out of reach"


def test_a_damping_is_drawn_where_no_seed_diverged() -> None:
    swept = cells()[lambda table: table.sweep == "damping"]
    swept.loc[(swept.damping == 1e-5) & (swept.seed > 0), "diverged"] = False  # one seed is enough
    assert sorted(without_diverged(swept).damping.unique()) == [0.1, 1.0]


def noisy(effects: np.ndarray, seeds: int, noise: float, generator: np.random.Generator) -> pd.DataFrame:
    """Return runs of cells with these effects, and one more effect for each seed."""
    values = effects[:, None] + generator.normal(size=seeds) + noise * generator.normal(size=(len(effects), seeds))
    cell, seed = np.indices(values.shape)
    return pd.DataFrame({"cell": cell.ravel(), "seed": seed.ravel(), "quantity": values.ravel()})


def test_what_seeds_change_is_no_difference_between_settings() -> None:
    generator = np.random.default_rng(0)
    found = [between_cells(noisy(np.zeros(9), 4, 1.0, generator), "quantity", ["cell"]) for _ in range(200)]
    assert np.median([value for value, _ in found]) < 0.3  # the range of single runs is 3
    assert np.mean([interval.low == 0 for _, interval in found]) > 0.93


def test_intervals_between_settings_cover() -> None:
    generator, effects = np.random.default_rng(1), np.linspace(-1, 1, 6)
    spread = effects.std(ddof=1)
    found = [between_cells(noisy(effects, 3, 0.5, generator), "quantity", ["cell"])[1] for _ in range(200)]
    assert 0.9 < np.mean([interval.low <= spread <= interval.high for interval in found]) <= 1.0
    exact_value, exact_interval = between_cells(noisy(effects, 3, 0.0, generator), "quantity", ["cell"])
    assert exact_value == pytest.approx(spread) == exact_interval.low == exact_interval.high
