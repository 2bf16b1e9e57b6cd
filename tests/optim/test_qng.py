"""QNG, and low-rank matrices as QNG and Ginger keep them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from curvlab.optim import QNG, Ginger, sampled_label_loss
from curvlab.optim.low_rank import LowRankOptimizer
from tests.optim.conformance import Regression
from tests.optim.dense_curvature import (
    SIZE,
    colored_vectors,
    inverse,
    moving_average,
    parameters,
    quasi_natural_inverse,
    update,
)
from tests.refusals import refuses


def updated(vectors: np.ndarray, **settings: float) -> QNG:
    members = parameters()
    optimizer = QNG(members, 1.0, **settings)
    for d in vectors:
        update(optimizer, members, d)
    return optimizer


@pytest.mark.parametrize("count", [1, 3, 8])
def test_up_to_its_rank_it_is_the_moving_average_from_the_identity(count: int) -> None:
    vectors = colored_vectors(count)
    found = inverse(updated(vectors, rank=8, decay=0.9))
    expected = np.linalg.inv(moving_average(vectors, 0.9, start=1.0))
    assert np.linalg.norm(found - expected) <= 1e-10 * np.linalg.norm(expected)


@pytest.mark.parametrize("rank", [1, 4])
def test_beyond_its_rank_it_is_the_product_of_the_newest_factors(rank: int) -> None:
    vectors = colored_vectors(11)
    expected, factors = quasi_natural_inverse(vectors, decay=0.8, rank=rank)
    np.testing.assert_allclose(inverse(updated(vectors, rank=rank, decay=0.8)), expected, rtol=1e-8, atol=1e-10)
    A = np.linalg.multi_dot(factors) if rank > 1 else factors[0]
    np.testing.assert_allclose(np.linalg.inv(A @ A.T), expected, rtol=1e-8, atol=1e-10)


def test_the_printed_beta_is_not_the_root_that_is_needed() -> None:
    decay, q = 0.9, colored_vectors(1)[0]
    squared = q @ q
    needed = decay * np.eye(SIZE) + (1 - decay) * np.outer(q, q)
    for beta, fits in {
        (np.sqrt(decay + (1 - decay) * squared) - np.sqrt(decay)) / squared: True,
        (np.sqrt(decay) + (1 - decay) * squared - np.sqrt(decay)) / squared: False,  # as printed: 1 - decay
    }.items():
        K = np.sqrt(decay) * np.eye(SIZE) + beta * np.outer(q, q)
        assert np.allclose(K @ K.T, needed) is fits


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_its_matrix_is_a_multiple_of_the_identity_and_its_rank_not_twice_it(rank: int) -> None:
    G = np.linalg.inv(inverse(updated(colored_vectors(15), rank=rank, decay=0.9)))
    values = np.linalg.svd(G - 0.9**rank * np.eye(SIZE), compute_uv=False)
    assert values[rank - 1] > 1e-3
    assert values[rank] < 1e-10 * values[0]  # Observation 1 allows as much again
    decayed = np.linalg.inv(inverse(updated(np.zeros((3, SIZE)), rank=5, decay=0.9)))  # by gradients of zero
    np.testing.assert_allclose(decayed, 0.9**3 * np.eye(SIZE), rtol=1e-12)


@pytest.mark.parametrize(("rank", "differs"), [(1, False), (2, True), (5, True)])
def test_as_coded_it_follows_the_authors_recursion_which_is_not_the_product(rank: int, differs: bool) -> None:
    vectors = colored_vectors(9) + 1.0  # with a common direction: the code takes it out once for each factor
    coded, _ = quasi_natural_inverse(vectors, decay=0.9, rank=rank, as_coded=True)
    found = inverse(updated(vectors, rank=rank, decay=0.9, as_coded=True))
    np.testing.assert_allclose(found, coded, rtol=1e-8, atol=1e-10)
    product, _ = quasi_natural_inverse(vectors, decay=0.9, rank=rank)
    G, G_as_coded = np.linalg.inv(product), np.linalg.inv(coded)
    assert bool(np.linalg.norm(G_as_coded - G) > 0.05 * np.linalg.norm(G)) is differs


def test_momentum_is_a_sum() -> None:
    members, vectors = parameters(), colored_vectors(4)
    optimizer = QNG(members, 0.5, rank=2, decay=0.9, momentum=0.8)
    total, expected = np.zeros(SIZE), np.zeros(SIZE)
    for g in vectors:
        update(optimizer, members, g)
        total = 0.8 * total + g
        expected -= 0.5 * inverse(optimizer) @ total
        optimizer.step()
    found = torch.cat([parameter.detach().reshape(-1) for parameter in members])
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-10)


# --- What Ginger and QNG promise in use: loss scaling, accumulation, weight decay, a learning rate as SGD's
Build = Callable[..., LowRankOptimizer]


def ginger(parameters: Iterable[nn.Parameter], **settings: Any) -> LowRankOptimizer:
    return Ginger(parameters, **({"lr": 0.02, "rank": 3, "decay": 0.9, "damping": 0.1} | settings))


def qng(parameters: Iterable[nn.Parameter], **settings: Any) -> LowRankOptimizer:
    return QNG(parameters, **({"lr": 0.1, "rank": 3, "decay": 0.9} | settings))


each = pytest.mark.parametrize("build", [ginger, qng])


@each
def test_scopes_are_optimizers_of_their_own(build: Build) -> None:
    vectors = colored_vectors(9)
    for scope, sizes in {"global": [20], "group": [13, 7], "tensor": [12, 1, 7]}.items():
        members = parameters()
        optimizer = build([{"params": members[:2]}, {"params": members[2:]}], rank=9, scope=scope)
        for d in vectors:
            update(optimizer, members, d)
        expected = np.zeros((SIZE, SIZE))
        for end, size in zip(np.cumsum(sizes), sizes, strict=True):
            own = slice(end - size, end)
            expected[own, own] = quasi_natural_inverse(vectors[:, own], decay=0.9, rank=9)[0]
            if build is ginger:
                expected[own, own] = np.linalg.inv(0.1 * np.eye(size) + moving_average(vectors[:, own], 0.9))
        np.testing.assert_allclose(inverse(optimizer), expected, rtol=1e-8, atol=1e-8)


@each
def test_single_precision_stays_close(build: Build) -> None:
    vectors, directions = colored_vectors(120, seed=3), []
    settings = {"damping": 1e-5} if build is ginger else {}  # as published
    for dtype in (torch.float32, torch.float64):
        members = parameters(dtype)
        optimizer = build(members, rank=6, decay=0.95, **settings)
        for d in vectors:
            update(optimizer, members, d)
        directions.append([optimizer.inverse_product(torch.tensor(g)) for g in vectors[-20:]])
    for single, double in zip(*directions, strict=True):
        assert (single - double).norm() <= 1e-3 * double.norm()


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
    text = r"may still be scaled. Leave unscale_ out and call update_curv"
    refuses(text, scaler.step, optimizer, error=RuntimeError)
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
    refuses("num_batches must be at least 1, got 0", mean.update_curvature, num_batches=0)


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
