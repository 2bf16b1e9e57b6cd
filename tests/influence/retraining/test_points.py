"""The proximal Bregman objective of single points: by its definition, weighted or not, minimised, killed, cut."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from curvlab.curvature import GaussNewtonOperator
from curvlab.influence import (
    ProximalBregmanObjective,
    ProximalNewton,
    ProximalSGD,
    influence_scores,
    loss_response,
    proximal_bregman_response,
)
from curvlab.iterate import Checkpoint
from curvlab.problem import Problem
from curvlab.problem.memory import MemoryWarning
from curvlab.solvers import BlockConjugateGradient, Direct
from tests.models import CPU_ERROR, Limited
from tests.refusals import refuses, stopped

DAMPING, SIZE = 0.1, 12
WEIGHTS = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0, 0.1, 1.0, 1.5, 0.7, 0.0, 4.0, 1.0], dtype=torch.float64)
Classifier = tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]


def built(kind: str) -> Classifier:
    torch.manual_seed(0)
    if kind == "mlp":
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    else:
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double()
    x = torch.randn(SIZE, 1, 4, 4, dtype=torch.float64)
    return model.eval(), nn.CrossEntropyLoss(), (x, torch.randint(3, (SIZE,)))


@pytest.fixture(params=["mlp", "convolution"])
def classifier(request: pytest.FixtureRequest) -> Classifier:
    return built(request.param)


@pytest.fixture
def mlp() -> Classifier:
    return built("mlp")


def first(train: tuple[Tensor, Tensor], count: int) -> tuple[Tensor, Tensor]:
    return train[0][:count], train[1][:count]


def objective_of(of: Classifier, num_points: int = 2, **settings: Any) -> ProximalBregmanObjective:
    model, loss, train = of
    settings = {"damping": DAMPING, "epsilon": 1e-8} | settings
    return ProximalBregmanObjective(model, loss, train, candidates=first(train, num_points), **settings)


def by_definition(
    of: Classifier, k: int, step: Tensor, *, epsilon: float, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Q_z and its gradient at θ* + step, written with logsumexp, straight from the definition, by autograd."""
    model, _, (x, y) = of
    moved = copy.deepcopy(model)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) + step, moved.parameters())
    h, reference = moved(x), model(x).detach()
    divergence = h.logsumexp(1) - reference.logsumexp(1) - (reference.softmax(1) * (h - reference)).sum(1)
    value = (weights * divergence).sum() / SIZE + epsilon * (h[k].logsumexp(0) - h[k, y[k]])
    gradients = torch.autograd.grad(value, list(moved.parameters()))
    slope = torch.cat([g.flatten() for g in gradients]) + DAMPING * step
    return value.detach() + DAMPING / 2 * step.square().sum(), slope


# ------------------------------------------------------------------------------------- what it is
@pytest.mark.parametrize("kind", ["mlp", "convolution"])
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["alike", "weighted"])
def test_value_gradient_and_its_estimate_follow_the_definition(
    generator: torch.Generator, kind: str, weights: Tensor | None
) -> None:
    classifier, epsilon = built(kind), 0.3
    by_probabilities = (kind == "mlp") == (weights is not None)  # with each of the two once
    objective = objective_of(classifier, epsilon=epsilon, batch_size=7, weights=weights)
    u = torch.randn(*objective.shape, generator=generator, dtype=torch.float64)
    gradient, value = objective.gradient(u), objective.value(u)
    own = torch.ones(SIZE) if weights is None else weights
    for k in range(2):
        expected, slope = by_definition(classifier, k, epsilon * u[:, k], epsilon=epsilon, weights=own)
        assert_close(value[k], expected)
        assert_close(gradient[:, k], slope / epsilon)
    assert_close(objective.gradient(u[:, 1:], columns=torch.tensor([1])), gradient[:, 1:])
    drawn_by = torch.rand(SIZE, generator=generator) + 0.1 if by_probabilities else None
    draws = torch.stack(
        [
            objective.sampled_gradient(u, batch_size=4, probabilities=drawn_by, generator=generator)[:, 0]
            for _ in range(100)
        ]
    )
    error = draws.mean(0) - gradient[:, 0]
    assert error.norm() < 2 * (draws.std(0) / 100**0.5).norm()  # unbiased: about 1


