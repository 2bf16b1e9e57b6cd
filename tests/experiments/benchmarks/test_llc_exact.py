"""bench-llc, exact values: the Gibbs sampler against closed forms and quadrature; coefficients; verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from analytic_models import aoyagi_watanabe

from curvlab.lab import ClaimResult, Computed
from curvlab.lab.reporting import load_claims
from experiments.benchmarks.llc.exact import AT_START, UNSTABLE, coefficient, gibbs_values, singular_network

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


@pytest.mark.parametrize("start", [(1.0, 1.0), (0.0, 0.0), (0.5, 2.0), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)], ids=str)
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
    found = mean_value(layers, moments, 8000, nbeta=nbeta, localization=localization)
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
    with pytest.raises(ValueError, match="a map of rank 4 needs two sizes or more, none below the rank"):
        coefficient([5, 3], 4)


def test_the_network_has_its_rank() -> None:
    images = singular_network(3, 5, 2)(torch.eye(5))
    assert torch.equal(images, torch.diag(torch.tensor([1.0, 1, 0, 0, 0])))


def test_from_the_networks_to_the_verdicts(run_smoke: Callable[..., Path]) -> None:
    folder = run_smoke("benchmarks/llc", "parts=[exact]")
    table, noises = (pd.read_csv(folder / f"{name}.csv") for name in ("exact", "exact_noises"))
    assert table.sampler.tolist() == ["averaged noises", "underdamped", AT_START]
    assert table.ratio.tolist() == pytest.approx((table.estimate / table.exact).tolist(), rel=1e-4)
    assert noises.groupby("sampler").size().to_dict() == {"SGLD": 2, "averaged noises": 2}
    ids = {result.claim.id.removesuffix("-2-layers-6-rank-3") for result in load_claims(folder)}
    assert {"unstable-step-refused", "asymptote", "averaged-noises"} < ids
    assert (folder / "figure_exact.png").is_file()


@pytest.mark.parametrize(
    ("ratio", "problem", "right", "refused"),
    [
        (1.01, "", "reproduced", "refuted"),
        (1.34, "", "not reproduced", "refuted"),
        (1.34, UNSTABLE, "out of reach", "reproduced"),
        (1.01, "the chains have not mixed", "out of reach", "refuted"),
    ],
)
def test_verdicts(
    computed_of: Callable[..., Computed],
    judged: Callable[[str, Computed], list[ClaimResult]],
    ratio: float,
    problem: str,
    right: str,
    refused: str,
) -> None:
    row = {"network": "n", "nbeta": 9.0, "step_size": 1.0, "localization": 10.0, "stability": 0.3, "exact": 100.0}
    row |= {
        "exact_stderr": 0.1,
        "asymptote": 104.0,
        "exact_to_asymptote": 0.96,
        "ratio": ratio,
        "problem": problem,
    }
    row |= {"estimate": 100 * ratio, "low": 100 * ratio - 1, "high": 100 * ratio + 1}
    noises = [
        {"network": "n", "stability_at_start": step, "sampler": name, "ratio": 1 + error + step / 100}
        for step in (0.1, 0.2, 0.3)
        for name, error in (("SGLD", 1.0), ("averaged noises", 0.1))
    ]
    tables = {"exact": pd.DataFrame([row | {"sampler": name} for name in ("underdamped", AT_START)])}
    tables["exact_noises"] = pd.DataFrame(noises)
    results = judged(
        "benchmarks/llc", computed_of(tables, {"parts": ["exact"], "exact": {"gibbs": {"num_chains": 4}}})
    )
    verdicts = {result.claim.id: result.verdict for result in results}
    assert verdicts["exact-value-n-underdamped"] == right
    assert verdicts["unstable-step-refused-n"].replace("not reproduced", "refuted") == refused
    assert verdicts["asymptote-n"] == "reproduced"
    assert verdicts["averaged-noises"] == "reproduced"
