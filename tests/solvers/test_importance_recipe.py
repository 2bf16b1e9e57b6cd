"""LiSSA's recipe with importance sampling: the bound in dense fp64, a fitted network, what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from curvlab.curvature import FisherOperator, GaussNewtonOperator
from curvlab.linalg import DenseOperator, identity
from curvlab.solvers import DivergenceError, Lissa, lissa_hyperparameters, measure_importance_recipe


def fitted() -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]:
    """150 points of three classes and a small network, fitted until a few points hold the curvature."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(150) % 3
    inputs = 2 * torch.eye(3).double()[targets] + 0.5 * torch.randn(150, 3, generator=generator).double()
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(250):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model, nn.CrossEntropyLoss(), (inputs, targets)


def heavy() -> Tensor:
    """200 matrices of rank 1; the first four hold most of the trace, in one direction."""
    factors = 0.3 * torch.randn(200, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    factors[:4, 0] = 8.0
    return factors[:, :, None] * factors[:, None, :]


def test_condition_holds_with_the_recipe_s_constant() -> None:
    """E H̃² - G² ⪯ C tr(G) G, exactly, over all examples; by uniform sampling only with a far larger C."""
    blocks = heavy()
    matrix = blocks.mean(0)
    recipe = measure_importance_recipe(DenseOperator(blocks, is_psd=True), 0.1)
    assert recipe.certified
    assert recipe.constant <= 1.01
    assert recipe.weights is not None
    values, vectors = torch.linalg.eigh(matrix)
    whiten = vectors / values.sqrt()

    def smallest_constant(q: Tensor) -> float:
        second = torch.einsum("n,nij,njk->ik", 1 / (200**2 * q), blocks, blocks) - matrix @ matrix
        return float(torch.linalg.eigvalsh(whiten.T @ second @ whiten)[-1] / matrix.trace())

    assert smallest_constant(recipe.weights) <= recipe.constant
    assert smallest_constant(torch.full((200,), 1 / 200).double()) > 5
    assert recipe.trace.value == pytest.approx(float(matrix.trace()))
    assert recipe.largest_eigenvalue == pytest.approx(float(values[-1]), rel=0.03)
    ratio = recipe.trace.value / recipe.largest_eigenvalue
    assert recipe.settings.batch_size == math.ceil(2 * recipe.constant * ratio)


def test_converges_on_a_fitted_network_where_uniform_batches_of_the_same_size_diverge() -> None:
    op = GaussNewtonOperator(*fitted())
    dense = op.to_dense()
    damping = 3e-3 * float(torch.linalg.eigvalsh(dense)[-1])
    damped = dense + damping * torch.eye(len(dense)).double()
    b = op.randn(2, torch.Generator().manual_seed(3))
    truth = torch.linalg.solve(damped, b)
    solver = Lissa.auto(op, damping, generator=torch.Generator().manual_seed(0))
    assert solver.recipe is not None
    assert solver.recipe.certified
    solution = solver.solve(op + damping * identity, b, generator=torch.Generator().manual_seed(1))
    error = (solution.x - truth).norm(dim=0) / truth.norm(dim=0)
    assert solution.converged
    assert float(error.max()) < 0.2
    promised = solver.stationary_error(op + damping * identity, solution.x, generator=torch.Generator())
    assert bool((error < promised + 0.1).all())
    paper = lissa_hyperparameters(
        trace=float(dense.trace()),
        largest_eigenvalue=float(torch.linalg.eigvalsh(dense)[-1]),
        damping=damping,
        num_time_constants=4,
    )
    assert solver.batch_size <= 1.05 * paper.batch_size + 1  # C = 2, as the paper assumes
    uniform = Lissa(paper.step_size, paper.batch_size, paper.num_steps)
    with pytest.raises(DivergenceError):
        uniform.solve(op + damping * identity, b, generator=torch.Generator().manual_seed(1))
    measured = Lissa.auto(op, damping, sampling="uniform", generator=torch.Generator().manual_seed(0))
    assert measured.weights is None
    assert measured.batch_size > 2 * solver.batch_size


def test_sequences_are_drawn_whole() -> None:
    """Traces of sequences are estimated: C is measured, and a tenth of the draws is uniform."""
    torch.manual_seed(0)

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens).cumsum(1).tanh())

    model = Causal().double()
    tokens = torch.randint(7, (12, 5), generator=torch.Generator().manual_seed(0))
    op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), (tokens[:, :-1], tokens[:, 1:]))
    recipe = measure_importance_recipe(op, 0.1, generator=torch.Generator().manual_seed(1))
    assert not recipe.certified
    assert recipe.weights is not None
    assert recipe.weights.shape == (12,)
    assert float(recipe.weights.min()) >= 0.1 / 12
    assert recipe.num_sampled_matvecs > 0


def test_what_is_refused() -> None:
    model, loss, data = fitted()
    with pytest.raises(TypeError, match="sampling='uniform'"):
        Lissa.auto(1.0 * GaussNewtonOperator(model, loss, data), 0.1)
    with pytest.raises(TypeError, match="pass a GaussNewtonOperator"):
        Lissa.auto(FisherOperator(model, loss, data, kind="empirical"), 0.1)
    with pytest.raises(ValueError, match="damping must be positive"):
        Lissa.auto(GaussNewtonOperator(model, loss, data), 0.0)
    with pytest.raises(ValueError, match="without damping"):
        Lissa.auto(GaussNewtonOperator(model, loss, data) + 0.1 * identity, 0.1)
    with pytest.raises(ValueError, match="must be 'importance' or 'uniform'"):
        Lissa.auto(GaussNewtonOperator(model, loss, data), 0.1, sampling="other")
