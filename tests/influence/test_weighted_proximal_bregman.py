"""The proximal Bregman objective where the training loss weighs its examples, from its definition and in full."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from curvlab.influence import (
    ProximalBregmanObjective,
    ProximalNewton,
    influence_scores,
    proximal_bregman_response,
)
from curvlab.solvers import Direct

DAMPING, EPSILON, SIZE = 0.1, 0.01, 12
WEIGHTS = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0, 0.1, 1.0, 1.5, 0.7, 0.0, 4.0, 1.0], dtype=torch.float64)


@pytest.fixture
def classifier(generator: torch.Generator) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    x = torch.randn(SIZE, 4, generator=generator, dtype=torch.float64)
    return model, (x, torch.randint(3, (SIZE,), generator=generator))


def by_definition(model: nn.Module, train: tuple[Tensor, Tensor], k: int, step: Tensor) -> tuple[Tensor, Tensor]:
    """Q_z and its gradient at θ* + step, with logsumexp and autograd."""
    moved = copy.deepcopy(model)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) + step, moved.parameters())
    h, reference = moved(train[0]), model(train[0]).detach()
    divergence = h.logsumexp(1) - reference.logsumexp(1) - (reference.softmax(1) * (h - reference)).sum(1)
    own = h[k].logsumexp(0) - h[k, train[1][k]]
    value = (WEIGHTS * divergence).sum() / SIZE + EPSILON * own
    gradients = torch.autograd.grad(value, list(moved.parameters()))
    slope = torch.cat([g.flatten() for g in gradients]) + DAMPING * step
    return value.detach() + DAMPING / 2 * step.square().sum(), slope


def test_value_and_gradient_follow_the_definition(classifier, generator) -> None:
    model, train = classifier
    objective = ProximalBregmanObjective(
        model,
        nn.CrossEntropyLoss(),
        train,
        (train[0][:2], train[1][:2]),
        damping=DAMPING,
        epsilon=EPSILON,
        batch_size=5,
        weights=WEIGHTS,
    )
    displacement = torch.randn(*objective.shape, generator=generator, dtype=torch.float64)
    value, gradient = objective.value(displacement), objective.gradient(displacement)
    for k in range(2):
        expected, slope = by_definition(model, train, k, EPSILON * displacement[:, k])
        torch.testing.assert_close(value[k], expected)
        torch.testing.assert_close(gradient[:, k], slope / EPSILON)
    # Drawn by whatever probabilities, batches are unbiased for it.
    for draws in (None, torch.arange(1.0, SIZE + 1)):
        count = 200_000
        found = objective.sampled_gradient(displacement, batch_size=count, weights=draws, generator=generator)
        torch.testing.assert_close(found, gradient, rtol=2e-2, atol=1e-2 * float(gradient.abs().max()))


def test_newton_finds_the_minimum_and_a_small_epsilon_the_influence(classifier) -> None:
    model, train = classifier
    points = (train[0][:3], train[1][:3])
    newton = ProximalNewton(rtol=1e-7)
    settings = {"damping": DAMPING, "weights": WEIGHTS}
    far = proximal_bregman_response(
        model, nn.CrossEntropyLoss(), train, points, epsilon=EPSILON, optimizer=newton, **settings
    )
    for k in range(3):
        assert float(by_definition(model, train, k, EPSILON * far[:, k])[1].abs().max()) < 1e-8
    near = proximal_bregman_response(
        model, nn.CrossEntropyLoss(), train, points, epsilon=1e-5, optimizer=newton, **settings
    )
    losses = model(train[0]).logsumexp(1) - model(train[0])[torch.arange(SIZE), train[1]]
    gradients = [
        torch.cat([g.flatten() for g in torch.autograd.grad(own, list(model.parameters()), retain_graph=True)])
        for own in losses
    ]
    scores = influence_scores(
        model, nn.CrossEntropyLoss(), train, train, points=range(3), solver=Direct(), **settings
    )
    torch.testing.assert_close(torch.stack(gradients) @ near, scores, rtol=1e-3, atol=1e-4)


def test_whole_weights_are_repeated_examples(classifier) -> None:
    model, train = classifier
    points, newton = (train[0][:3], train[1][:3]), ProximalNewton(rtol=1e-8)
    weights = torch.tensor([1, 2, 0, 1, 3, 1, 1, 2, 1, 0, 4, 1])
    repeated = tuple(part.repeat_interleave(weights, dim=0) for part in train)
    # Means over N and over sum_n w_n: what is not in them, ε and damping, is scaled by N / sum_n w_n.
    scale = SIZE / int(weights.sum())
    found = proximal_bregman_response(
        model,
        nn.CrossEntropyLoss(),
        train,
        points,
        damping=DAMPING,
        epsilon=EPSILON,
        optimizer=newton,
        weights=weights.double(),
    )
    expected = proximal_bregman_response(
        model,
        nn.CrossEntropyLoss(),
        repeated,
        points,
        damping=scale * DAMPING,
        epsilon=scale * EPSILON,
        optimizer=newton,
    )
    torch.testing.assert_close(found, scale * expected, rtol=1e-6, atol=1e-8)


def test_bad_weights_are_refused(classifier) -> None:
    model, train = classifier
    for weights, text in ((torch.ones(11), "one weight for each of 12 examples"), (-WEIGHTS, "not negative")):
        with pytest.raises(ValueError, match=text):
            ProximalBregmanObjective(
                model, nn.CrossEntropyLoss(), train, train, damping=DAMPING, epsilon=0.1, weights=weights
            )
