"""bench-llc: from devinterp's defaults to ours; what its batches do, against dense algebra and a simulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from curvlab.lab import ClaimResult, all_targets
from curvlab.lab.reporting.claim_sheet import load_claim_sheet
from experiments.benchmarks.llc.default_sampler import COLUMNS, judge, steps, summary, told_excess
from experiments.benchmarks.llc.devinterp_chains import DivergedError, available, devinterp_chains

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


@pytest.fixture
def verdicts() -> Callable[[dict[str, object]], dict[str, str]]:
    """Return a function from a row to the verdicts on it."""
    claims_file = all_targets()["benchmarks/llc"].claims_file
    assert claims_file is not None

    def of_row(row: dict[str, object]) -> dict[str, str]:
        table = pd.DataFrame([row], columns=list(COLUMNS))
        results: list[ClaimResult] = judge(table, load_claim_sheet(claims_file))
        return {result.claim.id: result.verdict for result in results}

    return of_row


def test_verdicts_of_a_step(verdicts: Callable[[dict[str, object]], dict[str, str]]) -> None:
    row = {"step": "initial loss", "replacement": False, "curvlab": 5.0, "chains": 9}
    assert set(verdicts(row).values()) == {"out of reach"}
    numbers = {f"{name}{end}": value for name in ("estimate", "ratio", "sampler_ratio")
               for end, value in (("", 1.0), ("_low", 0.95), ("_high", 1.05))}  # fmt: skip
    parts = dict.fromkeys(
        ("initial_loss_part", "initial_loss_sd", "sampler", "sampler_told", "sampler_first_order"), 0.1
    )
    assert verdicts(row | numbers | parts) == {
        "default-settings-initial-loss": "reproduced",
        "default-sampler-initial-loss": "reproduced",
    }
    control = (
        row
        | numbers
        | parts
        | {"step": "replacement", "replacement": True, "sampler_low": 0.05, "sampler_high": 0.15}
    )
    assert verdicts(control)["default-sampler-control-replacement"] == "not reproduced"


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
    with pytest.raises(DivergedError, match="NaN detected in loss"):
        devinterp_chains(model, data, setting, seed=0)
