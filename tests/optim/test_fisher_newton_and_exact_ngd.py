"""Optimizers with the whole Fisher matrix: Fisher-Newton and exact NGD."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

from curvlab.curvature import FisherOperator, GaussNewtonOperator
from curvlab.linalg import DenseOperator
from curvlab.optim import CubicNewton, DivergedError, ExactNGD, FisherNewton, output_gradient_bound
from curvlab.problem.own_losses import output_loss
from curvlab.solvers import ConjugateGradient
from tests.refusals import refuses

LOSSES = {
    "mean squares": nn.MSELoss(),
    "sum of squares": nn.MSELoss(reduction="sum"),
    "softmax": nn.CrossEntropyLoss(),
    "sum of softmax": nn.CrossEntropyLoss(reduction="sum"),
    "one logit": nn.BCEWithLogitsLoss(),
}


class Task:
    def __init__(self, name: str, generator: torch.Generator) -> None:
        outputs = 3 if "softmax" in name else 1
        self.inputs = torch.randn(12, 2, dtype=torch.float64, generator=generator)
        self.network = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs)).double()
        for parameter in self.network.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
        if "softmax" in name:
            self.targets = torch.randint(3, (12,), generator=generator)
        else:
            self.targets = (self.inputs[:, :1] > 0).double()
        self.loss = LOSSES[name]
        self.operator = FisherOperator(self.network, self.loss, (self.inputs, self.targets))
        self.parameters = {name: p.detach().clone() for name, p in self.network.named_parameters()}

    def closure(self) -> Tensor:
        self.network.zero_grad()
        value = self.loss(self.network(self.inputs), self.targets)
        value.backward()
        return value

    def outputs_at(self, vector: Tensor) -> Tensor:
        pieces, start = {}, 0
        for name, parameter in self.parameters.items():
            pieces[name] = vector[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
        return functional_call(self.network, pieces, (self.inputs,))

    @property
    def vector(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.network.parameters()])

    def dense_fisher(self) -> Tensor:
        """Jᵀ S J from the outputs' Jacobian and the autograd Hessian of the loss by the outputs."""
        outputs = self.outputs_at(self.vector)
        jacobian = jacrev(self.outputs_at)(self.vector).reshape(outputs.numel(), -1)
        inner = hessian(lambda h: self.loss(h, self.targets))(outputs).reshape(outputs.numel(), -1)
        return jacobian.T @ inner @ jacobian

    def dense_hessian(self) -> Tensor:
        return hessian(lambda v: self.loss(self.outputs_at(v), self.targets))(self.vector)

    def smoothness(self) -> float:
        """L at the current parameters: largest spectral norm of any output's Hessian."""
        hessians = hessian(self.outputs_at)(self.vector)
        return float(torch.linalg.matrix_norm(hessians, 2).max())


@pytest.fixture(params=LOSSES)
def task(request, generator: torch.Generator) -> Task:
    return Task(request.param, generator)


def test_step_agrees_with_a_dense_solve(task: Task) -> None:
    start, dense = task.vector.clone(), task.dense_fisher()
    optimizer = FisherNewton(task.network.parameters(), task.operator, hessian_lipschitz=2.0, sigma=0.1)
    optimizer.step(task.closure)
    gradient = torch.cat([p.grad.reshape(-1) for p in task.network.parameters()])
    alpha = math.sqrt(float(gradient.norm())) + 0.1
    expected = start - torch.linalg.solve(dense + alpha * torch.eye(len(start), dtype=torch.float64), gradient)
    torch.testing.assert_close(task.vector, expected, rtol=1e-10, atol=1e-10)
    assert optimizer.last_step.alpha == pytest.approx(alpha)


def test_bound_holds_at_random_parameters(task: Task, generator) -> None:
    count = task.targets.numel()
    for scale in (0.3, 1.0, 3.0):
        for parameter in task.network.parameters():
            parameter.data.copy_(scale * torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
        gap = torch.linalg.matrix_norm(task.dense_hessian() - task.dense_fisher(), 2)
        loss = task.loss(task.network(task.inputs), task.targets).item()
        bound = output_gradient_bound(output_loss(task.loss), loss, num_predictions=count)
        assert float(gap) <= task.smoothness() * bound * (1 + 1e-10)


def test_rule_for_sigma(task: Task) -> None:
    optimizer = FisherNewton(task.network.parameters(), task.operator, smoothness=0.5, num_predictions=12)
    loss = float(optimizer.step(task.closure))
    name = next(name for name, loss in LOSSES.items() if loss is task.loss)
    expected = {
        "mean squares": 2 * math.sqrt(loss),
        "sum of squares": 2 * math.sqrt(12 * loss),
        "softmax": 2 * loss,
        "sum of softmax": 2 * loss,
        "one logit": loss,
    }[name]
    assert optimizer.last_step.sigma == pytest.approx(0.5 * expected)
    assert optimizer.last_step.alpha == optimizer.last_step.sigma  # M is 0 unless it is given


def test_conjugate_gradients_take_the_same_step(task: Task, generator) -> None:
    start = {name: value.clone() for name, value in task.network.state_dict().items()}
    ends = []
    for solver in (None, ConjugateGradient(rtol=1e-10)):
        task.network.load_state_dict(start)
        optimizer = FisherNewton(task.network.parameters(), task.operator, sigma=0.05, solver=solver)
        optimizer.step(task.closure)
        assert optimizer.last_step.converged
        ends.append(task.vector.clone())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-7, atol=1e-8)


def test_large_models_are_solved_by_conjugate_gradients(generator) -> None:
    inputs, targets = torch.randn(5, 600, generator=generator), torch.zeros(5, 1)
    network = nn.Linear(600, 1, bias=False)
    optimizer = FisherNewton(
        network.parameters(), FisherOperator(network, nn.MSELoss(), (inputs, targets)), sigma=1.0
    )
    assert isinstance(optimizer.solver, ConjugateGradient)