def test_each_point_may_have_its_own_epsilon_and_a_problem_may_stand_for_the_data(classifier, generator) -> None:
    model, loss, train = classifier
    epsilon, points = torch.tensor([0.1, -0.02, 1e-4]), first(train, 3)
    together = ProximalBregmanObjective(
        Problem.of(model, loss, train), candidates=points, damping=DAMPING, epsilon=epsilon
    )
    u = torch.randn(*together.shape, generator=generator, dtype=torch.float64)
    changes = loss_response(model, loss, train, u, epsilon=epsilon)
    for k in range(3):
        own, weight = slice(k, k + 1), float(epsilon[k])
        alone = ProximalBregmanObjective(
            model, loss, train, candidates=(points[0][own], points[1][own]), damping=DAMPING, epsilon=weight
        )
        close = {"rtol": 1e-7, "atol": 1e-9}
        assert_close(alone.gradient(u[:, own]), together.gradient(u)[:, own], **close)
        assert_close(together.gradient(u[:, own], columns=torch.tensor([k])), alone.gradient(u[:, own]), **close)
        assert_close(alone.value(u[:, own]), together.value(u)[own])
        batches = [
            each.sampled_gradient(columns, batch_size=6, generator=torch.Generator().manual_seed(1))
            for each, columns in ((alone, u[:, own]), (together, u))
        ]
        assert_close(batches[0], batches[1][:, own], **close)
        expected = loss_response(model, loss, train, u[:, own], epsilon=weight)
        assert_close(expected, changes[:, own], rtol=1e-6, atol=1e-8)
    assert ProximalNewton(rtol=1e-4, max_steps=100).minimize(together).converged


def test_points_may_be_indices_of_training_examples(mlp: Classifier) -> None:
    model, loss, (x, y) = mlp
    chosen, settings = [7, 2, 7], {"damping": DAMPING, "epsilon": 0.1}
    examples = ProximalBregmanObjective(model, loss, (x, y), candidates=(x[chosen], y[chosen]), **settings)
    u = torch.randn(*examples.shape, dtype=torch.float64)
    for points in (chosen, torch.tensor(chosen)):
        found = ProximalBregmanObjective(model, loss, (x, y), points, **settings)
        assert_close(found.gradient(u), examples.gradient(u))
    with pytest.raises(ValueError, match="points must be indices of training examples from 0 to 11"):
        ProximalBregmanObjective(model, loss, (x, y), [12], **settings)
    with pytest.raises(ValueError, match=r"epsilon has shape \(2,\) for 3 points"):
        ProximalBregmanObjective(model, loss, (x, y), chosen, damping=DAMPING, epsilon=torch.ones(2))


# ---------------------------------------------------------------------------------- its minimisers


@pytest.mark.parametrize(("kind", "weights"), [("mlp", None), ("convolution", WEIGHTS)], ids=["alike", "weighted"])
def test_newton_minimises_and_matches_influence_at_small_epsilon(kind: str, weights: Tensor | None) -> None:
    classifier = model, loss, train = built(kind)
    response = ProximalNewton(rtol=1e-7).minimize(objective_of(classifier, epsilon=1e-6, weights=weights))
    assert response.converged
    assert response.gradient_norm.max() <= 1e-7
    changes = loss_response(model, loss, train, response.displacement, epsilon=1e-6)
    scores = influence_scores(
        model, loss, train, train, points=range(2), damping=DAMPING, solver=Direct(), weights=weights
    )
    assert (changes - scores).norm() / scores.norm() < 1e-4
    # and it is a minimum of the objective itself where values can be told apart from rounding
    large = objective_of(classifier, epsilon=0.02, weights=weights)
    found = ProximalNewton(rtol=1e-7, max_steps=200).minimize(large)
    assert found.converged
    own = torch.ones(SIZE) if weights is None else weights
    for k in range(2):
        step = 0.02 * found.displacement[:, k]
        assert by_definition(classifier, k, step, epsilon=0.02, weights=own)[1].abs().max() < 1e-8
    for scale in (0.99, 1.01):
        assert (large.value(found.displacement) < large.value(scale * found.displacement)).all()


def test_sgd_in_the_limit_of_small_steps_reaches_the_exact_response(mlp: Classifier) -> None:
    objective = objective_of(mlp)
    exact = ProximalNewton(rtol=1e-6).minimize(objective).displacement
    sgd = ProximalSGD(step_size=0.1, batch_size=12, num_steps=400)
    first_run = sgd.minimize(objective, generator=0)
    assert (first_run.displacement - exact).norm() / exact.norm() < 0.1
    assert first_run.num_gradients == 400 * 2


