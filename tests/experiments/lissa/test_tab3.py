"""lissa-tab3 end to end at smoke scale, and the variances that it states."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch

from curvlab.reporting import load_claims
from experiments.lissa.tab3 import TARGET
from experiments.lissa.tab3.compute import paper_table
from experiments.lissa.tab3.gradients import _exact, _sketched_products
from experiments.target.execution import draw_target


def test_results_are_complete_and_every_row_is_checked(run_smoke) -> None:
    folder: Path = run_smoke("lissa/tab3")
    table, sketches, gradients = (
        pd.read_csv(folder / f"{name}.csv") for name in ("table", "sketches", "gradients")
    )
    assert table.task.tolist() == ["mlp-8-digits-200", "opt-1-16-documentation-120"]
    assert (table.norm_over_trace <= 1).all()  # of any positive semi-definite matrix, up to the estimates' errors
    assert (table.square_over_product <= 1.2).all()
    off = (table.frobenius - table.frobenius_full).abs()
    assert (off < 5 * (table.frobenius_stderr**2 + table.frobenius_full_stderr**2) ** 0.5).all()
    assert (table.per_tensor_rows % table.tensors == 0).all()
    assert sketches.groupby("form").size().to_dict() == {"dense": 3, "per tensor": 3}
    assert len(gradients) == 4 + 3  # pairs; the language model has only six sequences
    claims = {result.claim.id: result for result in load_claims(folder)}
    assert "ResNet-18, ResNet-50" in claims["printed-norm-below-trace"].explanation
    assert claims["variance-mlp-8-digits-200"].claim.paper_value == "up to 1/L; here L = 4"
    before = (folder / "figure.png").read_bytes()
    draw_target(TARGET, folder)
    assert (folder / "figure.png").read_bytes() == before


def test_printed_rows_that_no_matrix_has() -> None:
    paper = paper_table().set_index("row")
    impossible = (paper.norm_over_trace > 1) | (paper.square_over_product > 1)
    assert impossible.to_dict() == {
        "ResNet-18": True,
        "ResNet-50": True,
        "OPT": False,
        "Llama-1": False,
        "Mistral": False,
    }
    assert paper.trace["ResNet-18"] == pytest.approx(1.45e4, rel=2e-3)
    assert ((paper.frobenius / paper.lambda_max) ** 2 / paper.squared_ratio - 1).abs().max() < 5e-3


def test_measured_variances_are_the_exact_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 3, 30, generator=generator)
    left, right = (side / side.norm(dim=1, keepdim=True) for side in (left, right))

    class Settings:
        class gradients:
            sketch_size, num_sketches = 5, 3000

    sizes = [4, 20, 6]
    measured = _sketched_products(left, right, sizes, Settings, generator)
    stated = _exact(left, right, sizes)
    for form in ("dense", "per_tensor"):
        torch.testing.assert_close(measured[form], stated[f"{form}_exact"].double(), rtol=0.15, atol=0)
    assert bool((stated["per_tensor_exact"] < stated["dense_exact"]).all())
