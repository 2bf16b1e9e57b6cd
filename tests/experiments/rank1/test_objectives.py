"""The objectives' closed forms and constants, against automatic differentiation and sampling; descent on them."""

from __future__ import annotations

import pytest
import torch

from curvlab.lab.data import load_breast_cancer_one_hot
from curvlab.optim import UniformDirection, steps_bound
from experiments.rank1.descent import descend
from experiments.rank1.objectives import (
    Objective,
    cosines,
    logistic_regression,
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
