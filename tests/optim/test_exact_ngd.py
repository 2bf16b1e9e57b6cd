from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from curvlab.curvature import FisherOperator
from curvlab.linalg import DenseOperator
from curvlab.optim import DivergedError, ExactNGD


def problem(generator: torch.Generator) -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    inputs = torch.randn(12, 4, dtype=torch.float64, generator=generator)
    return model, inputs, torch.randint(3, (12,), generator=generator)


def dense_fisher(model: nn.Module, inputs: Tensor) -> np.ndarray:
    """1/n Σ_n Σ_y p(y) s sᵀ with s the gradient of log p(y), one backward pass a label."""
    parameters = list(model.parameters())
    total = 0.0
    for example in inputs:
        log_p = model(example).log_softmax(-1)
        for label in range(3):
            score = torch.autograd.grad(log_p[label], parameters, retain_graph=True)
            s = torch.cat([part.reshape(-1) for part in score]).numpy()
            total = total + float(log_p[label].detach().exp()) * np.outer(s, s)
    return np.asarray(total) / len(inputs)


def flat(model: nn.Module) -> np.ndarray:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).numpy()


@pytest.mark.parametrize(("alpha", "epsilon"), [(0.1, 1e-10), (2.0, 1e4)])
@pytest.mark.parametrize("rescale", [False, True])
def test_step_is_the_smoothed_natural_gradient(
    alpha: float, epsilon: float, rescale: bool, generator: torch.Generator
) -> None:
    model, inputs, targets = problem(generator)
    loss = nn.CrossEntropyLoss()
    optimizer = ExactNGD(
        model.parameters(),
        FisherOperator(model, loss, (inputs, targets)),
        0.5,
        alpha=alpha,
        epsilon=epsilon,
        rescale=rescale,
    )
    for _ in range(2):  # the second step sees F at the new parameters
        F = dense_fisher(model, inputs)
        kappa = alpha / len(F) * max(np.trace(F), epsilon)
        model.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        g = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]).numpy()
        expected = np.linalg.solve(F + kappa * np.eye(len(F)), g)
        if rescale:
            expected *= np.linalg.norm(g) / np.linalg.norm(expected)
        before = flat(model)
        optimizer.step()
        np.testing.assert_allclose(before - flat(model), 0.5 * expected, rtol=1e-8, atol=1e-12)
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
    with pytest.raises(ValueError, match="must be the parameters that require gradients"):
        optimizer.step(fisher=DenseOperator(torch.eye(3)))
    broken = DenseOperator(torch.eye(2))
    broken.to_dense = lambda: torch.full((2, 2), torch.nan)  # as a model gives it whose outputs are infinite
    with pytest.raises(DivergedError, match="holds NaN or infinity"):
        optimizer.step(fisher=broken)
    assert torch.equal(x, torch.zeros(2))


def test_a_singular_matrix_without_smoothing_says_what_to_change() -> None:
    x = nn.Parameter(torch.zeros(2))
    fisher = DenseOperator(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    x.grad = torch.ones(2)
    with pytest.raises(ValueError, match="Raise alpha"):
        ExactNGD([x], fisher, 1.0, alpha=0.0).step()
