"""Results, the retraining that is meant, influence that is set up once, and influence after Adam."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from curvlab.curvature import GaussNewtonOperator
from curvlab.files import DamagedFileError
from curvlab.influence import (
    Influence,
    PreparedInfluence,
    Retraining,
    SelfInfluence,
    adam_times,
    influence,
    influence_scores,
    preconditioned_influence,
    prepare_influence,
    self_influence,
    unrolled_response,
)
from curvlab.solvers import BlockConjugateGradient, ConjugateGradient, Direct, Nystrom
from curvlab.training import RunLength, TrainingHistory, shuffled_batches, train
from tests.influence.gradients import gradient_rows
from tests.refusals import refuses

# --- Results with a score for each training point: the best and the worst, tables, files
DAMPING = 0.1


def of(problem, **settings) -> Influence:
    settings = ({} if "run" in settings else {"damping": DAMPING}) | settings
    return influence(problem.model, problem.loss, problem.train, problem.test, **settings)


@pytest.mark.filterwarnings("error")  # of NumPy, on tensors
def test_a_plot_shows_the_most_helpful_and_the_most_harmful_image() -> None:
    model, generator = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), torch.Generator().manual_seed(0)
    images, targets = torch.randn(6, 1, 2, 2, generator=generator), torch.tensor([0, 1] * 3)
    found = influence(model, nn.CrossEntropyLoss(), (images, targets), (images[:2], targets[:2]), damping=DAMPING)
    shown = [
        ax.images[0].get_array() for ax in found.plot(1, tests=[1], train=(images, targets)).axes if ax.images
    ]
    for pixels, point in zip(shown, found.ends(1)[1], strict=True):
        low, high = images[point].aminmax()
        assert_close(torch.as_tensor(pixels), (images[point, 0] - low) / (high - low))


def test_the_most_helpful_points_are_indices_and_scores_are_kept_in_files(least_squares, tmp_path) -> None:
    found, points = of(least_squares, points=torch.tensor([8, 2, 5]), solver=Direct()), torch.tensor([8, 2, 5])
    order = found.scores.argsort(dim=1)
    assert torch.equal(found.top(2), points[order[:, :2]])
    assert torch.equal(found.top(1, harmful=True), points[order[:, 2:]])
    candidates = of(least_squares, candidates=tuple(part[:3] for part in least_squares.train), solver=Direct())
    assert torch.equal(candidates.top(3), candidates.scores.argsort(dim=1))
    refuses("from 1 to the number of points, 3, got 4", found.top, 4)
    found.save(tmp_path / "scores.pt")
    again = Influence.load(tmp_path / "scores.pt")
    assert torch.equal(again.scores, found.scores)
    assert torch.equal(again.points, points)
    assert torch.equal(again.solution.residual, found.solution.residual)
    assert str(again) == str(found)
    settings = {"damping": "0.1", "curvature": "Gauss-Newton", "solver": "Direct(max_size=5000)"}
    assert again.origin.settings == {"loss": "MSELoss()"} | settings
    (tmp_path / "scores.pt").write_bytes(b"a file of the user's own")
    with pytest.raises(DamagedFileError):
        Influence.load(tmp_path / "scores.pt")


def test_a_file_of_scores_is_refused_for_another_model_loss_or_order(least_squares, tmp_path) -> None:
    model, loss, (x, y) = least_squares.model, least_squares.loss, least_squares.train
    of(least_squares, solver=Direct()).save(tmp_path / "scores")
    self_influence(model, loss, (x, y), damping=0.1, solver=Direct()).save(tmp_path / "own")
    for kind, path in ((Influence, tmp_path / "scores"), (SelfInfluence, tmp_path / "own")):
        assert kind.load(path, model, loss, (x, y)).origin is not None
        with pytest.raises(ValueError, match=r"scores are of other training examples or order of them \(1. of 12"):
            kind.load(path, model, loss, (x.flip(0), y.flip(0)))
        refuses("another number of examples", kind.load, path, model, loss, (x[1:], y[1:]))
        refuses("scores are of other loss: compute them", kind.load, path, model, nn.HuberLoss(), (x, y))
        trained = copy.deepcopy(model)
        with torch.no_grad():
            trained.weight[0, 0] += 1e-6
        refuses("scores are of other parameters: compute them", kind.load, path, trained, loss, (x, y))


def test_a_stream_is_known_by_its_first_batch_and_is_not_held(least_squares) -> None:
    class Stream:
        def __init__(self, x: Tensor, y: Tensor) -> None:
            self.batches = [(x[:6], y[:6]), (x[6:], y[6:])]

        def __iter__(self):
            return iter(self.batches)

    model, loss, (x, y) = least_squares.model, least_squares.loss, least_squares.train
    found = influence(model, loss, Stream(x, y), least_squares.test, damping=0.1, solver=Direct())
    assert found.origin.data.numbers.shape == (1, 2, 2)
    found.check(model, loss, Stream(x, y))
    refuses("order of them", found.check, model, loss, Stream(x.flip(0), y.flip(0)))


def test_tables_hold_both_ends_with_sign_unit_and_error(least_squares, monkeypatch) -> None:
    found = of(least_squares, points=[8, 2, 5, 1], solver=ConjugateGradient(rtol=1e-2))
    table, order = found.table(1), found.scores.argsort(dim=1)
    assert table.columns.tolist() == ["test", "point", "score", "sign", "residual"]
    assert table["test"].tolist() == [row for row in range(7) for _ in range(2)]
    assert table["point"].tolist() == found.points[order[:, [0, -1]]].flatten().tolist()
    torch.testing.assert_close(
        torch.tensor(table["score"][2:4].tolist()).double(), found.scores[1, order[1, [0, -1]]]
    )
    assert all((sign == "helps") == (score < 0) for sign, score in zip(table["sign"], table["score"], strict=True))
    assert table["residual"].tolist() == found.solution.residual[order[:, [0, -1]]].flatten().tolist()
    assert table.attrs["unit"] == "negative: helps; units of the loss per unit of weight"
    assert sorted(found.table(3)["point"][:4]) == [1, 2, 5, 8]  # there are not six: each is there once
    own = self_influence(least_squares.model, least_squares.loss, least_squares.train, damping=0.1)
    assert own.top(2)[0].tolist() == own.own.argsort(descending=True)[:2].tolist()
    assert own.table(1)["point"].tolist() == [int(own.own.argmax()), int(own.own.argmin())]
    assert own.table(1)["total"].tolist() == own.total[own.table(1)["point"]].tolist()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pandas", None)
        refuses("table needs pandas", found.table, error=ImportError)


# --- Which retraining is meant: closed forms of damping and filter, and what is refused
RUN = RunLength.constant(0.05, 40, momentum=0.5, weight_decay=0.2)


def gradient_flow(time: float, curvature: np.ndarray) -> np.ndarray:
    """(1 - e^{-time C}) C⁻¹, by eigenvectors."""
    values, vectors = np.linalg.eigh(curvature)
    return vectors @ np.diag(-np.expm1(-time * values) / values) @ vectors.T


def own_time(steps: int) -> float:
    """What a unit gradient moves momentum SGD in so many steps from rest, step by step."""
    position, velocity = 0.0, 0.0
    for _ in range(steps):
        velocity = 0.5 * velocity + 1
        position += 0.05 * velocity
    return position


@pytest.mark.parametrize(
    ("retraining", "time"),
    [
        (None, own_time(40)),
        (Retraining.as_many_steps(), own_time(40)),
        (Retraining.as_many_epochs(0.5), own_time(20)),
        (Retraining.as_many_epochs(0.1), own_time(4)),
        (Retraining(length=7.5), 7.5),
    ],
)
def test_the_retraining_sets_damping_and_filter(least_squares, retraining, time) -> None:
    arguments = (least_squares.model, least_squares.loss, least_squares.train, least_squares.test)
    curvature = least_squares.gram.numpy() + 0.2 * np.eye(15)
    test, points = (g.numpy() for g in (least_squares.test_gradients, least_squares.train_gradients))
    for filtered, inverse in (
        (False, np.linalg.inv(curvature + np.eye(15) / time)),
        (True, gradient_flow(time, curvature)),
    ):
        for count in (3, 12):  # solved for the points, and for the seven tests
            settings = {"run": RUN, "retraining": retraining, "filtered": filtered, "points": range(count)}
            found = influence(*arguments, **settings, rtol=1e-10)
            np.testing.assert_allclose(found.scores, -test @ inverse @ points[:count].T, rtol=1e-7, atol=1e-9)
            assert float(found.solution.residual.max()) <= 1e-10


def test_a_share_of_a_run_keeps_its_schedule() -> None:
    falling = RunLength(tuple(np.linspace(1.0, 0.0, 101)[:-1]))
    half = Retraining.as_many_epochs(0.5).time(falling)
    assert half == pytest.approx(falling.time / 2, rel=0.02)  # its first half alone is three quarters
    assert Retraining.as_many_epochs(1.0).time(falling) == pytest.approx(falling.time)


def test_lengths_that_are_refused(least_squares) -> None:
    arguments = (least_squares.model, least_squares.loss, least_squares.train, least_squares.test)
    for fraction in (0.0, 1.5):
        refuses(r"kept must be above 0 and at most 1, got .*: 0.5 for halves", Retraining.as_many_epochs, fraction)
    for length in (0.0, float("inf")):
        refuses("a sum of learning rates, must be positive and finite", Retraining, length=length)
    refuses(r"0\.01 of 40 steps is no step", Retraining.as_many_epochs(0.01).time, RUN)
    with pytest.raises(ValueError, match="pass run too, or damping = 1 / length alone"):
        influence_scores(*arguments, damping=0.1, retraining=Retraining(length=10.0))


# --- Influence that is set up once: against `influence` and closed forms, by module and by token, and its file
def closed_form(problem) -> Tensor:
    damped = problem.gram + DAMPING * torch.eye(len(problem.gram), dtype=torch.float64)
    return -problem.test_gradients @ torch.linalg.solve(damped, problem.train_gradients.T)


def set_up(problem, **settings) -> PreparedInfluence:
    return prepare_influence(problem.model, problem.loss, problem.train, damping=DAMPING, rtol=1e-10, **settings)


@pytest.mark.parametrize("points", [None, [7, 2]])
def test_scores_match_the_closed_form_query_after_query(least_squares, points) -> None:
    prepared, (x, y) = set_up(least_squares), least_squares.test
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


def test_what_cannot_be_prepared_is_refused() -> None:
    model, loss, train, test = network()
    prepared = prepare_influence(model, loss, train, damping=0.1)
    refuses("by_token is for sequences", prepared.by_token, test)
    refuses("split must be 'points' or 'test'", prepared.by_token, test, split="both")
    squares = prepare_influence(model, nn.MSELoss(), (train[0], torch.randn(34, 3).double()), damping=0.1)
    refuses("MSELoss has no tokens", squares.by_token, test)


# --- Influence after Adam: lengths against torch's own state, scores against a dense solve and the derivative
LOSS = nn.CrossEntropyLoss()


def data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    inputs = torch.randn(80, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs = inputs * torch.tensor([0.02, 0.1, 0.3, 1, 3, 0], dtype=torch.float64)  # the last is never on
    targets = (inputs @ torch.tensor([20.0, 5, 1, 1, -0.3, 0], dtype=torch.float64) > 0).long()
    return (inputs[:60], targets[:60]), (inputs[60:], targets[60:])


def trained(**settings: float) -> tuple[nn.Module, nn.Module, TrainingHistory]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    start = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), **{"lr": 0.02, **settings})
    batches = shuffled_batches(60, batch_size=20, num_epochs=20, generator=torch.Generator().manual_seed(1))
    run = train(
        model, LOSS, data()[0], optimizer=optimizer, batches=batches, num_epochs=20, batch_size=20, record=True,
        progress=False, generator=0,
    )  # fmt: skip
    return model.eval(), start, run


def test_lengths_are_those_of_torchs_adam() -> None:
    model, start, run = trained()
    optimizer = torch.optim.Adam(start.parameters(), lr=0.02)
    inputs, targets = data()[0]
    expected = torch.zeros(47, dtype=torch.float64)
    assert run.run is not None
    for number, batch in enumerate(run.run.batches, start=1):
        optimizer.zero_grad()
        LOSS(start(inputs[batch]), targets[batch]).backward()
        optimizer.step()
        square = torch.cat([optimizer.state[p]["exp_avg_sq"].flatten() for p in start.parameters()])
        step = 0.02 / ((square / (1 - 0.999**number)).sqrt() + 1e-8)
        expected += torch.where(square > 0, step, 0.0)
    found = adam_times(model, LOSS, data()[0], run)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    assert (found == 0).sum() == 5  # the weights of the input that is never on


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_scores_are_those_of_a_dense_solve(weight_decay: float) -> None:
    model, _, run = trained(weight_decay=weight_decay)
    train_data, test = data()
    times = adam_times(model, LOSS, train_data, run)
    found = preconditioned_influence(
        model, LOSS, train_data, test, run=run, points=[3, 1], solver=BlockConjugateGradient(rtol=1e-9)
    )
    moved = times > 0
    dense = GaussNewtonOperator(model, LOSS, train_data).to_dense()[moved][:, moved]
    damped = dense + torch.diag(1 / times[moved]) + weight_decay * torch.eye(int(moved.sum())).double()
    pairs = (train_data[0][[3, 1]], train_data[1][[3, 1]]), test
    points, tests = (gradient_rows(model, LOSS, pair)[:, moved] for pair in pairs)
    expected = -tests @ torch.linalg.solve(damped, points.T)
    torch.testing.assert_close(found.scores, expected, rtol=1e-6, atol=1e-8)
    assert found.points is not None
    assert found.points.tolist() == [3, 1]


def test_nearer_to_the_derivative_of_the_training_than_any_single_damping() -> None:
    model, _, run = trained()
    exact = unrolled_response(model, LOSS, *data(), run=run).scores

    def correlation(scores: Tensor) -> float:
        return float(torch.corrcoef(torch.stack([scores.flatten(), exact.flatten()]))[0, 1])

    ours = correlation(preconditioned_influence(model, LOSS, *data(), run=run, rtol=1e-4).scores)
    for damping in (1e-3, 1e-2, 0.1, 1, 10):
        assert ours > correlation(influence_scores(model, LOSS, *data(), damping=damping, rtol=1e-4))


def test_what_is_refused_after_adam() -> None:
    model, _, run = trained()
    refuses("of a run of Adam", preconditioned_influence, model, LOSS, *data(), run=run, times=torch.ones(3))
    torch.manual_seed(0)
    other = nn.Linear(6, 2).double()
    sgd = train(
        other, LOSS, data()[0], num_epochs=1, batch_size=20, lr=0.1, record=True, progress=False, generator=0
    )
    refuses("not of Adam", adam_times, other, LOSS, data()[0], sgd)
