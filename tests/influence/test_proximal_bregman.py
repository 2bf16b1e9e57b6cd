from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.influence import (
    ProximalBregmanObjective,
    ProximalNewton,
    ProximalSGD,
    influence_scores,
    loss_response,
    proximal_bregman_response,
)
from curvlab.solvers import BlockConjugateGradient, ConjugateGradient

DAMPING = 0.1


@pytest.fixture(params=["mlp", "convolution"])
def classifier(request, generator):
    torch.manual_seed(0)
    if request.param == "mlp":
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    else:
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double()
    x = torch.randn(12, 1, 4, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (12,), generator=generator)
    return model, nn.CrossEntropyLoss(), (x, y)


def autograd_value(model, train, point, step, *, epsilon):
    """Q_z written with logsumexp, straight from the definition, on a moved copy of the model."""
    import copy

    moved = copy.deepcopy(model)
    start = 0
    for parameter in moved.parameters():
        with torch.no_grad():
            parameter.add_(step[start : start + parameter.numel()].view_as(parameter))
        start += parameter.numel()
    h, reference = moved(train[0]), model(train[0]).detach()
    probabilities = reference.softmax(1)
    divergence = h.logsumexp(1) - reference.logsumexp(1) - (probabilities * (h - reference)).sum(1)
    own = moved(point[0][None]).logsumexp(1) - moved(point[0][None])[0, point[1]]
    square = sum(
        ((p - q.detach()) ** 2).sum() for p, q in zip(moved.parameters(), model.parameters(), strict=True)
    )
    value = divergence.mean() + epsilon * own[0] + DAMPING / 2 * square
    gradients = torch.autograd.grad(value, list(moved.parameters()))
    return value.detach(), torch.cat([g.flatten() for g in gradients])


def test_value_and_gradient_follow_the_definition(classifier, generator) -> None:
    model, loss, train = classifier
    epsilon = 0.3
    objective = ProximalBregmanObjective(
        model, loss, train, (train[0][:2], train[1][:2]), damping=DAMPING, epsilon=epsilon, batch_size=7
    )
    displacement = torch.randn(*objective.shape, generator=generator, dtype=torch.float64)
    gradient, value = objective.gradient(displacement), objective.value(displacement)
    for k in range(2):
        point = (train[0][k], int(train[1][k]))
        expected, slope = autograd_value(model, train, point, epsilon * displacement[:, k], epsilon=epsilon)
        torch.testing.assert_close(value[k], expected)
        torch.testing.assert_close(gradient[:, k], slope / epsilon)
    chosen = objective.gradient(displacement[:, 1:], columns=torch.tensor([1]))
    torch.testing.assert_close(chosen, gradient[:, 1:])


