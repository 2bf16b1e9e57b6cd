"""The rows preconditioner against dense fp64 inverses: blocks of single examples, one autograd row at a time."""

from __future__ import annotations

import copy

import pytest
import torch
from curvature_cases import Problem, language_problem, problem
from curvature_oracles import dense_gauss_newton
from torch import Tensor, nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.linalg import DenseOperator, identity
from curvlab.solvers import BlockConjugateGradient, ConjugateGradient, Rows

DAMPING = 0.02
CASES = [
    "mlp_tanh-ce",
    "conv-ce",
    "mlp_relu-mse",
    "linear-bce",
    "conv-ce_ignore",
    "layer_norm-ce",
    "recurrent-mse",
]


def blocks_of(one: Problem) -> Tensor:
    """(N, P, P), summing up to G: example by example."""
    total = dense_gauss_newton(one.model, one.loss, one.inputs, one.targets)
    if isinstance(one.loss, nn.CrossEntropyLoss):
        summed = nn.CrossEntropyLoss(reduction="sum", ignore_index=one.loss.ignore_index)
        kept = [n for n in range(len(one.targets)) if int(one.targets[n]) != one.loss.ignore_index]
    else:
        summed, kept = type(one.loss)(reduction="sum"), list(range(len(one.targets)))
    parts = [one.part(n) for n in kept]
    blocks = torch.stack([dense_gauss_newton(part.model, summed, part.inputs, part.targets) for part in parts])
    return blocks * torch.trace(total) / blocks.diagonal(dim1=1, dim2=2).sum()


def dense_inverse(matrix: Tensor) -> Tensor:
    return torch.linalg.inv(matrix + DAMPING * torch.eye(len(matrix), dtype=torch.float64))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("score", ["outputs", "traces"])
def test_all_rows_are_the_inverse(name: str, score: str) -> None:
    if score == "traces" and name in ("layer_norm-ce", "recurrent-mse"):
        pytest.skip("no exact traces")
    one = problem(*name.split("-"))
    inverse, _ = Rows(score=score).build(GaussNewtonOperator(*one) + DAMPING * identity)
    expected = dense_inverse(dense_gauss_newton(one.model, one.loss, one.inputs, one.targets))
    torch.testing.assert_close(inverse.to_dense(), expected, rtol=1e-9, atol=1e-9)
    assert inverse.is_psd


@pytest.mark.parametrize("name", ["mlp_tanh-ce", "conv-ce", "layer_norm-ce", "mlp_relu-mse"])
@pytest.mark.parametrize("rank", [None, 2])
def test_some_rows_are_the_longest_of_the_examples_with_most_curvature(name: str, rank: int | None) -> None:
    """Of 3 examples the 3 longest principal rows, and of their sum its `rank` leading eigenvectors."""
    one = problem(*name.split("-"))
    blocks = blocks_of(one)
    if name.endswith("ce"):
        scores = 1 - one.model(one.inputs).detach().softmax(-1).square().sum(1)
        chosen = scores.topk(3).indices
    else:  # all alike, and the first are taken
        chosen = torch.arange(3)
    values, vectors = torch.linalg.eigh(blocks[chosen])
    rows = (values.clamp(min=0).sqrt()[:, None] * vectors).transpose(1, 2).flatten(0, 1)
    rows = rows[rows.norm(dim=1).topk(3).indices]
    expected = rows.T @ rows
    if rank is not None:
        values, vectors = torch.linalg.eigh(expected)
        expected = vectors[:, -rank:] * values[-rank:] @ vectors[:, -rank:].T
    inverse, _ = Rows(num_rows=3, rank=rank).build(GaussNewtonOperator(*one) + DAMPING * identity)
    assert inverse.num_example_rows == 3
    torch.testing.assert_close(inverse.to_dense(), dense_inverse(expected), rtol=1e-8, atol=1e-8)


def fitted(num_epochs: int = 400) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A small network on 300 noisy points of three classes, fitted until few points hold the curvature."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(300) % 3
    centres = torch.randn(3, 6, dtype=torch.float64, generator=generator)
    inputs = centres[targets] + 0.8 * torch.randn(300, 6, dtype=torch.float64, generator=generator)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(num_epochs):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model, (inputs, targets)


