"""What Ginger and QNG promise in use: loss scaling, accumulation, weight decay, a learning rate as SGD's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from conformance import Regression
from dense_curvature import colored_vectors, parameters, update
from torch import nn

from curvlab.optim import QNG, Ginger, sampled_label_loss
from curvlab.optim.low_rank import LowRankOptimizer

Build = Callable[..., LowRankOptimizer]


def ginger(parameters: Iterable[nn.Parameter], **settings: Any) -> LowRankOptimizer:
    return Ginger(parameters, **({"lr": 0.02, "rank": 3, "decay": 0.9, "damping": 0.1} | settings))


def qng(parameters: Iterable[nn.Parameter], **settings: Any) -> LowRankOptimizer:
    return QNG(parameters, **({"lr": 0.1, "rank": 3, "decay": 0.9} | settings))


each = pytest.mark.parametrize("build", [ginger, qng])


def see(problem: Regression, optimizer: LowRankOptimizer) -> None:
    problem.set_sampled_gradients()
    optimizer.update_curvature()


def scaled_steps(problem: Regression, optimizer: LowRankOptimizer, scaler: torch.amp.GradScaler) -> None:
    for _ in range(5):
        problem.model.zero_grad()
        outputs = problem.model(problem.inputs)
        sampled = sampled_label_loss(problem.loss, outputs, problem.targets, generator=problem.generator)
        scaler.scale(sampled).backward()
        optimizer.update_curvature(scale=scaler)
        problem.model.zero_grad()
        scaler.scale(problem.value()).backward()
        scaler.step(optimizer)
        scaler.update()


@each
def test_a_scaled_loss_takes_the_same_steps(build: Build) -> None:
    ends = []
    for enabled in (False, True):
        problem = Regression()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
        scaled_steps(problem, build(problem.parameters), scaler)
        ends.append(problem.vector())
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)


@each
def test_gradients_that_a_scaler_leaves_scaled_are_refused(build: Build) -> None:
    # GradScaler unscales once a step: after unscale_ for the curvature, steps were 1,024 times too long.
    problem = Regression()
    optimizer, scaler = build(problem.parameters), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(problem.value()).backward()
    scaler.unscale_(optimizer)
    optimizer.update_curvature()
    problem.model.zero_grad()
    scaler.scale(problem.value()).backward()
    before = problem.vector()
    with pytest.raises(RuntimeError, match=r"may still be scaled. Leave unscale_ out and call update_curv"):
        scaler.step(optimizer)
    assert torch.equal(problem.vector(), before)


@each
def test_unscaled_for_clipping_and_overflow(build: Build) -> None:
    plain, clipped = Regression(), Regression()
    optimizer, clipping = build(plain.parameters), build(clipped.parameters)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    see(plain, optimizer)
    clipped.set_sampled_gradients()
    clipping.update_curvature(scale=1)
    plain.set_gradients()
    optimizer.step()
    clipped.model.zero_grad()
    scaler.scale(clipped.value()).backward()
    scaler.unscale_(clipping)  # to clip the gradient of the loss
    scaler.step(clipping)
    scaler.update()
    torch.testing.assert_close(plain.vector(), clipped.vector(), rtol=1e-12, atol=1e-12)
    clipped.set_gradients()
    clipped.parameters[0].grad.fill_(torch.inf)
    scaler.step(clipping)  # no step: the scale was too large
    torch.testing.assert_close(plain.vector(), clipped.vector(), rtol=1e-12, atol=1e-12)


@each
def test_the_mean_of_micro_batches_is_as_long_as_one_gradient(build: Build) -> None:
    problem = Regression()
    whole, mean = build(problem.parameters), build(problem.parameters)
    direction = torch.linspace(-1, 2, 15, dtype=torch.float64)
    for _ in range(4):
        see(problem, whole)
        for parameter in problem.parameters:  # as long as a mean of four independent gradients
            parameter.grad /= 2
        mean.update_curvature(num_batches=4)
    torch.testing.assert_close(whole.inverse_product(direction), mean.inverse_product(direction))
    with pytest.raises(ValueError, match="num_batches must be at least 1, got 0"):
        mean.update_curvature(num_batches=0)


@each
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"clip": 1e-3}, {"maximize": True}])
def test_weight_decay_is_decoupled(build: Build, settings: dict[str, Any]) -> None:
    problem, decayed = Regression(), Regression()
    optimizer, decaying = build(problem.parameters, **settings), build(decayed.parameters, **settings)
    decaying.param_groups[0]["weight_decay"] = 0.5
    for case, stepper in ((problem, optimizer), (decayed, decaying)):
        see(case, stepper)
        case.set_gradients()
    start, lr = problem.vector(), optimizer.param_groups[0]["lr"]
    optimizer.step()
    decaying.step()
    torch.testing.assert_close(decayed.vector(), problem.vector() - lr * 0.5 * start, rtol=1e-12, atol=1e-12)


@each
@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_normalized_steps_are_sgds_outside_the_rows(build: Build, scope: str) -> None:
    problem = Regression()
    optimizer = build(problem.parameters, lr=0.25, rank=2, normalize=True, scope=scope)
    usual = build(problem.parameters, lr=0.25, rank=2, scope=scope)
    for _ in range(3):
        problem.set_sampled_gradients()
        optimizer.update_curvature()
        usual.update_curvature()
    rows = torch.cat([optimizer.state[parameter]["rows"] for parameter in problem.parameters], 1)
    if scope == "tensor":
        rows = torch.block_diag(*[optimizer.state[parameter]["rows"] for parameter in problem.parameters])
    problem.set_gradients()
    gradient = torch.cat([parameter.grad.reshape(-1) for parameter in problem.parameters])
    start = problem.vector()
    optimizer.step()
    short = problem.vector() - start
    outside = torch.eye(15, dtype=torch.float64) - torch.linalg.pinv(rows) @ rows
    torch.testing.assert_close(outside @ short, -0.25 * outside @ gradient, rtol=1e-9, atol=1e-12)
    start = problem.vector()
    usual.step()
    torch.testing.assert_close(problem.vector() - start, short / (0.1 if build is ginger else 0.9**2))


@each
def test_a_first_step_without_curvature_warns_once(build: Build) -> None:
    problem = Regression()
    optimizer = build(problem.parameters)
    problem.set_gradients()
    with pytest.warns(RuntimeWarning, match=r"steps before any update_curvature\(\).* lr times the gradient"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        seen = build(problem.parameters)
        see(problem, seen)
        seen.step()


@each
def test_half_precision_parameters_have_a_state_in_single(build: Build) -> None:
    members, exact = parameters(torch.bfloat16), parameters(torch.float32)
    settings = {"lr": 1e-2, "momentum": 0.5}
    optimizer, reference = build(members, **settings), build(exact, **settings)
    for d in colored_vectors(6):
        for stepper, own in ((optimizer, members), (reference, exact)):
            update(stepper, own, torch.tensor(d).bfloat16())
            stepper.step()
    loaded = build(members, **settings)
    loaded.load_state_dict(optimizer.state_dict())
    for parameter, other in zip(members, exact, strict=True):
        for name in ("rows", "momentum"):
            for found in (optimizer.state[parameter][name], loaded.state[parameter][name]):
                assert torch.equal(found, reference.state[other][name])
        torch.testing.assert_close(parameter.float(), other, rtol=2e-2, atol=2e-2)
    core = loaded.state[members[0]]["core" if build is ginger else "gram"]
    assert core.dtype == torch.float64