def test_each_point_may_have_its_own_epsilon(classifier, generator) -> None:
    model, loss, train = classifier
    epsilon = torch.tensor([0.1, -0.02, 1e-4])
    points = (train[0][:3], train[1][:3])
    together = ProximalBregmanObjective(model, loss, train, points, damping=DAMPING, epsilon=epsilon)
    displacement = torch.randn(*together.shape, generator=generator, dtype=torch.float64)
    gradient, value = together.gradient(displacement), together.value(displacement)
    sampled = together.sampled_gradient(displacement, batch_size=6, generator=torch.Generator().manual_seed(1))
    changes = loss_response(model, loss, train, displacement, epsilon=epsilon)
    for k in range(3):
        own, weight = slice(k, k + 1), float(epsilon[k])
        point = (points[0][own], points[1][own])
        alone = ProximalBregmanObjective(model, loss, train, point, damping=DAMPING, epsilon=weight)
        column = displacement[:, own]
        torch.testing.assert_close(alone.gradient(column), gradient[:, own], rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(
            together.gradient(column, columns=torch.tensor([k])), gradient[:, own], rtol=1e-7, atol=1e-9
        )
        torch.testing.assert_close(alone.value(column), value[own])
        batch = alone.sampled_gradient(column, batch_size=6, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(batch, sampled[:, own], rtol=1e-7, atol=1e-9)
        expected = loss_response(model, loss, train, column, epsilon=weight)
        torch.testing.assert_close(expected, changes[:, own], rtol=1e-6, atol=1e-8)
    response = ProximalNewton(rtol=1e-4, max_steps=100).minimize(together)
    assert response.converged


@pytest.mark.parametrize("by_weights", [False, True])
def test_sampled_gradient_is_unbiased(classifier, generator, by_weights: bool) -> None:
    model, loss, train = classifier
    weights = torch.rand(len(train[1]), generator=generator) + 0.1 if by_weights else None
    objective = ProximalBregmanObjective(
        model, loss, train, (train[0][:1], train[1][:1]), damping=DAMPING, epsilon=0.3
    )
    displacement = torch.randn(*objective.shape, generator=generator, dtype=torch.float64)
    draws = torch.stack(
        [
            objective.sampled_gradient(displacement, batch_size=4, weights=weights, generator=generator)
            for _ in range(300)
        ]
    )
    error = draws.mean(0) - objective.gradient(displacement)
    standard_errors = draws.std(0) / 300**0.5
    assert error.norm() < 2 * standard_errors.norm()  # unbiased: about 1


def test_newton_is_exact_for_finite_epsilon(least_squares) -> None:
    """With squared loss the minimiser is known for any ε: -(G + damping + ε∇²l)⁻¹ ∇l."""
    x, y = least_squares.train
    epsilon = 0.5
    response = proximal_bregman_response(
        least_squares.model,
        least_squares.loss,
        least_squares.train,
        (x[:2], y[:2]),
        damping=DAMPING,
        epsilon=epsilon,
        optimizer=ProximalNewton(rtol=1e-10, max_steps=300),
    )
    for k in range(2):
        own = 2 / 3 * torch.kron(torch.eye(3, dtype=torch.float64), torch.outer(x[k], x[k]))
        matrix = least_squares.gram + DAMPING * torch.eye(15, dtype=torch.float64) + epsilon * own
        expected = -torch.linalg.solve(matrix, least_squares.train_gradients[k])
        torch.testing.assert_close(response[:, k], expected, rtol=1e-8, atol=1e-8)


def test_newton_minimises_and_matches_influence_at_small_epsilon(classifier) -> None:
    model, loss, train = classifier
    points = (train[0][:2], train[1][:2])
    objective = ProximalBregmanObjective(model, loss, train, points, damping=DAMPING, epsilon=1e-6)
    response = ProximalNewton(rtol=1e-7).minimize(objective)
    assert response.converged
    assert response.gradient_norm.max() <= 1e-7
    changes = loss_response(model, loss, train, response.displacement, epsilon=1e-6)
    scores = influence_scores(
        model, loss, train, train, points=range(2), damping=DAMPING, solver=ConjugateGradient(rtol=1e-9)
    )
    assert (changes - scores).norm() / scores.norm() < 1e-4
    # and it is a minimum of the objective itself where values can be told apart from rounding
    large = ProximalBregmanObjective(model, loss, train, points, damping=DAMPING, epsilon=0.02)
    minimum = ProximalNewton(rtol=1e-7, max_steps=200).minimize(large)
    assert minimum.converged
    assert (large.value(minimum.displacement) < large.value(0.99 * minimum.displacement)).all()
    assert (large.value(minimum.displacement) < large.value(1.01 * minimum.displacement)).all()


def test_sgd_in_the_limit_of_small_steps_reaches_the_exact_response(classifier, generator) -> None:
    model, loss, train = classifier
    points = (train[0][:2], train[1][:2])
    objective = ProximalBregmanObjective(model, loss, train, points, damping=DAMPING, epsilon=1e-8)
    exact = ProximalNewton(rtol=1e-6).minimize(objective).displacement
    sgd = ProximalSGD(step_size=0.1, batch_size=12, num_steps=400).minimize(objective, generator=generator)
    assert (sgd.displacement - exact).norm() / exact.norm() < 0.1
    assert sgd.num_gradients == 400 * 2


def test_same_generator_same_response(classifier) -> None:
    model, loss, train = classifier
    runs = [
        proximal_bregman_response(
            model,
            loss,
            train,
            (train[0][:2], train[1][:2]),
            damping=DAMPING,
            epsilon=1e-8,
            optimizer=ProximalSGD(step_size=0.1, batch_size=3, num_steps=5),
            generator=torch.Generator().manual_seed(3),
        )
        for _ in range(2)
    ]
    assert torch.equal(*runs)


def test_interrupted_sgd_goes_on_to_the_same_response(classifier, tmp_path: Path) -> None:
    model, loss, train = classifier
    objective = ProximalBregmanObjective(
        model, loss, train, (train[0][:2], train[1][:2]), damping=DAMPING, epsilon=1e-8
    )
    settings = {"step_size": 0.1, "batch_size": 3, "num_steps": 9}

    def minimize(step_seen: Callable[[int], None], **changes: object) -> Tensor:
        place = {"checkpoint": tmp_path / "pbrf.pt", "checkpoint_every": 4}
        optimizer = ProximalSGD(**(settings | place | changes), callback=step_seen)
        return optimizer.minimize(objective, generator=torch.Generator().manual_seed(3)).displacement

    def interrupt(step: int) -> None:
        if step == 6:
            raise KeyboardInterrupt

    whole = ProximalSGD(**settings).minimize(objective, generator=torch.Generator().manual_seed(3)).displacement
    with pytest.raises(KeyboardInterrupt):
        minimize(interrupt)
    steps: list[int] = []
    assert torch.equal(minimize(steps.append), whole)
    assert steps == [5, 6, 7, 8, 9]
    for changes in ({"step_size": 0.2}, {"num_steps": 10}):
        with pytest.raises(ValueError, match=rf"belongs to other work \({next(iter(changes))} differ\)"):
            minimize(steps.append, **changes)


@pytest.mark.parametrize("dies_at", [3, 60])  # within the first inner solve, and after some steps
def test_killed_newton_goes_on_to_the_same_response(
    classifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    model, loss, train = classifier
    monkeypatch.setattr("curvlab.checkpoint.Checkpoint.due", lambda self, step: True)
    monkeypatch.setattr("curvlab.iterate.SaveFile.due", lambda self, step: True)
    products, product = [0, 0], GaussNewtonOperator.matmat

    def counted(operator: GaussNewtonOperator, vectors: Tensor) -> Tensor:
        products[0] += 1
        if products[0] == products[1]:
            raise KeyboardInterrupt
        return product(operator, vectors)

    monkeypatch.setattr(GaussNewtonOperator, "matmat", counted)
    points = (train[0][:2], train[1][:2])
    objective = ProximalBregmanObjective(model, loss, train, points, damping=DAMPING, epsilon=1e-3)
    solver = BlockConjugateGradient(rtol=0.3, max_steps=500)  # loose: many steps
    settings = {"rtol": 1e-9, "solver": solver, "curvature_dtype": torch.float64, "max_steps": 60}
    whole = ProximalNewton(**settings).minimize(objective)
    in_all = products[0]
    dies_at = min(dies_at, in_all - 2)
    kept = ProximalNewton(**settings, checkpoint=tmp_path / "newton")
    products[:] = [0, dies_at]
    with pytest.raises(KeyboardInterrupt):
        kept.minimize(objective)
    products[:] = [0, 0]
    again = kept.minimize(objective)
    assert torch.equal(again.displacement, whole.displacement)
    assert torch.equal(again.gradient_norm, whole.gradient_norm)
    assert (again.num_gradients, again.num_matvecs) == (whole.num_gradients, whole.num_matvecs)
    # The product under way, the one for a solve's residual, and those that tell that a file is the same solve's.
    assert products[0] <= in_all - dies_at + 2 + again.num_gradients
    assert [file.name for file in tmp_path.iterdir()] == ["newton"]  # no file of an inner solve is left
    other = ProximalBregmanObjective(model, loss, train, points, damping=2 * DAMPING, epsilon=1e-3)
    with pytest.raises(ValueError, match=r"belongs to other work \(damping differ\)"):
        kept.minimize(other)


def test_unconverged_newton_warns(classifier) -> None:
    model, loss, train = classifier
    with pytest.warns(UserWarning, match="objective was not minimised.*smaller epsilon"):
        proximal_bregman_response(
            model,
            loss,
            train,
            (train[0][:1], train[1][:1]),
            damping=DAMPING,
            epsilon=0.1,
            optimizer=ProximalNewton(rtol=1e-12, max_steps=1),
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"damping": 0.0, "epsilon": 1e-8}, "damping must be positive, got 0"),
        ({"damping": 0.1, "epsilon": 0.0}, "epsilon must not be zero"),
        ({"damping": 0.1, "epsilon": torch.ones(2)}, r"epsilon has shape \(2,\) for 12 points"),
    ],
)
def test_bad_settings_are_refused(classifier, settings, message) -> None:
    model, loss, train = classifier
    with pytest.raises(ValueError, match=message):
        ProximalBregmanObjective(model, loss, train, train, **settings)


