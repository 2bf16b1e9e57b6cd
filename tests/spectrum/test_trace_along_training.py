from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from curvlab.curvature import HessianOperator
from curvlab.spectrum.trace_along_training import TraceAlongTraining


def network() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.6, generator=generator)
    inputs = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    return model, (inputs, torch.randint(3, (40,), generator=generator))


def dense_trace(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    parameters = list(model.parameters())
    loss = nn.functional.cross_entropy(model(data[0]), data[1])
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, create_graph=True)])
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(entry, parameters, retain_graph=True)])[i]
        for i, entry in enumerate(gradient)
    ]
    return float(torch.stack(rows).sum())


def move(model: nn.Module, amount: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + amount)


def tracker(model: nn.Module, data: tuple[Tensor, Tensor], **settings: float) -> TraceAlongTraining:
    operator = HessianOperator(model, nn.CrossEntropyLoss(), data)
    defaults = {"rtol": 0.03, "max_matvecs": 4000, "chunk_size": 20, "generator": torch.Generator().manual_seed(1)}
    return TraceAlongTraining(operator, **(defaults | settings))


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
def test_each_checkpoint_agrees_with_the_dense_hessian(distribution: str) -> None:
    model, data = network()
    along = tracker(model, data, distribution=distribution)
    for amount in (0.0, 0.3):
        move(model, amount)
        estimate = along.measure()
        assert estimate.stderr <= 0.03 * estimate.value
        assert abs(estimate.value - dense_trace(model, data)) < 4 * estimate.stderr
    assert [e.num_matvecs for e in along.estimates] == [len(forms) for forms in along.state_dict()["forms"]]


def test_changes_are_known_better_than_values() -> None:
    model, data = network()
    along = tracker(model, data)
    along.measure()
    before = dense_trace(model, data)
    move(model, 0.01)
    second = along.measure()
    change = along.change(0, 1)
    exact = dense_trace(model, data) - before
    assert abs(change.value - exact) < 4 * change.stderr
    assert change.stderr < 0.1 * second.stderr
    assert change.num_matvecs == 0


def test_the_same_probes_at_every_checkpoint_and_only_as_many_as_needed() -> None:
    model, data = network()
    along = tracker(model, data)
    first, second = along.measure(), along.measure()
    assert first == second
    coarse = tracker(model, data, rtol=0.3)
    forms = coarse.measure().num_matvecs
    assert forms < first.num_matvecs
    assert torch.equal(coarse.state_dict()["forms"][0], along.state_dict()["forms"][0][:forms])


def test_it_stops_at_the_limit_with_the_error_it_has() -> None:
    model, data = network()
    estimate = tracker(model, data, rtol=1e-6, max_matvecs=50).measure()
    assert estimate.num_matvecs == 40
    assert estimate.stderr > 1e-6 * estimate.value
    assert math.isfinite(estimate.stderr)


def test_an_interrupted_run_goes_on_with_its_probes() -> None:
    model, data = network()
    along = tracker(model, data)
    along.measure()
    other = tracker(model, data, generator=torch.Generator().manual_seed(9))
    other.load_state_dict(along.state_dict())
    move(model, 0.2)
    assert other.measure() == along.measure()
    assert other.change(0, 1) == along.change(0, 1)
    assert len(other) == 2


@pytest.mark.parametrize(
    ("settings", "match"),
    [({"rtol": 0.0}, "rtol"), ({"chunk_size": 1}, "two probes"), ({"max_matvecs": 5}, "max_")],
)
def test_bad_settings(settings: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        tracker(*network(), **settings)
