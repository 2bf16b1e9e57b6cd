"""Results with a score for each training point: the best and the worst, tables, files."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import Tensor, nn

from curvlab.files import DamagedFileError
from curvlab.influence import (
    Influence,
    SelfInfluence,
    influence,
    self_influence,
)
from curvlab.solvers import ConjugateGradient, Direct

DAMPING = 0.1


def of(problem, **settings) -> Influence:
    settings = ({} if "run" in settings else {"damping": DAMPING}) | settings
    return influence(problem.model, problem.loss, problem.train, problem.test, **settings)


def test_the_most_helpful_points_are_indices_and_scores_are_kept_in_files(least_squares, tmp_path) -> None:
    found, points = of(least_squares, points=torch.tensor([8, 2, 5]), solver=Direct()), torch.tensor([8, 2, 5])
    order = found.scores.argsort(dim=1)
    assert torch.equal(found.top(2), points[order[:, :2]])
    assert torch.equal(found.top(1, harmful=True), points[order[:, 2:]])
    candidates = of(least_squares, candidates=tuple(part[:3] for part in least_squares.train), solver=Direct())
    assert torch.equal(candidates.top(3), candidates.scores.argsort(dim=1))
    with pytest.raises(ValueError, match="from 1 to the number of points, 3, got 4"):
        found.top(4)
    found.save(tmp_path / "scores.pt")
    again = Influence.load(tmp_path / "scores.pt")
    assert torch.equal(again.scores, found.scores)
    assert torch.equal(again.points, points)
    assert torch.equal(again.solution.residual, found.solution.residual)
    assert str(again) == str(found)
    assert again.origin.settings == {
        "loss": "MSELoss()",
        "damping": "0.1",
        "curvature": "Gauss-Newton",
        "solver": "Direct(max_size=5000)",
    }
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
        with pytest.raises(ValueError, match="another number of examples"):
            kind.load(path, model, loss, (x[1:], y[1:]))
        with pytest.raises(ValueError, match="scores are of other loss: compute them"):
            kind.load(path, model, nn.HuberLoss(), (x, y))
        trained = copy.deepcopy(model)
        with torch.no_grad():
            trained.weight[0, 0] += 1e-6
        with pytest.raises(ValueError, match="scores are of other parameters: compute them"):
            kind.load(path, trained, loss, (x, y))


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
    with pytest.raises(ValueError, match="order of them"):
        found.check(model, loss, Stream(x.flip(0), y.flip(0)))


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
        with pytest.raises(ImportError, match="table needs pandas"):
            found.table()