def test_interrupted_sgd_goes_on_to_the_same_response(mlp: Classifier, tmp_path: Path) -> None:
    objective = objective_of(mlp)
    settings = {"step_size": 0.1, "batch_size": 3, "num_steps": 9}

    def minimize(**changes: Any) -> Tensor:
        place = {"checkpoint": Checkpoint(tmp_path / "pbrf.pt", every=4)}
        optimizer = ProximalSGD(**(settings | place | changes))
        return optimizer.minimize(objective, generator=torch.Generator().manual_seed(3)).displacement

    whole = ProximalSGD(**settings).minimize(objective, generator=3).displacement
    stopped(6, minimize)
    for changes in ({"step_size": 0.2}, {"num_steps": 10}):
        refuses(rf"belongs to other work \({next(iter(changes))} differs?\)", minimize, **changes)
    steps: list[int] = []
    assert torch.equal(minimize(callback=lambda state: steps.append(state.num_steps)), whole)
    assert steps == [5, 6, 7, 8, 9]


# Within the first inner solve, after some steps, and when points have matrices of their own.
@pytest.mark.parametrize(("dies_at", "epsilon"), [(3, 1e-3), (60, 1e-3), (50, 0.1)])
def test_killed_newton_goes_on_to_the_same_response(
    mlp: Classifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int, epsilon: float
) -> None:
    monkeypatch.setattr("curvlab.iterate.SaveFile.due", lambda self, step: True)
    products, product = [0, 0], GaussNewtonOperator.matmat

    def counted(operator: GaussNewtonOperator, vectors: Tensor) -> Tensor:
        products[0] += 1
        if products[0] == products[1]:
            raise KeyboardInterrupt
        return product(operator, vectors)

    monkeypatch.setattr(GaussNewtonOperator, "matmat", counted)
    objective = objective_of(mlp, epsilon=epsilon)
    solver = BlockConjugateGradient(rtol=0.3, max_steps=500)  # loose: many steps
    settings: dict[str, Any] = {
        "rtol": 1e-9,
        "solver": solver,
        "curvature_dtype": torch.float64,
        "max_steps": 60 if epsilon < 0.1 else 6,
    }
    slow: list[bool] = []
    whole = ProximalNewton(**settings, callback=lambda state: slow.append(bool(state.slow.any()))).minimize(
        objective
    )
    assert set(slow) == {epsilon == 0.1}  # from the first step to the last
    in_all = products[0]
    dies_at = min(dies_at, in_all - 2)
    kept = ProximalNewton(**settings, checkpoint=tmp_path / "newton")
    products[:] = [0, dies_at]
    with pytest.raises(KeyboardInterrupt):
        kept.minimize(objective)
    products[:] = [0, 0]
    if dies_at > 3:  # the first step is saved
        with pytest.raises(ValueError, match=r"belongs to other work \(damping differs?\)"):
            kept.minimize(objective_of(mlp, epsilon=epsilon, damping=2 * DAMPING))
    again = kept.minimize(objective)
    assert torch.equal(again.displacement, whole.displacement)
    assert torch.equal(again.gradient_norm, whole.gradient_norm)
    assert (again.num_gradients, again.num_matvecs) == (whole.num_gradients, whole.num_matvecs)
    # The product under way, the one for a solve's residual, and those that tell that a file is the same solve's.
    if not slow[0]:
        assert products[0] <= in_all - dies_at + 2 + again.num_gradients
    assert list(tmp_path.iterdir()) == []  # neither its own file nor one of an inner solve is left


# What is left is far from zero (a weight of 0.1), or rounding: 0.02 at 1e-6 in single precision.
@pytest.mark.parametrize(
    ("dtype", "epsilon", "rtol", "advice"),
    [
        (torch.float64, 0.1, 1e-6, r"Allow more steps, or take a smaller epsilon\."),
        (
            torch.float32,
            1e-6,
            1e-4,
            r"at epsilon = 1e-06 in torch\.float32: take a larger epsilon, or dtype=torch",
        ),
        (torch.float64, 1e-8, 1e-9, r"at epsilon = 1e-08 in torch\.float64: take a larger epsilon\."),
    ],
)
def test_unconverged_newton_warns_and_its_advice_helps(
    mlp: Classifier, dtype: torch.dtype, epsilon: float, rtol: float, advice: str
) -> None:
    model, loss, train = mlp

    def response(epsilon: float) -> None:
        given: dict[str, Any] = {"candidates": first(train, 1), "damping": DAMPING, "epsilon": epsilon}
        newton = ProximalNewton(rtol=rtol, max_steps=6)
        proximal_bregman_response(model, loss, train, **given, dtype=dtype, optimizer=newton)

    with pytest.warns(UserWarning, match=f"objective was not minimised: .*{advice}"):
        response(epsilon)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        response(1e-3)


