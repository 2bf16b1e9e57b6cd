"""bench-llc: exact values, the default sampler; end to end at smoke scale, its floor and known values."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from importlib import metadata
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from curvlab.lab import start
from curvlab.lab.claims import load_claims
from curvlab.lab.tables import read_table
from curvlab.sampling import choose_sgld_settings, estimate_llc
from experiments.benchmarks.llc.default_sampler import steps, summary, told_excess
from experiments.benchmarks.llc.devinterp_chains import DivergedError, available, devinterp_chains
from experiments.benchmarks.llc.exact import (
    AT_START,
    coefficient,
    gibbs_values,
    half_square,
    singular_network,
)
from experiments.benchmarks.llc.peers import autoregressive, floor_seconds, power_table
from experiments.benchmarks.llc.polynomials import finite_value
from tests.refusals import refuses
from tests.sampling.analytic_models import aoyagi_watanabe

ROOT = Path(__file__).parents[3]

FP64 = torch.float64


def mean_value(layers: list[torch.Tensor], moments: torch.Tensor, num_sweeps: int, **settings: float) -> float:
    generator = torch.Generator().manual_seed(0)
    values = gibbs_values(layers, moments, **settings, num_sweeps=num_sweeps, generator=generator)
    return float(values[num_sweeps // 10 :].mean())


def test_one_layer_is_a_gaussian() -> None:
    """E nβ L = 1/2 d Σ_j nβ s_j / (nβ s_j + γ), s_j the eigenvalues of the inputs' second moments."""
    root = torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=FP64)
    moments = root @ root.T + 0.1 * torch.eye(4, dtype=FP64)
    spectrum = 20.0 * torch.linalg.eigvalsh(moments)
    expected = 0.5 * 4 * float((spectrum / (spectrum + 30.0)).sum())
    found = mean_value([torch.eye(4, dtype=FP64)], moments, 4000, nbeta=20.0, localization=30.0)
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("start", [(0.0, 0.0), (0.5, 2.0), (1.0, 1.0, 1.0)], ids=str)
def test_numbers_for_layers_are_those_of_quadrature(start: tuple[float, ...]) -> None:
    nbeta, localization, moment = 50.0, 4.0, 1.5
    points = {2: 1500, 3: 220}[len(start)]
    axes = [place + np.linspace(-4.5, 4.5, points) for place in start]
    grids = np.meshgrid(*axes, indexing="ij", sparse=True)
    energy = nbeta / 2 * moment * (math.prod(grids) - math.prod(start)) ** 2
    pull = sum((grid - place) ** 2 for grid, place in zip(grids, start, strict=True))
    weight = np.exp(-energy - localization / 2 * pull)
    expected = float((energy * weight).sum() / weight.sum())
    layers = [torch.full((1, 1), place, dtype=FP64) for place in start]
    moments = torch.full((1, 1), moment, dtype=FP64)
    found = mean_value(layers, moments, 4000, nbeta=nbeta, localization=localization)
    assert found == pytest.approx(expected, rel=0.05)


def test_coefficients_of_three_sizes() -> None:
    """They are the cases of Aoyagi & Watanabe (2005), Theorem 1."""
    for m, n, h in product(range(1, 6), repeat=3):
        for r in range(min(m, n, h) + 1):
            assert coefficient([m, h, n], r) == pytest.approx(aoyagi_watanabe(m, n, h, r)), (m, h, n, r)


def test_coefficients_of_one_layer_and_of_one_number_each() -> None:
    assert coefficient([5, 3], 2) == 7.5  # regular: half the parameters
    for num_layers in (1, 2, 3, 5):
        assert coefficient([1] * (num_layers + 1), 0) == pytest.approx(0.5)  # of w_1² ... w_L²
    assert coefficient([4] * 6, 4) == 8.0  # full rank: the smooth manifold of one product
    refuses("a map of rank 4 needs two sizes or more, none below the rank", coefficient, [5, 3], 4)


def test_the_network_has_its_rank() -> None:
    images = singular_network(3, 5, 2)(torch.eye(5))
    assert torch.equal(images, torch.diag(torch.tensor([1.0, 1, 0, 0, 0])))


def test_from_the_networks_to_the_verdicts(run_smoke) -> None:
    folder = run_smoke("benchmarks/llc")
    table, noises = (read_table(folder, name) for name in ("exact", "exact_noises"))
    assert table.sampler.tolist() == ["averaged noises", "underdamped", AT_START]
    assert table.ratio.tolist() == pytest.approx((table.estimate / table.exact).tolist(), rel=1e-4)
    assert noises.groupby("sampler").size().to_dict() == {"SGLD": 2, "averaged noises": 2}
    ids = {result.claim.id.removesuffix("-2-layers-6-rank-3") for result in load_claims(folder)}
    assert {"unstable-step-refused", "asymptote", "averaged-noises"} < ids