@pytest.mark.parametrize("solver", [ConjugateGradient, BlockConjugateGradient])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_takes_fewer_products_the_more_rows(solver: type, dtype: torch.dtype) -> None:
    model, data = fitted()
    op = GaussNewtonOperator(copy.deepcopy(model).to(dtype), nn.CrossEntropyLoss(), data)
    damped = op + 1e-4 * identity
    b = op.randn(6, torch.Generator().manual_seed(1)).to(dtype)
    plain = solver(rtol=1e-3).solve(damped, b)
    counts = []
    for num_rows in (20, 100, 800):
        found = solver(rtol=1e-3, preconditioner=Rows(num_rows)).solve(damped, b)
        assert found.converged
        assert float(found.residual.max()) <= 1e-3
        counts.append(found.num_matvecs)
        tolerance = 2e-3 * float(plain.x.norm()) / 1e-1  # both have a residual of 1e-3
        assert float((found.x - plain.x).norm()) < tolerance
    assert plain.num_matvecs >= counts[0] > counts[1] > counts[2]
    assert counts[2] < plain.num_matvecs / 4


@pytest.mark.parametrize("num_epochs", [0, 20, 400])
@pytest.mark.parametrize("rank", [None, 5])
def test_never_more_products_than_without(num_epochs: int, rank: int | None) -> None:
    model, data = fitted(num_epochs)
    op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), data)
    for damping in (1e-1, 1e-2, 1e-3):
        b = op.randn(4, torch.Generator().manual_seed(1))
        plain = BlockConjugateGradient(rtol=1e-3).solve(op + damping * identity, b)
        inverse, _ = Rows(50, rank=rank).build(op + damping * identity)
        found = BlockConjugateGradient(rtol=1e-3, preconditioner=inverse).solve(op + damping * identity, b)
        assert found.converged
        assert found.num_matvecs <= plain.num_matvecs


def test_memory_is_activations_and_signals() -> None:
    model, data = fitted(0)
    op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), data) + DAMPING * identity
    inverse, cost = Rows(40).build(op)
    sides = (7 + 16) + (17 + 16) + (17 + 3)
    assert inverse.num_kept <= 40 * sides + 40**2
    assert inverse.num_kept < 40 * op.shape[0]
    assert cost == 1  # a forward of the data, and four of 40 examples
    budget = 10**5
    affordable, _ = Rows(memory_budget=budget).build(op)
    rows = affordable.num_example_rows
    assert 32 * rows**2 + 8 * sides * rows <= budget < 32 * (rows + 1) ** 2 + 8 * sides * (rows + 1)


def test_conditions_no_better_than_the_dtype_tells() -> None:
    """With a damping far below fp32's rounding M stays positive definite."""
    model, data = fitted(100)
    op = GaussNewtonOperator(copy.deepcopy(model).float(), nn.CrossEntropyLoss(), data) + 1e-12 * identity
    inverse, _ = Rows(200).build(op)
    assert inverse.shift > 1e-8
    dense = inverse.to_dense().double()
    assert float(torch.linalg.eigvalsh((dense + dense.T) / 2).min()) > 0


def test_without_curvature_it_is_the_damping() -> None:
    one = problem("linear", "ce")
    data = (one.inputs, torch.full_like(one.targets, -1))
    data[1][0] = 0
    with torch.no_grad():
        one.model.weight.mul_(0)
        one.model.bias.copy_(torch.tensor([2000.0, 0, 0]))
    op = GaussNewtonOperator(one.model, nn.CrossEntropyLoss(ignore_index=-1), data) + DAMPING * identity
    inverse, _ = Rows().build(op)
    torch.testing.assert_close(inverse.to_dense(), torch.eye(15, dtype=torch.float64) / DAMPING)


def test_what_is_refused() -> None:
    one = problem("mlp_tanh", "ce")
    op = GaussNewtonOperator(*one)
    with pytest.raises(ValueError, match="positive damping"):
        Rows().build(op)
    with pytest.raises(TypeError, match="got DenseOperator"):
        Rows().build(DenseOperator(torch.eye(3)))
    with pytest.raises(ValueError, match="row for each class of each token"):
        Rows().build(GaussNewtonOperator(*language_problem("mean")) + DAMPING * identity)
    with pytest.raises(ValueError, match="does not hold one row"):
        Rows(memory_budget=50).build(op + DAMPING * identity)
    for arguments, message in (
        ({"num_rows": 0}, "num_rows must be"),
        ({"rank": 0}, "rank must be"),
        ({"score": "size"}, "score must be"),
        ({"memory_budget": 0}, "memory_budget must be"),
    ):
        with pytest.raises(ValueError, match=message):
            Rows(**arguments)
