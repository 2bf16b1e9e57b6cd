"""Influence that is set up once: against `influence` and closed forms, by module and by token, and its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from curvlab.files import DamagedFileError
from curvlab.influence import PreparedInfluence, influence, prepare_influence
from curvlab.solvers import Nystrom

DAMPING = 0.1


def closed_form(problem) -> Tensor:
    damped = problem.gram + DAMPING * torch.eye(len(problem.gram), dtype=torch.float64)
    return -problem.test_gradients @ torch.linalg.solve(damped, problem.train_gradients.T)


def of(problem, **settings) -> PreparedInfluence:
    return prepare_influence(problem.model, problem.loss, problem.train, damping=DAMPING, rtol=1e-10, **settings)


@pytest.mark.parametrize("points", [None, [7, 2]])
def test_scores_match_the_closed_form_query_after_query(least_squares, points) -> None:
    prepared, (x, y) = of(least_squares), least_squares.test
    expected = closed_form(least_squares)[:, slice(None) if points is None else points]
    for chosen in (slice(0, 1), slice(1, 7)):
        result = prepared.scores((x[chosen], y[chosen]), points=points)
        torch.testing.assert_close(result.scores, expected[chosen], rtol=1e-7, atol=1e-9)
        assert result.points.tolist() == (list(range(12)) if points is None else points)


def network() -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = torch.randn(40, 5).double(), torch.arange(40) % 3
    return model, nn.CrossEntropyLoss(), (x[:34], y[:34]), (x[34:], y[34:])


@pytest.mark.parametrize("kind", ["rows", "nystrom", "nothing"])
def test_a_file_gives_the_same_scores_and_is_of_one_matrix_alone(kind: str, tmp_path: Path) -> None:
    model, loss, train, test = network()
    if kind == "rows":
        train = (torch.cat([3 * train[0][:3], 0.01 * train[0][3:]]), train[1])  # three examples hold the curvature
    prepared = prepare_influence(
        model, loss, train, damping=0.05, rtol=1e-9, num_queries=1 if kind == "nothing" else 9
    )
    if kind == "nystrom":  # which this network is too small for
        inverse, cost = Nystrom(9).build(prepared.damped, generator=0)
        prepared = replace(prepared, solver=replace(prepared.solver, preconditioner=inverse), num_matvecs=cost)
    name = type(prepared.solver.preconditioner).__name__
    prepared.save(tmp_path / "state")
    loaded = PreparedInfluence.load(tmp_path / "state", model, loss, train)
    assert str(loaded) == str(prepared)
    assert type(loaded.solver.preconditioner).__name__ == name
    found, again = prepared.scores(test), loaded.scores(test)
    torch.testing.assert_close(again.scores, found.scores, rtol=1e-12, atol=0)
    assert again.solution.num_matvecs == found.solution.num_matvecs
    torch.testing.assert_close(found.scores, influence(model, loss, train, test, damping=0.05, rtol=1e-9).scores)
    with torch.no_grad():
        model[0].weight *= 1.1
    with pytest.raises(ValueError, match="belongs to another matrix: prepare_influence for this"):
        PreparedInfluence.load(tmp_path / "state", model, loss, train)
    (tmp_path / "state").write_bytes(b"something else")
    with pytest.raises(DamagedFileError):
        PreparedInfluence.load(tmp_path / "state", model, loss, train)


def test_parts_of_modules_sum_to_the_scores_and_match_autograd() -> None:
    model, loss, train, test = network()
    prepared = prepare_influence(model, loss, train, damping=0.05, rtol=1e-11)
    whole, parts = prepared.scores(test, points=[4, 0]), prepared.by_module(test, points=[4, 0])
    assert list(parts) == ["0", "2"]
    torch.testing.assert_close(parts["0"] + parts["2"], whole.scores)
    for column, point in enumerate((4, 0)):
        grads = torch.autograd.grad(loss(model(train[0][point]), train[1][point]), list(model.parameters()))
        first = torch.cat([grads[0].flatten(), grads[1].flatten()])
        torch.testing.assert_close(parts["0"][:, column], -whole.solution.x[: len(first)].T @ first)
    by_kind = prepared.by_module(test, of=lambda name: name.rpartition(".")[2])
    assert list(by_kind) == ["weight", "bias"]
    torch.testing.assert_close(by_kind["weight"] + by_kind["bias"], prepared.scores(test).scores)


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens).cumsum(1).tanh())


@pytest.mark.parametrize("split", ["points", "test"])
def test_parts_of_tokens_sum_to_the_scores_and_match_autograd(split: str) -> None:
    torch.manual_seed(0)
    model, loss = Causal().double(), nn.CrossEntropyLoss()
    tokens = torch.randint(7, (12, 6))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[1, 3:] = -100
    train, test = (inputs[:9], targets[:9]), (inputs[9:], targets[9:])
    prepared = prepare_influence(model, loss, train, damping=0.05, rtol=1e-11)
    parts = prepared.by_token(test, points=[1, 5], split=split)
    whole = prepared.scores(test, points=[1, 5]).scores
    assert parts.shape == (3, 2, 5)
    torch.testing.assert_close(parts.sum(2), whole)
    if split == "points":
        assert (parts[:, 0, 3:] == 0).all()
        x = prepared.scores(test).solution.x
        own = loss(model(inputs[1:2])[0, 1:2], targets[1, 1:2]) / 3  # one of three that count
        grads = torch.autograd.grad(own, list(model.parameters()))
        expected = -x.T @ torch.cat([grad.flatten() for grad in grads])
        torch.testing.assert_close(parts[:, 0, 1], expected)


def test_what_is_refused() -> None:
    model, loss, train, test = network()
    with pytest.raises(ValueError, match="damping must be positive"):
        prepare_influence(model, loss, train, damping=0.0)
    prepared = prepare_influence(model, loss, train, damping=0.1)
    with pytest.raises(ValueError, match="by_token is for sequences"):
        prepared.by_token(test)
    with pytest.raises(ValueError, match="split must be 'points' or 'test'"):
        prepared.by_token(test, split="both")
    squares = prepare_influence(model, nn.MSELoss(), (train[0], torch.randn(34, 3).double()), damping=0.1)
    with pytest.raises(ValueError, match="MSELoss has no tokens"):
        squares.by_token(test)
