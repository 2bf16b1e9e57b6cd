"""Runs of an optimizer: what is recorded, how steps are counted, and where the lemmas' rules are trapped."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.testing import assert_allclose

from curvlab.lab import plots
from curvlab.optim import FisherNewton, UniformDirection, steps_bound
from experiments.rank1.descent import descend, steps_panel
from experiments.rank1.objectives import convex_parabola, cosines, quadratic, trapping_curve


def test_the_lemmas_method_is_trapped() -> None:
    objective = trapping_curve(3.1)
    optimizer = UniformDirection(
        objective.parameters,
        objective.hessian,
        sigma=0.0,
        hessian_lipschitz=objective.hessian_lipschitz,
        safeguard=False,
    )
    trace = descend(objective, optimizer, num_steps=200)
    assert [abs(x) for x in trace.points[-4:]] == pytest.approx([3.0] * 4, abs=1e-6)
    assert trace.gradient_norms[-1] == pytest.approx(2.0)
    first = trace.gradient_norms[0]
    bound = steps_bound(1.5, gap=trace.values[0], gradient_norm=first, hessian_lipschitz=1.0)
    assert bound < 200
    assert min(trace.gradient_norms) > 1.5


def test_the_printed_softmax_rule_is_trapped_on_a_convex_function() -> None:
    ends = {}
    for constant in (1.0, 20.0):  # L as printed, and L
        objective = convex_parabola(curvature=20.0, start=0.06)
        optimizer = FisherNewton(
            objective.parameters,
            objective.fisher,
            smoothness=constant,
            hessian_lipschitz=objective.hessian_lipschitz,
        )
        trace = descend(objective, optimizer, num_steps=45)
        ends[constant] = trace.gradient_norms[-1]
        assert trace.values[0] == pytest.approx(math.log(1 + math.exp(20 * 0.06**2 / 2)))
    assert ends[1.0] > 0.4
    assert ends[20.0] < 1e-8


def test_descent_records_every_step_and_notices_divergence() -> None:
    objective = cosines(3, 1.0)
    trace = descend(objective, UniformDirection(objective.parameters, objective.hessian, sigma=2.0), num_steps=5)
    assert len(trace.values) == len(trace.gradient_norms) == len(trace.num_products) == 6
    assert len(trace.directions) == 5
    assert not trace.diverged
    objective = quadratic("isotropic", 3, torch.Generator().manual_seed(0))
    trace = descend(objective, torch.optim.SGD(objective.parameters, lr=1e3), num_steps=200)
    assert trace.diverged
    assert trace.gradient_norms[-1] != trace.gradient_norms[-1]  # nan


def test_steps_are_counted_as_the_lemmas_count() -> None:
    objective = quadratic("isotropic", 3, torch.Generator().manual_seed(0))
    trace = descend(objective, torch.optim.SGD(objective.parameters, lr=0.5), num_steps=12)  # halves the gradient
    assert trace.steps_to(0.3) == 2
    assert trace.steps_to(2.0) == 1  # the start does not count
    assert trace.steps_to(1e-9) is None
    assert trace.logarithmic_steps(4) == [0, 1, 2, 5, 12]
    assert trace.shares(1.0) == {
        "share_rising": 0.0,
        "share_uphill": None,
        "share_indefinite": None,
        "share_singular": None,
    }


def test_the_panel_has_bound_and_steps_over_one_by_epsilon() -> None:
    ax = plots.figure()[1][0, 0]
    table = {"seed": [0, 0, 1], "relative_epsilon": [0.1, 0.5, 0.1], "steps": [20.0, 3.0, np.nan]}
    steps_panel(ax, pd.DataFrame(table | {"bound": [70, 8, 90], "steps_taken": [25, 25, 25]}))
    assert_allclose(ax.lines[0].get_xydata(), [[2, 8], [10, 70]])
    assert_allclose(ax.collections[0].get_offsets()[:2], [[10, 20], [2, 3]])
    assert_allclose(ax.lines[1].get_ydata(), 25)
    assert ax.get_xlabel().endswith("1 of 3 not reached")
