"""The five gaps in one call: each response by hand, for a run of SGD and one of Adam."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlab.influence import explain_gap, influence, prepare_influence
from curvlab.linalg import flatten
from curvlab.solvers import Direct
from curvlab.training import RunLength, shuffled_batches, train
from curvlab.training.history import DataProbe
from tests.refusals import refuses

LOSS = nn.CrossEntropyLoss()


def task(**settings: Any) -> tuple[nn.Module, tuple[Tensor, Tensor], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    data = (torch.randn(20, 3).double(), torch.arange(20) % 2)
    settings = {"num_epochs": 3, "batch_size": 8, "lr": 0.2, "record": True, "generator": 0} | settings
    return model, data, train(model, LOSS, data, **settings)


def retrained(
    model: nn.Module, data: Any, left_out: int, start: Tensor, batches: Any, rates: Any, optimizer: Any
) -> nn.Module:
    """Return the network after plain steps, on 1/|B| of the sum of losses without one example."""
    model, (x, y) = copy.deepcopy(model), data
    nn.utils.vector_to_parameters(start.clone(), model.parameters())
    stepper = optimizer(model.parameters())
    for batch, rate in zip(batches, rates, strict=True):
        stepper.param_groups[0]["lr"] = rate
        kept = batch[batch != left_out]
        stepper.zero_grad()
        (nn.functional.cross_entropy(model(x[kept]), y[kept], reduction="sum") / len(batch)).backward()
        stepper.step()
    return model


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_each_gap_is_the_distance_of_two_networks(name: str) -> None:
    settings = {"weight_decay": 0.01, **({"momentum": 0.5} if name == "sgd" else {})}
    lr = 0.2 if name == "sgd" else 0.02
    rates = [lr / (1 + step / 5) for step in range(9)]
    model, data, history = task(optimizer=name, lr=lr, schedule=lambda step, _: 1 / (1 + step / 5), **settings)
    damping = None if name == "sgd" else 0.1
    found = explain_gap(model, LOSS, data, [3, 11], run=history, damping=damping, solver=Direct(), generator=1)
    optimizer = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name]

    def made(parameters: Any) -> torch.optim.Optimizer:
        return optimizer(parameters, lr=lr, **settings)

    base = flatten([p.detach() for p in model.parameters()])
    order = torch.Generator().manual_seed(1)
    steps = history.num_steps
    assert steps == 9
    more = shuffled_batches(20, batch_size=8, num_epochs=4, generator=order)[: steps // 2]
    for place, point in enumerate((3, 11)):
        start = history.run.start
        cold = retrained(model, data, point, start, [*history.run.batches, *more], rates + rates[-1:] * 4, made)
        warm = retrained(model, data, point, base, more, rates[-1:] * 4, made)
        for response, network in {"cold": cold, "warm": warm}.items():
            moved = flatten([p.detach() for p in network.parameters()]) - base
            torch.testing.assert_close(found.responses[response][place], moved, rtol=1e-9, atol=1e-11)
        gap = (cold(data[0]) - warm(data[0])).norm() / 20**0.5
        torch.testing.assert_close(found.gaps["warm_start"].per_example[place], gap.detach())
    if damping is None:  # 1 / (ηT / (1 - m)), less what momentum has not yet carried along
        damping = history.run.length().damping - 0.01
        carried = [(1 - 0.5**k) / 0.5 for k in range(1, 10)]
        assert damping == pytest.approx(1 / sum(rate * far for rate, far in zip(rates, carried, strict=True)))
    x, y = data

    def outputs(flat: Tensor) -> Tensor:
        parts = flat.split([p.numel() for p in model.parameters()])
        values = [part.reshape(p.shape) for part, p in zip(parts, model.parameters(), strict=True)]
        return torch.tanh(x @ values[0].T + values[1]) @ values[2].T + values[3]

    jacobian = torch.autograd.functional.jacobian(outputs, base)
    p = outputs(base).softmax(1)
    curvature = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    gauss_newton = torch.einsum("nci,ncd,ndj->ij", jacobian, curvature, jacobian) / 20
    own = torch.einsum("nci,nc->ni", jacobian, p - nn.functional.one_hot(y, 2))[[3, 11]] / 20
    expected = torch.linalg.solve(gauss_newton + (damping + 0.01) * torch.eye(len(base)).double(), own.T).T
    torch.testing.assert_close(found.responses["influence"], expected, rtol=1e-9, atol=1e-12)
    assert list(found.responses) == ["cold", "warm", "proximal", "proximal_bregman", "linearised", "influence"]
    text = str(found)
    assert all(word in text for word in ("warm-start gap", "solver error", "%", "2 points left out"))
    axes = found.plot().axes[0]
    assert len(axes.patches) == 10
    heights = [sum(bar.get_height() for bar in axes.patches if round(bar.get_x() + 0.35) == k) for k in (0, 1)]
    totals = torch.stack([each.per_example for each in found.gaps.values()]).sum(0)
    assert heights == pytest.approx(totals.tolist())


def test_it_takes_other_kinds_of_data() -> None:
    model, (x, y), history = task()
    singles, batches = [(x[i], int(y[i])) for i in range(20)], [(x[:7], y[:7]), (x[7:], y[7:])]
    expected, *found = (
        explain_gap(model, LOSS, data, [3], run=history).responses for data in ((x, y), singles, batches)
    )
    for responses in found:
        for name, response in responses.items():
            torch.testing.assert_close(response, expected[name])


def test_another_model_and_other_data_than_the_runs_are_refused() -> None:
    model, (x, y), history = task()
    backwards, scaled = (x.flip(0), y.flip(0)), (1.01 * x, y)
    for data in (backwards, scaled, (x[:10], y[:10])):
        refuses(r"not the data of the run .*the run had 20", explain_gap, model, LOSS, data, [0], run=history)
        refuses("not the data of the run", influence, model, LOSS, data, data, run=history)
        refuses("not the data of the run", prepare_influence, model, LOSS, data, run=history.run)
    halved = (x.float(), y)
    assert influence(copy.deepcopy(model).float(), LOSS, halved, halved, run=history).scores.shape == (20, 20)
    assert influence(model, LOSS, backwards, backwards, run=RunLength.of(history)).scores.shape == (20, 20)
    other = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double().eval()
    refuses("the run trained 26 parameters, the model has 32", influence, other, LOSS, (x, y), (x, y), run=history)
    with torch.no_grad():
        model[0].weight += 0.5
    refuses("the replayed run ends elsewhere than the model", explain_gap, model, LOSS, (x, y), [0], run=history)


def test_data_that_is_drawn_anew_is_told_by_what_stays() -> None:
    x, y, noise = torch.randn(6, 2), torch.arange(6), torch.Generator()
    drawn = lambda index: (x[index] + torch.randn(1, 2, generator=noise), y[index])  # noqa: E731 - augmentation
    probe = DataProbe.of(drawn, 6)
    probe.check(drawn, 6, (torch.float32,))
    with pytest.raises(ValueError, match="6 of 6 examples that were read differ"):
        probe.check(lambda index: (x[index], y[5 - index] + 10), 6, (torch.float32,))


def test_what_is_refused() -> None:
    model, data, history = task(optimizer="adam", lr=0.01)
    refuses("only a run of SGD has a length", explain_gap, model, LOSS, data, [0], run=history)
    refuses("not the data of the run", explain_gap, model, LOSS, [(data[0][0], 0)], [0], run=history, damping=0.1)
    with pytest.raises(ValueError, match="points must be indices of training examples from 0 to 19"):
        explain_gap(model, LOSS, data, [20], run=history, damping=0.1)
    model, data, history = task(record=False)
    refuses("record=True", explain_gap, model, LOSS, data, [0], run=history)
    nesterov = lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)  # noqa: E731
    model, data, history = task(optimizer=nesterov)
    refuses("SGD \\(without nesterov\\)", explain_gap, model, LOSS, data, [0], run=history)
