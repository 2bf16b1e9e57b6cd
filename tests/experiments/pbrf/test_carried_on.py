"""The explaining responses of pbrf-tab6 and tab7, against closed forms of quadratics and against each other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from curvlab.influence.retraining import SharedBatches
from experiments.pbrf.carried_on import CHUNK, MAX_DISTANCE, Bounded, num_steps, over_all


class Quadratics:
    """½ uᵀ diag(curvature) u - uᵀ1 for each of K rows: curvatures (K, P), negative ones have no minimum."""

    def __init__(self, curvature: Tensor) -> None:
        self.curvature = curvature

    @property
    def depends_on(self) -> Mapping[str, Any]:
        return {}

    def __call__(self, displacement: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        weight = indices.double().mean() * 2 / 1199  # a mean over examples: 1 over all of 0 to 1199
        values = (0.5 * self.curvature * displacement.square() - displacement).sum(1)
        return weight * values, weight * (self.curvature * displacement - 1)


def test_a_point_that_leaves_stops_no_other() -> None:
    curvature = torch.tensor([[1.0, 2.0], [-1.0, 1.0]], dtype=torch.float64)
    bounded = Bounded(Quadratics(curvature), torch.tensor([10.0, 10.0]))
    minimizer = SharedBatches([torch.arange(1200)] * 200, lr=0.1, momentum=0.9)
    end = minimizer(bounded, torch.zeros(2, 2, dtype=torch.float64), 1200)
    assert_close(end[0], 1 / curvature[0], rtol=1e-3, atol=0)
    assert 10 < end[1].norm() < 100  # let go beyond the bound; momentum carries it a little further
    values, gradients = bounded(end, torch.arange(1200))
    assert values[1] == 0
    assert_close(gradients[1], torch.zeros(2, dtype=torch.float64))


def test_chunks_add_up_to_all_examples() -> None:
    objective, place = Quadratics(torch.ones(3, 4, dtype=torch.float64)), torch.randn(3, 4).double()
    everything = torch.arange(1200)
    assert len(everything) > 2 * CHUNK
    for found, expected in zip(over_all(objective, place, everything), objective(place, everything), strict=True):
        assert_close(found, expected)


def test_steps_give_the_horizon() -> None:
    steps = num_steps(0.1, 0.001, horizon=0.5, momentum=0.9)
    assert steps == 500
    # Along a direction without curvature but λ, descent with momentum has gone about 1 - exp(-horizon) of the way.
    damping = torch.tensor([[0.001]], dtype=torch.float64)
    descent = SharedBatches([torch.arange(1200)] * steps, lr=0.1, momentum=0.9)
    end = descent(Quadratics(damping), torch.zeros(1, 1, dtype=torch.float64), 1200)
    assert float(end) * 0.001 == pytest.approx(1 - np.exp(-0.5), rel=0.03)


def test_small_weights_agree_with_influence(run_smoke) -> None:
    """Of a network of tanh, at smoke scale: to first order (Eq. 46), with the Gauss-Newton matrix alone."""
    folder: Path = run_smoke("pbrf/tab6")
    found = pd.read_csv(folder / "correlations.csv")
    own = found[(found.way == "over_test") & (found.coefficient == "pearson")].groupby("response").value
    assert own.min().small_weight > 0.999
    points = pd.read_csv(folder / "points.csv")
    assert (points["small_weight gradient norm"] <= 0.05).all()
    assert (points["carried_on distance"] <= 2 * MAX_DISTANCE).all()
    assert (points["carried_on fall"] > 0).all()
    networks = pd.read_csv(folder / "networks.csv")
    assert (networks["gauss_newton residual"] < 1e-5).all()