def test_bad_optimizer_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="step_size must be positive, got -1"):
        ProximalSGD(step_size=-1, batch_size=1, num_steps=1)


def test_an_overflowing_point_costs_the_others_nothing(classifier, generator) -> None:
    """A step that is far too large for one point's curvature; the displacement of another stays as it was."""
    model, loss, train = classifier
    huge = (torch.cat([1e6 * train[0][:1], train[0][1:2]]), train[1][:2])
    settings = {"damping": DAMPING, "epsilon": 1.0}
    sgd = ProximalSGD(step_size=1e3, batch_size=3, num_steps=60)
    pair = ProximalBregmanObjective(model, loss, train, huge, **settings)
    response = sgd.minimize(pair, generator=torch.Generator().manual_seed(0))
    assert response.displacement.shape == pair.shape  # no error, whatever became of the columns
    gentle = ProximalSGD(step_size=1e-3, batch_size=3, num_steps=3)
    both = gentle.minimize(pair, generator=torch.Generator().manual_seed(0)).displacement
    alone = ProximalBregmanObjective(model, loss, train, (huge[0][1:], huge[1][1:]), **settings)
    expected = gentle.minimize(alone, generator=torch.Generator().manual_seed(0)).displacement
    torch.testing.assert_close(both[:, 1:], expected)
