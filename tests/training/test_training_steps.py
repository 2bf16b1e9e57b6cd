"""Steps that are exchanged: clipping, sampled labels for Ginger and QNG, closures, L-BFGS to a gradient norm."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from curvlab.training import (
    Learner,
    MeanLoss,
    StepInfo,
    TrainingBatch,
    closure_step,
    curvature_step,
    gradient_step,
    minimize,
    sampled_label_loss,
    shared_curvature_step,
    train,
)

FP64 = torch.float64


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(FP64)


def classes(size: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(size, 3, generator=generator, dtype=FP64)
    return inputs, (inputs[:, 0] + 0.5 * torch.randn(size, generator=generator, dtype=FP64) > 0).long()


def fit(model: nn.Module, **settings: Any):
    defaults = {"num_epochs": 3, "batch_size": 8, "generator": torch.Generator().manual_seed(0)}
    return train(model, nn.CrossEntropyLoss(), classes(), **(defaults | settings))


def test_gradients_are_clipped_to_the_norm() -> None:
    model = network()
    history = fit(
        model, lr=0.5, momentum=0.0, max_gradient_norm=1e-3, num_epochs=2, batch_size=24, measure_updates=True
    )
    assert history.update_norms == pytest.approx([0.5e-3] * 2, rel=1e-5)
    assert history.gradient_norm > 1e-2  # before clipping


def test_training_stops_at_the_gradient_norm() -> None:
    history = fit(network(), lr=1.0, momentum=0.0, batch_size=24, num_epochs=2000, gradient_norm=0.05)
    assert history.gradient_norm <= 0.05
    assert 1 < history.num_steps < 2000


@pytest.mark.parametrize("weight_decay", [0.01, 0.1])
def test_lbfgs_reaches_the_minimum_of_the_regularised_loss(weight_decay: float) -> None:
    model = network()
    settings = {"optimizer": "lbfgs", "lr": 1.0, "weight_decay": weight_decay, "batch_size": 24}
    history = fit(model, **settings, num_epochs=100, gradient_norm=1e-9)
    assert history.gradient_norm <= 1e-9
    assert history.num_steps < 100
    inputs, targets = classes()
    nn.CrossEntropyLoss()(model(inputs), targets).backward()
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.grad, -weight_decay * parameter.detach(), rtol=0, atol=1e-9)
    assert history.weight_decay == weight_decay
    again = fit(model, **settings, num_epochs=5, gradient_norm=1e-9)
    assert again.num_steps == 0
    assert math.isnan(again.final_lr)
    assert again.losses == ()


def test_lbfgs_needs_full_batches() -> None:
    with pytest.raises(ValueError, match="lbfgs needs full batches: batch_size is 8, there are 24"):
        fit(network(), optimizer="lbfgs", lr=1.0)


def test_a_closure_step_of_sgd_is_a_gradient_step() -> None:
    ends = []
    for step in (gradient_step, closure_step):
        model = network()
        history = fit(model, lr=0.1, step=step)
        ends.append((parameters_to_vector(model.parameters()), history.step_losses))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


class Recorder(torch.optim.SGD):
    """SGD that keeps what `update_curvature` sees."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.seen: list[Tensor] = []

    def update_curvature(self) -> None:
        self.seen.append(torch.cat([p.grad.flatten() for group in self.param_groups for p in group["params"]]))


def test_curvature_sees_the_gradient_of_sampled_labels_in_eval_mode() -> None:
    """Its second moment is the Fisher matrix: see test_sampled_labels."""
    model = nn.Sequential(nn.Dropout(0.9), network()).train()
    optimizer = Recorder(model.parameters(), lr=0.0)
    inputs, targets = classes()
    torch.manual_seed(0)
    curvature_step(Learner(model, MeanLoss(nn.CrossEntropyLoss()), optimizer), TrainingBatch(inputs, targets))
    torch.manual_seed(0)
    value = sampled_label_loss(nn.CrossEntropyLoss(), model[1](inputs), targets, generator=torch.default_generator)
    expected = torch.autograd.grad(value, list(model.parameters()))
    torch.testing.assert_close(optimizer.seen[0], torch.cat([gradient.flatten() for gradient in expected]))
    assert model.training


def test_a_curvature_step_moves_by_the_gradient_of_the_loss_on_the_same_batches() -> None:
    plain, seen = network(), network()
    fit(plain, lr=0.1, momentum=0.0)
    fit(seen, optimizer=Recorder, lr=0.1, step=curvature_step)
    assert torch.equal(parameters_to_vector(plain.parameters()), parameters_to_vector(seen.parameters()))


def test_a_shared_forward_pass_gives_the_same_step_and_sees_the_same_gradient() -> None:
    ends, seen = [], []
    for step in (curvature_step, shared_curvature_step):
        model = network()
        optimizer = Recorder(model.parameters(), lr=0.1)
        fit(model, optimizer=optimizer, step=step)
        ends.append(parameters_to_vector(model.parameters()))
        seen.append(torch.stack(optimizer.seen))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-12, atol=0)
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("step", [curvature_step, shared_curvature_step])
def test_curvature_sees_nothing_of_outputs_that_are_not_finite(step: Any) -> None:
    model = network()
    with torch.no_grad():
        next(model.parameters())[0] = math.inf
    optimizer = Recorder(model.parameters(), lr=0.1)
    before = parameters_to_vector(model.parameters())
    info = step(Learner(model, MeanLoss(nn.CrossEntropyLoss()), optimizer), TrainingBatch(*classes()))
    assert math.isnan(info.loss)
    assert optimizer.seen == []
    assert torch.equal(before, parameters_to_vector(model.parameters()))


def test_a_curvature_step_says_what_it_needs() -> None:
    with pytest.raises(TypeError, match=r"needs an optimizer with update_curvature\(\)"):
        fit(network(), lr=0.1, step=curvature_step)
    learner = Learner(network(), MeanLoss(nn.functional.cross_entropy), Recorder(network().parameters(), 0.1))
    with pytest.raises(TypeError, match=r"pass it as an nn.Module"):
        curvature_step(learner, TrainingBatch(*classes()))


def test_a_step_of_ones_own_is_a_function() -> None:
    def signs(learner: Learner, batch: TrainingBatch) -> StepInfo:
        loss = learner.batch_loss(batch)
        gradients = torch.autograd.grad(loss, learner.parameters)
        with torch.no_grad():
            for parameter, gradient in zip(learner.parameters, gradients, strict=True):
                parameter.sub_(0.01 * gradient.sign())
        return StepInfo(loss.item())

    history = fit(network(), lr=0.01, step=signs, num_epochs=20)
    assert history.losses[-1] < history.losses[0]


def test_minimize_stops_at_the_gradient_norm() -> None:
    point = nn.Parameter(torch.tensor([2.0, -1.0], dtype=FP64))
    optimizer = torch.optim.LBFGS([point], max_iter=3, line_search_fn="strong_wolfe", tolerance_change=0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = (point**2 * torch.tensor([1.0, 10.0], dtype=FP64)).sum() + 3.0
        value.backward()
        return value

    search = partial(minimize, closure, [point], optimizer, gradient_norm=1e-8)
    short = search(max_steps=1)
    assert not short.converged
    assert short.num_steps == 1
    found = search(max_steps=50)
    assert found.converged
    assert found.gradient_norm <= 1e-8
    assert found.value == pytest.approx(3.0)
    assert search(max_steps=50).num_steps == 0