def test_what_the_library_chooses_is_the_exact_value() -> None:
    """Chains at a step that is set at the start, where λmax is 3, read 1.3 times as much and more (bench-llc)."""
    model = singular_network(3, 12, 4).eval()
    inputs = torch.randn(3000, 12, generator=torch.Generator().manual_seed(0))
    data, batches = (inputs, model(inputs).detach()), {"batch_size": 256, "num_burnin_steps": 600}
    chosen = choose_sgld_settings(model, half_square, data, **batches, generator=0)
    batches |= {"num_chains": 4, "num_draws": 600}
    found = estimate_llc(model, half_square, data, **batches, settings=chosen, generator=1)
    layers, moments = [p.detach().double() for p in model.parameters()], (inputs.T @ inputs).double() / 3000
    exact = mean_value(layers, moments, 400, nbeta=chosen.nbeta, localization=chosen.localization)
    assert chosen.converged
    assert not found.problems
    assert found.value == pytest.approx(exact, rel=0.05)


def test_the_default_sampler_is_the_one_that_was_measured_to_be_nearer() -> None:
    told = inspect.getdoc(choose_sgld_settings) or ""
    table = read_table(ROOT / "results" / "benchmarks" / "llc" / "embedded", "exact_noises")
    assert '"averaged" is nearer to the exact value beyond the smallest' in " ".join(told.split())
    errors = table.assign(error=(table.ratio - 1).abs())
    by_step = errors.pivot(index="stability_at_start", columns="sampler", values="error").sort_index()
    assert (by_step["averaged noises"] < by_step["SGLD"]).tolist()[1:] == [True, True]
    nearest = errors.groupby("sampler").error.mean().idxmin()
    default = inspect.signature(choose_sgld_settings).parameters["sampler"].default
    assert default == {"averaged noises": "averaged", "SGLD": "sgld"}[nearest]


# --- bench-llc: from devinterp's defaults to ours; what its batches do, against dense algebra and a simulation
OURS = {"step_size": 1e-4, "localization": 100.0, "num_draws": 40, "num_burnin_steps": 30, "nbeta": 170.0}
OURS |= {"initial_loss": 0.02, "replacement": True, "batch_size": 128, "num_chains": 2}


def test_each_step_has_the_changes_it_names_and_the_last_are_ours() -> None:
    *found, small = steps(OURS, 16)
    names = [step.name for step in found]
    assert names == ["defaults", "step size", "localization", "length", "nbeta", "initial loss", "replacement"]
    assert found[-1].setting == OURS
    changed = [
        {key for key in OURS if before.setting[key] != after.setting[key]} for before, after in pairwise(found)
    ]
    length = {"num_draws", "num_burnin_steps"}
    one = [{"step_size"}, {"localization"}, length, {"nbeta"}, {"initial_loss"}, {"replacement"}]
    assert changed == one
    assert small.setting == found[-2].setting | {"batch_size": 16}


def test_what_is_told_is_that_of_dense_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    targets = torch.randint(3, (12,), generator=generator)
    model = nn.Linear(3, 3, bias=False).double()
    weight = model.weight.detach().clone()

    def loss(flat: torch.Tensor, chosen: slice) -> torch.Tensor:
        return nn.functional.cross_entropy(inputs[chosen] @ flat.view(3, 3).T, targets[chosen])

    flat = weight.flatten()
    rows = [torch.autograd.functional.jacobian(lambda w, i=i: loss(w, slice(i, i + 1)), flat) for i in range(12)]
    covariance = torch.cov(torch.stack(rows).T, correction=0)
    hessian = torch.autograd.functional.hessian(lambda w: loss(w, slice(None)), flat)
    decay = torch.eye(9, dtype=torch.float64) * (1 - 0.3 * 0.2) - 0.3 * hessian
    positions = [0, 1, 2, 3, 0, 1]
    traces = [torch.trace(covariance @ torch.linalg.matrix_power(decay, k)) for k in range(3)]
    expected = [0.3 / 11 * sum(float(trace) for trace in traces[:t]) for t in positions]
    told, first_order = told_excess(
        model, (inputs, targets), positions, lr=0.3, shrinkage=0.2, num_probes=3000, generator=generator
    )
    assert told == pytest.approx(np.mean(expected), rel=0.06)
    assert first_order == pytest.approx(0.3 / 11 * float(traces[0]) * np.mean(positions), rel=0.06)


