"""The objectives' closed forms and constants, against automatic differentiation and sampling."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian
from torch.func import functional_call

from curvlab.lab.data import load_breast_cancer_one_hot
from experiments.rank1.fisher import gap
from experiments.rank1.objectives import (
    ACTIVATIONS,
    PARABOLA_THIRD,
    Objective,
    cosines,
    logistic_regression,
    parabola,
    perceptron,
    quadratic,
    scaled,
    spectrum,
    square_root_curve,
    trapping_curve,
)


def make(name: str, generator: torch.Generator) -> Objective:
    if name == "curve":
        return square_root_curve(0.4)
    if name == "trapping":
        return trapping_curve(3.1)
    if name == "cosines":
        return cosines(4, 1.0)
    if name == "quadratic":
        return quadratic("power", 5, generator)
    if name == "scaled":
        return scaled(square_root_curve(0.4), 7.0)
    return logistic_regression(load_breast_cancer_one_hot(num_train=30, num_test=5), l2=1e-2)


def autograd_hessian(objective: Objective) -> torch.Tensor:
    x = objective.parameters[0]
    objective.closure()  # a graph of the gradient, differentiated once more
    gradient = torch.autograd.grad(objective.value(), x, create_graph=True)[0]
    return torch.stack([torch.autograd.grad(g, x, retain_graph=True, allow_unused=True)[0] for g in gradient])


@pytest.mark.parametrize("name", ["curve", "trapping", "cosines", "quadratic", "scaled", "logistic"])
def test_hessian_and_its_constants(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    objective = make(name, generator)
    x = objective.parameters[0]
    points, hessians = [], []
    for _ in range(5):
        x.data.copy_(2 * torch.randn(x.shape, dtype=torch.float64, generator=generator))
        expected = autograd_hessian(objective)
        torch.testing.assert_close(objective.hessian.to_dense(), expected, rtol=1e-10, atol=1e-12)
        points.append(x.detach().clone())
        hessians.append(expected)
    for i in range(5):
        assert torch.linalg.matrix_norm(hessians[i], 2) <= objective.spectral_norm * (1 + 1e-10)
        for j in range(i):
            change = torch.linalg.matrix_norm(hessians[i] - hessians[j], 2)
            assert change <= objective.hessian_lipschitz * (points[i] - points[j]).norm() + 1e-9


def test_constants_of_the_curves_are_attained() -> None:
    for objective, at in ((square_root_curve(0.5), 0.5), (cosines(1, 0.0), torch.pi / 2)):
        x = objective.parameters[0]
        ends = []
        for shift in (-1e-4, 1e-4):
            x.data.fill_(at + shift)
            ends.append(float(objective.hessian.to_dense()))
        assert abs(ends[1] - ends[0]) / 2e-4 == pytest.approx(objective.hessian_lipschitz, rel=1e-6)


def test_logistic_optimum_is_the_minimum() -> None:
    objective = make("logistic", torch.Generator())
    assert torch.equal(objective.parameters[0].detach(), torch.zeros(120, dtype=torch.float64))
    optimizer = torch.optim.LBFGS(objective.parameters, max_iter=500, tolerance_grad=1e-10, tolerance_change=0)
    optimizer.step(objective.closure)
    assert float(objective.value().detach()) == pytest.approx(objective.optimum, rel=1e-9)


def test_spectra_have_norm_one() -> None:
    for name in ("isotropic", "power", "exponential", "spike", "signed", "mirrored"):
        for size in (1, 2, 7):
            assert float(spectrum(name, size).abs().max()) == pytest.approx(1.0)
    assert float(spectrum("signed", 6).max()) < 0.1
    with pytest.raises(ValueError, match="unknown spectrum 'flat': choose isotropic, power"):
        spectrum("flat", 3)


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


def test_the_parabolas_constant() -> None:
    y = torch.linspace(0, 8, 80_001, dtype=torch.float64, requires_grad=True)
    derivative = nn.functional.softplus(y.square() / 2)
    for _ in range(3):
        derivative = torch.autograd.grad(derivative.sum(), y, create_graph=True)[0]
    assert PARABOLA_THIRD * 0.999 < float(derivative.detach().abs().max()) <= PARABOLA_THIRD
