"""Self-influence against closed forms, dense matrices and leaving examples out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from curvlab.influence import estimated_self_influence, self_influence
from curvlab.problem.memory import MemoryWarning
from curvlab.solvers import ConjugateGradient, Direct

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


def test_leaving_out_raises_losses_by_as_much(least_squares) -> None:
    # Ridge around the fitted weights: the minimiser without example k, with a tiny weight for -1/N.
    model, (x, y) = least_squares.model, least_squares.train
    size, outputs, start = len(x), y.shape[1], least_squares.model.weight.detach()
    own, total = closed_form(least_squares)
    epsilon = 1e-6

    def losses(weight):
        return (x @ weight.T - y).square().mean(1)

    for k in (0, 5):
        weights = torch.ones(size, dtype=torch.float64)
        weights[k] -= epsilon
        # 1/N sum_n D_n(Wx, W0 x) - epsilon/N l_k(W) + damping/2 ‖W - W0‖² in W - W0, by its normal equations;
        # the curvature of the point's own loss is weighted like all others', to first order.
        gram = 2 / (size * outputs) * x.T @ x + DAMPING * torch.eye(x.shape[1], dtype=torch.float64)
        pull = 2 / (size * outputs) * (x[k] @ start.T - y[k])[:, None] * x[k]
        moved = start + epsilon * torch.linalg.solve(gram, pull.T).T
        change = (losses(moved) - losses(start)) / epsilon
        assert float(change[k]) == pytest.approx(float(own[k]), rel=1e-4)
        assert float(change.mean()) == pytest.approx(float(total[k]), rel=1e-4, abs=1e-9)
    assert torch.equal(model.weight.detach(), start)


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
    model, loss, (inputs, labels) = classifier
    parameters, gradients, curvature = list(model.parameters()), [], 0.0
    for x, y in zip(inputs, labels, strict=True):
        outputs = model(x[None])

        def rows(value, parameters=parameters):
            return torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters, retain_graph=True)])

        jacobian = torch.stack([rows(output) for output in outputs[0]])
        p = outputs[0].softmax(0).detach()
        curvature = curvature + jacobian.T @ (p.diag() - p[:, None] * p) @ jacobian / len(inputs)
        gradients.append(rows(loss(outputs, y[None])))
    return torch.stack(gradients), curvature


def test_probes_converge_to_the_exact_scores(classifier) -> None:
    gradients, curvature = dense(classifier)
    damped = curvature + 0.01 * torch.eye(len(curvature), dtype=torch.float64)
    x = torch.linalg.solve(damped, gradients.T)
    own, total = (gradients.T * x).sum(0) / 20, gradients.mean(0) @ x / 20
    num_probes = 1500
    found = estimated_self_influence(
        *classifier,
        damping=0.01,
        num_probes=num_probes,
        columns=1000,
        solver=Direct(),
        batch_size=12,
        generator=torch.Generator().manual_seed(1),
    )
    deviation = (found.own / own - 1) / (2 / num_probes) ** 0.5
    assert deviation.abs().max() < 4
    assert 0.4 < deviation.square().mean().sqrt() < 1.6  # as large as it is said to be, not larger
    torch.testing.assert_close(found.total, total, rtol=1e-8, atol=1e-12)


def test_probes_of_squared_errors(least_squares) -> None:
    arguments = (least_squares.model, least_squares.loss, least_squares.train)
    found = estimated_self_influence(*arguments, damping=DAMPING, num_probes=3000, columns=3000, solver=Direct())
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
    found = estimated_self_influence(*arguments, damping=DAMPING, num_probes=2000, columns=1000, solver=Direct())
    assert (found.own / own - 1).abs().max() < 4 * (2 / 2000) ** 0.5
    torch.testing.assert_close(found.total, total, rtol=1e-8, atol=1e-12)


def test_settings_are_checked(least_squares) -> None:
    arguments = (least_squares.model, least_squares.loss, least_squares.train)
    with pytest.raises(ValueError, match="damping must be positive"):
        self_influence(*arguments, damping=0.0)
    with pytest.raises(ValueError, match="num_probes must be at least 1"):
        estimated_self_influence(*arguments, damping=DAMPING, num_probes=0)


@pytest.mark.parametrize("estimator", [self_influence, estimated_self_influence])
def test_a_budget_cuts_passes_and_changes_no_score(classifier, estimator) -> None:
    model, loss, train = classifier
    settings = {"damping": 0.1, "solver": ConjugateGradient(rtol=1e-10)}
    if estimator is estimated_self_influence:
        settings["num_probes"] = 3
    expected = estimator(model, loss, train, **settings)
    with pytest.warns(MemoryWarning, match="that are given: a pass takes"):
        found = estimator(model, loss, train, **settings, memory_budget=2**9)
    torch.testing.assert_close(found.own, expected.own, rtol=1e-6, atol=1e-9)


# ---------------------------------------------------------------- weights of training examples
SIZE = 12
WEIGHTS = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0, 0.1, 1.0, 1.5, 0.7, 0.0, 4.0, 1.0], dtype=torch.float64)
EXACT = {"damping": DAMPING, "solver": Direct(), "weights": WEIGHTS, "batch_size": 5}


def ridge(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Return the minimum of 1/N Σ w_i (y_i - θᵀx_i)² + DAMPING/2 |θ|² by its normal equations, (F,)."""
    matrix = 2 / len(x) * x.T @ (weights[:, None] * x) + DAMPING * torch.eye(x.shape[1], dtype=torch.float64)
    return torch.linalg.solve(matrix, 2 / len(x) * x.T @ (weights * y))


@pytest.fixture
def problem(generator: torch.Generator) -> tuple[nn.Module, Tensor, Tensor]:
    x, y = (torch.randn(SIZE, k, generator=generator, dtype=torch.float64) for k in (4, 1))
    model = nn.Linear(4, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(ridge(x, y[:, 0], WEIGHTS)[None])
    return model, x, y


def test_it_is_the_derivative_of_leaving_a_weighted_example_out(problem) -> None:
    model, x, y = problem
    found = self_influence(model, nn.MSELoss(), (x, y), columns=5, **EXACT)

    def losses(weights: Tensor) -> Tensor:
        return (y[:, 0] - x @ ridge(x, y[:, 0], weights)).square()

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
    found = estimated_self_influence(model, nn.MSELoss(), (x, y), num_probes=4000, columns=4000, **EXACT)
    torch.testing.assert_close(found.own, exact.own, rtol=5 * (2 / 4000) ** 0.5, atol=0)
    torch.testing.assert_close(found.total, exact.total, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("function", [self_influence, estimated_self_influence])
def test_bad_weights_are_refused(problem, function) -> None:
    model, x, y = problem
    settings = {"num_probes": 2} if function is estimated_self_influence else {}
    for weights, text in ((torch.ones(11), "one weight for each of 12 examples"), (-WEIGHTS, "not negative")):
        with pytest.raises(ValueError, match=text):
            function(model, nn.MSELoss(), (x, y), damping=DAMPING, weights=weights, **settings)