def test_the_equation_is_that_of_epochs_without_replacement() -> None:
    """l_i = ½ h w² + b_i w with mean b of 0: a batch's loss less that of all is w times its mean b."""
    generator, h, lr, num_batches, size = np.random.default_rng(0), 2.0, 0.1, 6, 2
    b = generator.standard_normal(num_batches * size)
    b -= b.mean()
    excess, w = np.zeros(num_batches), np.zeros(4000)  # chains
    for _ in range(50):
        orders = generator.permuted(np.tile(b, (len(w), 1)), axis=1).reshape(len(w), num_batches, size).mean(2)
        for place, of_batch in enumerate(orders.T):
            excess[place] += (w * of_batch).mean() / 50
            w -= lr * (h * w + of_batch)
    expected = [lr / (len(b) - 1) * sum(b.var() * (1 - lr * h) ** k for k in range(t)) for t in range(num_batches)]
    assert excess == pytest.approx(expected, abs=0.05 * expected[-1])


def _found(theirs: list[float], part: float, told: float) -> dict[str, object]:
    parts = {"initial_loss_part": part, "initial_loss_sd": 0.1, "sampler_told": told, "sampler_first_order": told}
    return {"curvlab": [5.0, 5.2], "per_chain": theirs, "sampler": [told, 1.2 * told], **parts}


def test_a_row_is_over_what_is_told() -> None:
    row = summary([_found([5.6, 5.8], 0.3, 0.2), _found([5.1, 5.3], -0.2, 0.2)])
    assert row["estimate"] == pytest.approx(5.45)
    assert row["ratio"] == pytest.approx(5.45 / (5.1 + 0.05 + 0.2))
    assert row["ratio_high"] - row["ratio"] < 0.05  # a repeat's L(w0) is not what its chains scatter
    assert row["sampler_ratio"] == pytest.approx(1.1)
    assert "estimate" not in summary([{"curvlab": [5.0, 5.2]}])


def test_a_peer_that_diverges_has_no_estimate_and_a_problem() -> None:
    nan = float("nan")
    lost = _found([nan, nan], nan, nan) | {"sampler": [nan, nan], "problem": "devinterp diverges: NaN"}
    row = summary([_found([5.6, 5.8], 0.3, 0.2), lost])
    assert "estimate" not in row
    assert np.isnan(row["ratio"])
    assert row["problem"] == "devinterp diverges: NaN"
    assert row["curvlab"] == pytest.approx(5.1)


@pytest.mark.skipif(not available("devinterp"), reason="needs devinterp 1.3.2")
@pytest.mark.parametrize("replacement", [False, True])
def test_chains_that_do_not_move_have_no_excess(replacement: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(40, 3, generator=generator), torch.randint(2, (40,), generator=generator)
    setting = OURS | {"step_size": 1e-12, "batch_size": 10, "num_draws": 8, "num_burnin_steps": 4, "all_every": 1}
    model = nn.Linear(3, 2)
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(model(data[0]), data[1]))
    setting |= {"initial_loss": None, "nbeta": None, "replacement": replacement}
    found = devinterp_chains(model, data, setting, seed=0)
    assert found.own_minus_all.abs().max() < 1e-4
    assert found.positions == [1, 2, 3, 0, 1, 2, 3]
    assert len(found.last) == 2
    if not replacement:  # two whole epochs: all that is left is the L(w0) of its two first batches
        expected = 10 / math.log(10) * (loss - found.initial_loss)
        assert found.per_chain.tolist() == pytest.approx([expected] * 2, abs=1e-4)
        assert found.initial_loss != pytest.approx(loss, abs=1e-4)


@pytest.mark.skipif(not available("devinterp"), reason="needs devinterp 1.3.2")
def test_divergence_is_told_apart_from_other_errors() -> None:
    model, data = nn.Linear(3, 2), (100 * torch.randn(16, 3), torch.zeros(16, dtype=torch.long))
    setting = {"num_chains": 1, "num_draws": 50, "num_burnin_steps": 0, "batch_size": 8, "step_size": 1e30}
    setting |= {"localization": 1.0, "nbeta": 5.0, "initial_loss": 0.1, "replacement": False, "all_every": None}
    refuses("NaN detected in loss", devinterp_chains, model, data, setting, error=DivergedError, seed=0)


# -------------------------------------------------------------------------------------------------- at smoke scale
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
