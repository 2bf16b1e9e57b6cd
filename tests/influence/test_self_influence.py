"""Self-influence, and gradients of single examples within a budget of memory."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from curvlab.influence import (
    derivatives,
    directional_derivatives,
    self_influence,
)
from curvlab.influence.self_influence import curvature_probes
from curvlab.problem import Problem
from curvlab.problem.memory import MemoryWarning
from curvlab.solvers import ConjugateGradient, Direct
from tests.influence.gradients import gradient, gradient_rows, ridge
from tests.models import CPU_ERROR, Limited

DAMPING = 0.1


def closed_form(problem):
    """1/N g_kᵀ (G + damping)⁻¹ g_k, and with the mean gradient on the left."""
    gradients, size = problem.train_gradients, len(problem.train_gradients)
    damped = problem.gram + DAMPING * torch.eye(len(problem.gram), dtype=torch.float64)
    x = torch.linalg.solve(damped, gradients.T)
    return (gradients.T * x).sum(0) / size, gradients.mean(0) @ x / size


@pytest.mark.parametrize("columns", [5, 100])
def test_least_squares_in_chunks(least_squares, columns: int) -> None:
    arguments = (least_squares.model, least_squares.loss, least_squares.train)
    found = self_influence(*arguments, damping=DAMPING, columns=columns, solver=ConjugateGradient(rtol=1e-12))
    own, total = closed_form(least_squares)
    torch.testing.assert_close(found.own, own, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.total, total, rtol=1e-8, atol=1e-12)
    assert found.converged
    assert found.residual < 1e-12
    some = torch.tensor([7, 2, 11])
    found = self_influence(*arguments, points=some, damping=DAMPING, columns=2, solver=Direct())
    torch.testing.assert_close(found.own, own[some], rtol=1e-9, atol=0)


@pytest.fixture
def classifier(generator):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    inputs = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    return model, nn.CrossEntropyLoss(), (inputs, torch.randint(0, 3, (20,), generator=generator))


def dense(classifier):
    """Gradients (N, P) and G, one autograd row at a time."""
    model, loss, data = classifier
    return gradient_rows(model, loss, data), dense_gauss_newton(model, data, torch.ones(len(data[0])))


def test_probes_converge_to_the_exact_scores(classifier) -> None:
    gradients, curvature = dense(classifier)
    damped = curvature + 0.01 * torch.eye(len(curvature), dtype=torch.float64)
    x = torch.linalg.solve(damped, gradients.T)
    own, total = (gradients.T * x).sum(0) / 20, gradients.mean(0) @ x / 20
    num_probes, settings = 1500, {"columns": 1000, "solver": Direct(), "batch_size": 12, "generator": 1}
    found = self_influence(*classifier, damping=0.01, num_probes=num_probes, **settings)
    deviation = (found.own / own - 1) / (2 / num_probes) ** 0.5
    assert deviation.abs().max() < 4
    assert 0.4 < deviation.square().mean().sqrt() < 1.6  # as large as it is said to be, not larger
    torch.testing.assert_close(found.total, total, rtol=1e-8, atol=1e-12)


def test_probes_of_squared_errors(least_squares) -> None:
    arguments = (least_squares.model, least_squares.loss, least_squares.train)
    found = self_influence(*arguments, damping=DAMPING, num_probes=3000, columns=3000, solver=Direct())
    own, _ = closed_form(least_squares)
    assert (found.own / own - 1).abs().max() < 4 * (2 / 3000) ** 0.5


def test_of_a_sum_leaving_out_is_a_weight_of_minus_one(classifier) -> None:
    model, _, data = classifier
    gradients, curvature = dense(classifier)
    damped = 20 * curvature + DAMPING * torch.eye(len(curvature), dtype=torch.float64)
    x = torch.linalg.solve(damped, gradients.T)
    own, total = (gradients.T * x).sum(0), gradients.mean(0) @ x
    arguments = (model, nn.CrossEntropyLoss(reduction="sum"), data)
    found = self_influence(*arguments, damping=DAMPING, solver=Direct())
    torch.testing.assert_close(found.own, own, rtol=1e-8, atol=0)
    torch.testing.assert_close(found.total, total, rtol=1e-8, atol=1e-12)
    found = self_influence(*arguments, damping=DAMPING, num_probes=2000, columns=1000, solver=Direct())
    assert (found.own / own - 1).abs().max() < 4 * (2 / 2000) ** 0.5
    torch.testing.assert_close(found.total, total, rtol=1e-8, atol=1e-12)


# ---------------------------------------------------------------- weights of training examples
SIZE = 12
WEIGHTS = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0, 0.1, 1.0, 1.5, 0.7, 0.0, 4.0, 1.0], dtype=torch.float64)
EXACT = {"damping": DAMPING, "solver": Direct(), "weights": WEIGHTS, "batch_size": 5}


@pytest.fixture
def problem(generator: torch.Generator) -> tuple[nn.Module, Tensor, Tensor]:
    x, y = (torch.randn(SIZE, k, generator=generator, dtype=torch.float64) for k in (4, 1))
    model = nn.Linear(4, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(ridge(x, y[:, 0], WEIGHTS, DAMPING)[None])
    return model, x, y


def test_it_is_the_derivative_of_leaving_a_weighted_example_out(problem) -> None:
    model, x, y = problem
    found = self_influence(model, nn.MSELoss(), (x, y), columns=5, **EXACT)

    def losses(weights: Tensor) -> Tensor:
        return (y[:, 0] - x @ ridge(x, y[:, 0], weights, DAMPING)).square()

    step = 1e-5  # of the way to leaving it out
    for k in range(SIZE):
        taken = torch.zeros(SIZE, dtype=torch.float64)
        taken[k] = step * WEIGHTS[k]
        slopes = (losses(WEIGHTS - taken) - losses(WEIGHTS + taken)) / (2 * step)
        torch.testing.assert_close(found.own[k], slopes[k], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(found.total[k], (WEIGHTS * slopes).mean(), rtol=1e-6, atol=1e-9)


def test_chosen_points_keep_their_own_weights(problem) -> None:
    model, x, y = problem
    whole = self_influence(model, nn.MSELoss(), (x, y), **EXACT)
    some = torch.tensor([4, 0, 10])
    found = self_influence(model, nn.MSELoss(), (x, y), points=some, **EXACT)
    torch.testing.assert_close(found.own, whole.own[some])
    torch.testing.assert_close(found.total, whole.total[some])


def test_the_estimate_is_that_of_the_weighted_matrix(problem) -> None:
    model, x, y = problem
    exact = self_influence(model, nn.MSELoss(), (x, y), **EXACT)
    found = self_influence(model, nn.MSELoss(), (x, y), num_probes=4000, columns=4000, **EXACT)
    torch.testing.assert_close(found.own, exact.own, rtol=5 * (2 / 4000) ** 0.5, atol=0)
    torch.testing.assert_close(found.total, exact.total, rtol=1e-8, atol=1e-12)
    some = torch.tensor([4, 0, 10])
    chosen = self_influence(model, nn.MSELoss(), (x, y), points=some, num_probes=4000, columns=4000, **EXACT)
    assert torch.equal(chosen.own, found.own[some])
    assert torch.equal(chosen.total, found.total[some])


# --- Directions and probes where memory runs out: halved, said, and the same numbers
NUM = 20


def network() -> Limited:
    torch.manual_seed(0)
    return Limited(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), most=NUM).double().eval()


@pytest.fixture
def data(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(NUM, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (NUM,), generator=generator)


def test_directions_are_halved_where_fewer_examples_do_not_help(data, monkeypatch: pytest.MonkeyPatch) -> None:
    vmap, seen = derivatives.vmap, []

    def narrow(function):
        def call(*columns: Tensor) -> Tensor:
            seen.append(len(columns[0]))
            if len(columns[0]) > 3:
                raise RuntimeError(CPU_ERROR)
            return vmap(function)(*columns)

        return call

    monkeypatch.setattr(derivatives, "vmap", narrow)
    model = network()
    gradients = gradient_rows(model, nn.CrossEntropyLoss(), data)
    directions = torch.randn(gradients.shape[1], 8, dtype=torch.float64)
    with pytest.warns(MemoryWarning, match="2 vectors"):
        found = directional_derivatives(model, nn.CrossEntropyLoss(), data, directions)
    assert max(seen) == 8
    assert seen[-1] == 2
    assert_close(found, gradients @ directions, rtol=1e-11, atol=1e-13)


def test_probes_of_pieces_have_the_covariance_of_all(data, generator: torch.Generator) -> None:
    weights = torch.linspace(0, 2, NUM, dtype=torch.float64)
    probes, model = [], network()
    for narrow in (False, True):
        model.most = 6 if narrow else NUM
        problem = Problem.of(model, nn.CrossEntropyLoss(), data, weights)
        told = pytest.warns(MemoryWarning, match="a pass now takes 5 examples") if narrow else nullcontext()
        with told:
            probes.append(curvature_probes(problem, 2000, generator))
    whole, pieces = (sample @ sample.T / sample.shape[1] for sample in probes)
    dense = dense_gauss_newton(model, data, weights)
    assert (whole - dense).norm() / dense.norm() < 0.1
    assert (pieces - dense).norm() / dense.norm() < 0.1


def dense_gauss_newton(model: nn.Module, data: tuple[Tensor, Tensor], weights: Tensor) -> Tensor:
    """Return 1/N Σ w_n J_nᵀ (diag p - p pᵀ) J_n, row by row."""
    total = 0
    for x, weight in zip(data[0], weights, strict=True):
        jacobian = torch.stack([gradient(output, model) for output in model(x[None])[0]])
        p = model(x[None])[0].detach().softmax(0)
        total += weight * jacobian.T @ (torch.diag(p) - torch.outer(p, p)) @ jacobian
    return total / len(data[0])
