"""bench-llc end to end at smoke scale; its floor and known values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from curvlab.lab import start
from curvlab.lab.claims import load_claims
from curvlab.lab.tables import read_table
from experiments.benchmarks.llc.devinterp_chains import available
from experiments.benchmarks.llc.peers import autoregressive, floor_seconds, power_table
from experiments.benchmarks.llc.polynomials import finite_value


@pytest.mark.parametrize(("version", "usable"), [("1.3.2", True), ("2.0.1", False), (None, False)])
def test_devinterp_is_a_peer_up_to_its_first_major_version(
    monkeypatch: pytest.MonkeyPatch, version: str | None, usable: bool
) -> None:
    # From 2.0 on it samples language models alone: its loss is a function of the model and token ids.
    def find(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", find)
    assert available("devinterp, with replacement") == usable
    assert available("curvlab")


def test_every_method_is_estimated_and_timed(run_smoke: Callable[..., Path]) -> None:
    folder = run_smoke("benchmarks/llc", "parts=[peers]")
    assert (folder / "figure.png").is_file()
    table, summary, timings, _ = (read_table(folder, name) for name in ("table", "summary", "timings", "power"))
    record = json.loads((folder / "run.json").read_text())
    expected = {"curvlab", "curvlab, one vmap", "devinterp", "devinterp, with replacement"}
    missing = {entry.split(" is not")[0] for entry in record["reduced"]}
    assert set(table.method) == expected - missing
    assert (table.groupby("method").size() == 2 * 3).all()
    assert set(timings.method) == (expected - missing) | {"matrix products alone", "normals alone"}
    assert (timings.seconds > 0).all()
    out_of_reach = {"exact", "unstable", "asymptote", "averaged"}
    claims = {result.claim.id.split("-")[0] for result in load_claims(folder)}
    assert claims == {"polynomial", "unbiased", "agrees", "default", "valid"} | out_of_reach
    own = table[table.method == "curvlab"].llc
    row = summary[summary.method == "curvlab"].iloc[0]
    assert row.llc == pytest.approx(own.mean(), rel=1e-4)
    assert row.high - row.low == pytest.approx(2 * 2.570582 * own.std() / math.sqrt(6), rel=1e-3)


@pytest.fixture
def powers(config_of) -> Callable[..., pd.DataFrame]:
    """Return the diagnostics' table of 40 repeats, four chains."""
    cfg = config_of("benchmarks/llc")

    def table(num_draws: int, correlation: float, drifts: list[float]) -> pd.DataFrame:
        sizes = {"num_repeats": 40, "num_draws": [num_draws], "correlations": [correlation], "drifts": drifts}
        with start(cfg, key="benchmarks/llc", title="test") as run:
            return power_table(run, OmegaConf.merge(cfg.power, sizes))

    return table


def test_a_drift_is_flagged_and_none_is_rarely(powers: Callable[..., pd.DataFrame]) -> None:
    """Worth 431 draws of standard deviation 0.3: a drift's standard error is sqrt(12/431) 0.3 = 0.05."""
    none, small, large = powers(200, 0.3, [0.0, 0.1, 0.3]).itertuples()
    assert none.worth == pytest.approx(4 * 200 * 0.7 / 1.3)
    assert none.drift_flagged <= 0.1
    assert none.usable >= 0.85
    assert none.drift_flagged < small.drift_flagged < large.drift_flagged
    assert large.drift_flagged >= 0.9


def test_chains_worth_too_little_are_not_usable(powers: Callable[..., pd.DataFrame]) -> None:
    assert powers(110, 0.95, [0.0]).usable.item() <= 0.1  # worth 11 draws in all


def test_made_up_chains_are_stationary() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = autoregressive(500, num_chains=4, num_draws=30, correlation=0.8, generator=generator)
    assert draws.var(dim=(0, 1)).numpy() == pytest.approx(1.0, abs=0.12)
    assert float((draws[..., 1:] * draws[..., :-1]).mean()) == pytest.approx(0.8, abs=0.03)


def test_floor_counts_all_steps() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    setting = {"num_chains": 2, "num_draws": 10, "num_burnin_steps": 0, "batch_size": 5}
    found = floor_seconds(model, setting, num_steps=2)
    assert found["products"] > 0
    assert found["normals"] > 0


def test_values_at_finite_n() -> None:
    # a flat prior makes every term of a sum exact; a product with one weak factor integrates in closed form
    assert finite_value([2, 4], product=False, nbeta=1000.0, localization=1e-9) == pytest.approx(0.75, rel=1e-3)
    nbeta, localization = 100.0, 10.0
    x = torch.linspace(0, 4, 400_001, dtype=torch.float64)
    weight = torch.exp(-localization / 2 * x**2) / (2 * nbeta * x**2 + localization).sqrt()
    exact = float((weight * nbeta * x**2 / (2 * nbeta * x**2 + localization)).sum() / weight.sum())
    found = finite_value([2, 2], product=True, nbeta=nbeta, localization=localization)
    assert found == pytest.approx(exact, rel=1e-3)
