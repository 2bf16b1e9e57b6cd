"""rank1-fisher: its objectives' constants against automatic differentiation, and the target at smoke scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.autograd.functional import hessian
from torch.func import functional_call

from curvlab.optim import FisherNewton
from experiments.rank1.descent import descend
from experiments.rank1.fisher.compute import network_rows
from experiments.rank1.fisher.objectives import (
    ACTIVATIONS,
    PARABOLA_THIRD,
    convex_parabola,
    gap,
    parabola,
    perceptron,
)
from experiments.rank1.fisher.rates import rate_rows


@pytest.mark.parametrize("kind", ["least squares", "softmax"])
@pytest.mark.parametrize(
    ("scale", "activation"), [(1.0, "tanh"), (4.0, "tanh"), (1.0, "identity"), (3.0, "softplus")]
)
def test_perceptron_constants_and_gap(kind: str, scale: float, activation: str) -> None:
    generator = torch.Generator().manual_seed(1)
    objective = perceptron(kind, scale=scale, activation=activation, noise=0.3, generator=generator)
    weight = objective.model.layer.weight

    def value(flat: torch.Tensor) -> torch.Tensor:
        outputs = functional_call(objective.model, {"layer.weight": flat.view(weight.shape)}, (objective.data[0],))
        return objective.loss(outputs, objective.data[1])

    points, hessians = [], []
    for _ in range(6):
        weight.data.copy_(2 * torch.randn(weight.shape, dtype=torch.float64, generator=generator))
        points.append(weight.detach().reshape(-1).clone())
        hessians.append(hessian(value, points[-1]))
        found = gap(objective)
        expected = torch.linalg.matrix_norm(hessians[-1] - objective.fisher.to_dense(), 2)
        assert found["gap"] == pytest.approx(float(expected), rel=1e-8, abs=1e-12)
        assert found["loss"] == pytest.approx(float(value(points[-1])))
        assert found["smoothness"] <= objective.smoothness * (1 + 1e-10)
        if activation == "softplus":  # the convex ones
            assert float(torch.linalg.eigvalsh(hessians[-1])[0]) > -1e-12
    for i in range(6):
        for j in range(i):
            change = torch.linalg.matrix_norm(hessians[i] - hessians[j], 2)
            assert change <= objective.hessian_lipschitz * (points[i] - points[j]).norm() * (1 + 1e-9)


def test_parabolas_pay_the_smoothness_in_full() -> None:
    found = gap(parabola("softmax", curvature=8.0))
    assert found == pytest.approx(
        {"gap": 4.0, "loss": float(torch.tensor(2.0).log()), "smoothness": 8, "one_norm": 1}
    )
    found = gap(parabola("least squares", curvature=8.0))  # r²: twice the slides' ½ r²
    assert found == pytest.approx({"gap": 16.0, "loss": 1.0, "smoothness": 8.0, "one_norm": 2.0})


def test_noiseless_least_squares_can_be_solved() -> None:
    generator = torch.Generator().manual_seed(2)
    objective = perceptron("least squares", scale=1.0, activation="identity", noise=0.0, generator=generator)
    solution = torch.linalg.lstsq(*objective.data).solution
    assert float(nn.functional.mse_loss(objective.data[0] @ solution, objective.data[1])) < 1e-20


@pytest.mark.parametrize("name", ["tanh", "softplus"])
def test_bounds_on_the_activations_derivatives(name: str) -> None:
    activation = ACTIVATIONS[name]
    z = torch.linspace(-15, 15, 60_001, dtype=torch.float64, requires_grad=True)
    derivatives = [activation.function(z)]
    for _ in range(3):
        derivatives.append(torch.autograd.grad(derivatives[-1].sum(), z, create_graph=True)[0])
    value, _, second, third = (derivative.detach() for derivative in derivatives)
    assert float(second.abs().max()) == pytest.approx(activation.second, rel=1e-4)
    assert float(third.abs().max()) == pytest.approx(activation.third, rel=1e-4)
    largest = float((value * third).abs().max())
    assert 0.2 * activation.third_by_value < largest <= activation.third_by_value


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


def test_the_parabolas_constant() -> None:
    y = torch.linspace(0, 8, 80_001, dtype=torch.float64, requires_grad=True)
    derivative = nn.functional.softplus(y.square() / 2)
    for _ in range(3):
        derivative = torch.autograd.grad(derivative.sum(), y, create_graph=True)[0]
    assert PARABOLA_THIRD * 0.999 < float(derivative.detach().abs().max()) <= PARABOLA_THIRD


def test_target_at_smoke_scale(checked_target: Callable[..., Path]) -> None:
    folder = checked_target(
        "rank1/fisher",
        {
            "lemma-squared": "refuted",
            "lemma-unsquared": "reproduced",
            "softmax-sigma-printed": "refuted",
            "softmax-sigma": "reproduced",
            "softmax-steps-printed": "refuted",
            "softmax-steps": "reproduced",
            "least-squares-sigma": "reproduced",
        },
    )
    assert {path.stem for path in folder.glob("*.csv")} == {"table", "bounds", "rates", "summary"}
    bounds = pd.read_csv(folder / "bounds.csv")
    assert bounds[bounds.smoothness == 0].gap.max() < 1e-12  # outputs linear in the parameters: F is the Hessian
    assert len(list(folder.glob("figure_rates_*.png"))) == 2


def test_two_classes_need_two_outputs() -> None:
    run = SimpleNamespace(record_data=lambda name, checksum: None)
    task = OmegaConf.create({"data": {"_target_": "curvlab.lab.data.load_breast_cancer"}})
    with pytest.raises(ValueError, match="data=breast_cancer has one output for two classes; softmax needs one"):
        network_rows(run, "mlp-breast-cancer", task)


def test_rates_are_of_known_objectives() -> None:
    cfg = OmegaConf.create({"rate_objectives": ["softmax"]})
    with pytest.raises(ValueError, match=r"unknown rate_objectives \['softmax'\]: choose among 'least squares, f"):
        rate_rows(SimpleNamespace(), cfg)