def test_what_does_not_fit_is_refused(generator) -> None:
    task = Task("softmax", generator)
    data = (task.inputs, task.targets)
    empirical = FisherOperator(task.network, task.loss, data, kind="empirical")
    for operator in (empirical, GaussNewtonOperator(task.network, task.loss, data)):
        refuses("of kind 'exact' or 'monte_carlo'", FisherNewton, task.network.parameters(), operator)
    optimizer = FisherNewton(task.network.parameters(), task.operator, smoothness=1.0)
    task.closure()
    refuses(r"rule for σ needs the loss: pass step\(closure\)", optimizer.step)
    summed = Task("sum of squares", generator)
    refuses("pass num_predictions=", FisherNewton, summed.network.parameters(), summed.operator, smoothness=1.0)


@pytest.mark.parametrize(
    ("eigenvalues", "lipschitz"),
    [([3.0, 1.0, 0.2], 0.7), ([2.0, 0.0, -1.5], 0.7), ([-1.0, -1.0, -0.5], 0.7), ([3.0, 1.0, 0.2], 0.0)],
)
def test_step_minimises_the_cubic_model(make_quadratic, eigenvalues, lipschitz) -> None:
    problem = make_quadratic(eigenvalues)
    start = problem.x.detach().clone()
    gradient = problem.matrix @ start - problem.linear
    settings = {"hessian_lipschitz": lipschitz} if lipschitz else {}  # 0 unless it is given: Newton's method
    optimizer = CubicNewton(problem.parameters(), problem.operator, **settings)
    optimizer.step(problem.closure)
    assert optimizer.num_matvecs == 3
    h = problem.x.detach() - start
    # Nesterov & Polyak (2006), Prop. 1: stationary, and H + M‖h‖/2 I positive semi-definite, is the minimum.
    stationary = gradient + problem.matrix @ h + lipschitz / 2 * h.norm() * h
    torch.testing.assert_close(stationary, torch.zeros_like(h), rtol=0, atol=1e-9)
    assert min(eigenvalues) + lipschitz * float(h.norm()) / 2 >= -1e-9


# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "epsilon"), [(0.1, 1e-10), (2.0, 1e4)])
@pytest.mark.parametrize("rescale", [False, True])
def test_step_is_the_smoothed_natural_gradient(
    alpha: float, epsilon: float, rescale: bool, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FisherOperator, "matmat", None)  # rows of the layers give the matrix, not products
    task = Task("softmax", generator)
    settings = {"alpha": alpha, "epsilon": epsilon, "rescale": rescale}
    optimizer = ExactNGD(task.network.parameters(), task.operator, 0.5, **settings)
    for _ in range(2):  # the second step sees F at the new parameters
        F = task.dense_fisher().numpy()
        kappa = alpha / len(F) * max(np.trace(F), epsilon)
        task.closure()
        g = torch.cat([parameter.grad.reshape(-1) for parameter in task.network.parameters()]).numpy()
        expected = np.linalg.solve(F + kappa * np.eye(len(F)), g)
        if rescale:
            expected *= np.linalg.norm(g) / np.linalg.norm(expected)
        before = task.vector
        optimizer.step()
        np.testing.assert_allclose(before - task.vector, 0.5 * expected, rtol=1e-8, atol=1e-12)
        info = optimizer.last_step
        assert info is not None
        np.testing.assert_allclose([info.trace, info.kappa], [np.trace(F), kappa])
        np.testing.assert_allclose(info.step_norm, np.linalg.norm(expected))
    assert info.num_matvecs == 2 * len(F)


def test_takes_the_fisher_matrix_of_a_batch_and_a_closure(generator: torch.Generator) -> None:
    x = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = x.square().sum() / 2
        value.backward()
        return value

    optimizer = ExactNGD([x], DenseOperator(torch.eye(2, dtype=torch.float64)), 1.0, alpha=0.0)
    batch = DenseOperator(torch.diag(torch.tensor([2.0, 4.0], dtype=torch.float64)))
    assert float(optimizer.step(closure, fisher=batch)) == 2.5
    np.testing.assert_allclose(x.detach(), [0.5, 1.5])


def test_the_matrix_is_factorised_in_double_precision() -> None:
    # 1 - 1e-8 is 1 in single precision: there the matrix is singular.
    matrix = torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    x = nn.Parameter(torch.zeros(2))
    x.grad = torch.tensor([1.0, 1.0])
    optimizer = ExactNGD([x], DenseOperator(matrix), 1.0, alpha=1e-8)
    optimizer.step()
    np.testing.assert_allclose(x.detach(), [-0.5, -0.5], rtol=1e-6)


def test_errors_of_a_steps_own_fisher_matrix() -> None:
    x = nn.Parameter(torch.zeros(2))
    x.grad = torch.ones(2)
    optimizer = ExactNGD([x], DenseOperator(torch.eye(2)), 1.0)
    refuses("must be the parameters that require gradients", optimizer.step, fisher=DenseOperator(torch.eye(3)))
    broken = DenseOperator(torch.eye(2))
    broken.to_dense = lambda: torch.full((2, 2), torch.nan)  # as a model gives it whose outputs are infinite
    refuses("holds NaN or infinity", optimizer.step, fisher=broken, error=DivergedError)
    assert torch.equal(x, torch.zeros(2))


def test_a_singular_matrix_without_smoothing_says_what_to_change() -> None:
    x = nn.Parameter(torch.zeros(2))
    fisher = DenseOperator(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    x.grad = torch.ones(2)
    refuses("Raise alpha", ExactNGD([x], fisher, 1.0, alpha=0.0).step)