def test_an_overflowing_point_costs_the_others_nothing(mlp: Classifier) -> None:
    """A step that is far too large for one point's curvature; the displacement of another stays as it was."""
    model, loss, train = mlp
    huge = (torch.cat([1e6 * train[0][:1], train[0][1:2]]), train[1][:2])
    settings = {"damping": DAMPING, "epsilon": 1.0}
    pair = ProximalBregmanObjective(model, loss, train, candidates=huge, **settings)
    response = ProximalSGD(step_size=1e3, batch_size=3, num_steps=60).minimize(pair)
    assert response.displacement.shape == pair.shape  # no error, whatever became of the columns
    gentle = ProximalSGD(step_size=1e-3, batch_size=3, num_steps=3)
    alone = ProximalBregmanObjective(model, loss, train, candidates=(huge[0][1:], huge[1][1:]), **settings)
    assert_close(gentle.minimize(pair).displacement[:, 1:], gentle.minimize(alone).displacement)


# ------------------------------------------------------------------------- where memory runs out
def with_room_for(most: int, weights: Tensor | None = None, **settings: Any) -> ProximalBregmanObjective:
    torch.manual_seed(0)
    layers = nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)
    model = Limited(*layers, most=most, error=RuntimeError(CPU_ERROR)).double().eval()
    train = (torch.randn(40, 3, dtype=torch.float64), torch.randint(2, (40,)))
    settings = {"damping": 0.1, "epsilon": 0.1, "batch_size": 512, "weights": weights} | settings
    return ProximalBregmanObjective(model, nn.CrossEntropyLoss(), train, candidates=first(train, 3), **settings)


def quantities(of: ProximalBregmanObjective) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    u = torch.randn(of.shape, generator=generator, dtype=torch.float64)
    by = torch.arange(1.0, 41)
    return {
        "gradient": of.gradient(u),
        "of two points": of.gradient(u[:, 1:], columns=torch.tensor([1, 2])),
        "value": of.value(u),
        "on a batch": of.sampled_gradient(u, batch_size=20, generator=generator),
        "drawn by probabilities": of.sampled_gradient(u, batch_size=20, probabilities=by, generator=generator),
    }


@pytest.mark.parametrize("weights", [None, torch.linspace(0, 2, 40)], ids=["alike", "weighted"])
def test_passes_are_halved_until_they_fit_and_stay_so(weights: Tensor | None) -> None:
    roomy, narrow = with_room_for(10**6, weights), with_room_for(12, weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MemoryWarning)
        expected = quantities(roomy)
    with pytest.warns(MemoryWarning, match="memory ran out: a pass now takes 10 examples and 3 vectors"):
        found = quantities(narrow)
    for name, value in expected.items():
        assert_close(found[name], value, rtol=1e-11, atol=1e-13)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MemoryWarning)  # it has learnt
        quantities(narrow)


def test_points_are_halved_when_there_are_more_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy, narrow = with_room_for(10**6), with_room_for(10**6)
    whole = ProximalBregmanObjective._divergence_gradient

    def limited(own: ProximalBregmanObjective, inputs: Tensor, *rest: Any) -> Tensor:
        if own is narrow and rest[2].shape[1] * len(inputs) > 1:
            raise MemoryError
        return whole(own, inputs, *rest)

    monkeypatch.setattr(ProximalBregmanObjective, "_divergence_gradient", limited)
    u = torch.randn(roomy.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with pytest.warns(MemoryWarning, match="1 examples and 1 vectors"):
        found = narrow.gradient(u)
    assert_close(found, roomy.gradient(u), rtol=1e-11, atol=1e-13)


def test_the_budget_reaches_the_curvature() -> None:
    roomy, tight = with_room_for(10**6), with_room_for(10**6, memory_budget=2**11)
    vectors = torch.ones(roomy.shape[0], 2, dtype=torch.float64)
    with pytest.warns(MemoryWarning, match="that are given: a pass takes"):
        found = tight.curvature(torch.float64) @ vectors
    assert_close(found, roomy.curvature(torch.float64) @ vectors, rtol=1e-11, atol=1e-13)
