"""Influence after Adam: lengths against torch's own state, scores against a dense solve and the derivative."""

import copy

import pytest
import torch
from torch import Tensor, nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.influence import (
    adam_times,
    influence_scores,
    preconditioned_influence,
    unrolled_response,
)
from curvlab.solvers import BlockConjugateGradient
from curvlab.training import RunLength, TrainingHistory, shuffled_batches, train

LOSS = nn.CrossEntropyLoss()


def data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(80, 6, generator=generator, dtype=torch.float64)
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

    def gradients(pair: tuple[Tensor, Tensor]) -> Tensor:
        rows = []
        for x, y in zip(*pair, strict=True):
            own = torch.autograd.grad(LOSS(model(x[None]), y[None]), list(model.parameters()))
            rows.append(torch.cat([g.flatten() for g in own]))
        return torch.stack(rows)[:, moved]

    points = gradients((train_data[0][[3, 1]], train_data[1][[3, 1]]))
    expected = -gradients(test) @ torch.linalg.solve(damped, points.T)
    torch.testing.assert_close(found.scores, expected, rtol=1e-6, atol=1e-8)
    assert found.points is not None
    assert found.points.tolist() == [3, 1]


def test_without_a_normaliser_it_is_the_damping_of_sgd() -> None:
    """With eps far above every gradient Adam takes SGD's steps of η / eps."""
    model, _, run = trained(eps=1e4, lr=200.0)
    found = preconditioned_influence(model, LOSS, *data(), run=run, rtol=1e-6).scores
    length = RunLength.constant(200.0 / 1e4, 60)
    expected = influence_scores(model, LOSS, *data(), run=length, rtol=1e-6)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3 * float(expected.abs().max()))


def test_nearer_to_the_derivative_of_the_training_than_any_single_damping() -> None:
    model, _, run = trained()
    exact = unrolled_response(model, LOSS, *data(), run=run).scores

    def correlation(scores: Tensor) -> float:
        return float(torch.corrcoef(torch.stack([scores.flatten(), exact.flatten()]))[0, 1])

    ours = correlation(preconditioned_influence(model, LOSS, *data(), run=run, rtol=1e-4).scores)
    grid = [
        correlation(influence_scores(model, LOSS, *data(), damping=d, rtol=1e-4)) for d in (1e-3, 1e-2, 0.1, 1, 10)
    ]
    print(ours, grid)
    assert ours > max(grid)


def test_what_is_refused() -> None:
    model, _, run = trained()
    with pytest.raises(ValueError, match="of a run of Adam"):
        preconditioned_influence(model, LOSS, *data(), run=run, times=torch.ones(3))
    torch.manual_seed(0)
    other = nn.Linear(6, 2).double()
    sgd = train(
        other, LOSS, data()[0], num_epochs=1, batch_size=20, lr=0.1, record=True, progress=False, generator=0
    )
    with pytest.raises(ValueError, match="not of Adam"):
        adam_times(other, LOSS, data()[0], sgd)
