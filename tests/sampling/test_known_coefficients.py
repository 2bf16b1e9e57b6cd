"""Learning coefficients and covariances that are known: in closed form, by theorem, or by quadrature."""

from __future__ import annotations

import math
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn

from curvlab.influence import influence
from curvlab.sampling import LLC, BayesianInfluence, RMSProp, bayesian_influence, default_nbeta, estimate_llc
from tests.sampling.analytic_models import (
    Polynomial,
    ReducedRank,
    Stretched,
    aoyagi_watanabe,
    half_square,
    linear_regression,
    mean_output,
    no_inputs,
    quadrature,
    regular_coefficient,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def of_potential(model: nn.Module, num_chains: int, num_draws: int, num_burnin_steps: int, **settings) -> LLC:
    """The estimate where the model's output is the loss itself."""
    lengths = {"num_chains": num_chains, "num_draws": num_draws, "num_burnin_steps": num_burnin_steps}
    return estimate_llc(
        model, mean_output, no_inputs(), **lengths, batch_size=8, generator=generator(), **settings
    )


# Underdamped chains reach as far in a tenth of the steps.
SAMPLERS = {"sgld": (None, 8e-4), "averaged": (math.inf, 8e-4), "underdamped": (7.0, 8e-4)}


@pytest.mark.parametrize(
    ("powers", "sampler"), [((4,), "sgld"), *(((2, 4, 6), name) for name in SAMPLERS)], ids=str
)
def test_monomials_and_sums(powers: tuple[int, ...], sampler: str) -> None:
    friction, step_size = SAMPLERS[sampler]
    further = 10 if sampler == "underdamped" else 1
    settings = {"step_size": step_size, "friction": friction, "nbeta": default_nbeta(1000), "localization": 1e-3}
    llc = of_potential(Polynomial(powers, product=False), 800, 100, 300 // further, **settings)
    # Standard errors of 4 % and 2 %: what is off by 20 % (temperature, a step's noise) is seen.
    assert llc.value == pytest.approx(sum(1 / power for power in powers), rel=0.1)


# The asymptotic coefficient is 1 / largest power; at this n and localization the truth is far below.
@pytest.mark.parametrize(("powers", "asymptotic"), [((2, 4), 1 / 4), ((2, 2, 2), 1 / 2)], ids=str)
def test_products_against_quadrature(powers: tuple[int, ...], asymptotic: float) -> None:
    nbeta, localization = default_nbeta(10_000), 20.0
    truth = quadrature(powers, nbeta=nbeta, localization=localization)
    assert 0.05 * asymptotic < truth < 0.9 * asymptotic
    # A chain forgets in 250 steps: chains tell more than draws.
    settings = {"step_size": 4e-4, "nbeta": nbeta, "localization": localization}
    llc = of_potential(Polynomial(powers, product=True), 3000, 100, 350, **settings)
    # Standard errors of 3.3 and 3.7 %; twice the nbeta changes the truth by 26 and 40 %, twice the localization
    # by 64 and 75 %, noise 10 % too large by 38 and 47 %.
    assert llc.value == pytest.approx(truth, rel=0.1)


@pytest.mark.parametrize(
    ("preconditioner", "friction", "step_size"),
    [(RMSProp(damping=0.1), None, 1e-5), (None, 30.0, 5e-6)],
    ids=["rmsprop", "underdamped"],
)
def test_flat_directions_are_reached_that_sgld_misses(
    preconditioner: RMSProp | None, friction: float | None, step_size: float
) -> None:
    """λ = 4 of curvatures 1,000 and 1; where a step adds a seventh to the steep ones, SGLD has half of it."""

    estimate = partial(of_potential, Stretched([1000.0] * 4 + [1.0] * 4), 60, 60, 1200, nbeta=100.0)
    if preconditioner is not None:
        plain = estimate(step_size=5e-6, localization=1e-3)
        assert plain.value == pytest.approx(2 * 8 / 7 + 0.92, rel=0.1)
    own = {"preconditioner": preconditioner, "friction": friction}
    assert estimate(step_size=step_size, localization=1e-3, **own).value == pytest.approx(4.0, rel=0.1)


# Where the rank is 1, a larger step would be too large for the regular directions.
@pytest.mark.parametrize(
    ("pattern", "coefficient", "step_size", "preconditioner"),
    [((4, 2, 1, 0), 1.0, 4.8e-4, None), ((3, 2, 2, 1), 2.5, 2.4e-4, None), ((3, 2, 2, 1), 2.5, 2e-5, RMSProp())],
    ids=str,
)
def test_reduced_rank_regression_at_the_most_singular_parameter(
    pattern: tuple[int, int, int, int], coefficient: float, step_size: float, preconditioner: RMSProp | None
) -> None:
    assert aoyagi_watanabe(*pattern) == coefficient
    model, num_inputs = ReducedRank(*pattern), pattern[0]
    inputs = math.sqrt(num_inputs) * torch.eye(num_inputs, dtype=torch.float64)  # second moments 1
    targets = model(inputs).detach()
    llc = estimate_llc(
        model,
        half_square,
        (inputs, targets),
        num_chains=400 if preconditioner is None else 300,
        num_draws=100,
        num_burnin_steps=round(0.216 / step_size) if preconditioner is None else 1000,
        step_size=step_size,
        batch_size=num_inputs,
        nbeta=default_nbeta(10_000),
        localization=5.0,
        preconditioner=preconditioner,
        generator=generator(),
    )
    assert llc.value == pytest.approx(coefficient, rel=0.1)


def coverage(llc: LLC, truth: float) -> int:
    """Return how many of 40 estimates of 8 chains cover the truth: a chain knows its own seed only."""
    covered = 0
    for losses, burnin in zip(llc.losses.split(8), llc.burnin_losses.split(8), strict=True):
        one = LLC.of_traces(
            losses - llc.initial_loss,
            burnin - llc.initial_loss,
            initial_loss=llc.initial_loss,
            nbeta=llc.nbeta,
            step_size=llc.step_size,
            localization=llc.localization,
            num_examples=llc.num_examples,
            num_gradients=1,
        )
        low, high = one.interval(0.95)
        assert high - low < truth
        covered += low <= truth <= high
    return covered


def test_intervals_of_a_regular_model_cover_its_value_at_finite_n() -> None:
    model, data = linear_regression(1000, 3, seed=2)
    truth = regular_coefficient(data[0], nbeta=default_nbeta(1000), localization=20.0)
    llc = estimate_llc(
        model,
        nn.MSELoss(),
        data,
        num_chains=40 * 8,
        num_draws=300,
        num_burnin_steps=100,
        step_size=2e-4,
        batch_size=100,
        localization=20.0,
        generator=generator(),
    )
    assert coverage(llc, truth) >= 36


def test_intervals_of_a_singular_model_cover_the_quadrature() -> None:
    nbeta, localization = default_nbeta(10_000), 30.0
    settings = {"step_size": 3e-4, "nbeta": nbeta, "localization": localization}
    llc = of_potential(Polynomial((2, 2), product=True), 40 * 8, 1300, 500, **settings)
    assert coverage(llc, quadrature((2, 2), nbeta=nbeta, localization=localization)) >= 36


# --- Covariances of losses over chains against the exact ones of a Gaussian, and against damped influence
N, M = 12, 3
NBETA, GAMMA, STEP = 2000.0, 400.0, 1e-5


def least_squares() -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A linear regression at its minimum: the density of the chains is a Gaussian."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(N + M, 3, generator=generator, dtype=torch.float64)
    targets = inputs.sum(1, keepdim=True) + torch.randn(N + M, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(inputs[:N], targets[:N]).solution.T)
    return model, (inputs[:N], targets[:N]), (inputs[N:], targets[N:])


def exact(model: nn.Module, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Tensor:
    """-nbeta [gᵀ Σ h + 1/2 tr(A Σ B Σ)], losses (y - xᵀw)² with g = -2 r x, A = 2 x xᵀ; Σ the Gaussian's."""
    weight = model.weight.detach().reshape(-1)
    hessian = 2 * train[0].T @ train[0] / N
    values, vectors = torch.linalg.eigh(NBETA * hessian + GAMMA * torch.eye(3, dtype=torch.float64))
    # With full batches the chains' own variance is known: that of a finite step.
    covariance = (vectors / (values * (1 - STEP * values / 4))) @ vectors.T

    def gradients(data: tuple[Tensor, Tensor]) -> Tensor:
        return -2 * (data[1][:, 0] - data[0] @ weight)[:, None] * data[0]

    first = gradients(test) @ covariance @ gradients(train).T
    second = 2 * (test[0] @ covariance @ train[0].T).square()
    return -NBETA * (first + second)


@cache
def sampled(num_draws: int = 400, **others: object) -> BayesianInfluence:
    model, train, test = least_squares()
    settings = {"num_chains": 8, "num_burnin_steps": 200, "batch_size": N, "step_size": STEP, "steps_per_draw": 10}
    settings |= {"nbeta": NBETA, "localization": GAMMA, "generator": 0, "progress": False}
    return bayesian_influence(model, nn.MSELoss(), train, test, num_draws=num_draws, **settings | others)


def test_is_the_covariance_of_the_gaussian_within_its_errors() -> None:
    found, wanted = sampled(), exact(*least_squares())
    z = ((found.scores - wanted) / found.stderr).abs()
    assert float(z.max()) < 7  # Student's t of 8 chains, 36 scores
    assert float(z.mean()) < 1.6
    assert float((found.scores - wanted).norm() / wanted.norm()) < 0.08


def test_tends_to_damped_influence() -> None:
    """At a temperature at which the curvature of single losses counts for nothing."""
    model, train, test = least_squares()
    damped = influence(model, nn.MSELoss(), train, test, damping=GAMMA / NBETA, rtol=1e-8).scores
    wanted = exact(model, train, test)
    assert float((wanted - damped).norm() / damped.norm()) < 0.02
    found = sampled()
    assert found.damping == GAMMA / NBETA
    assert float((found.scores - damped).norm() / damped.norm()) < 0.1


def test_errors_shrink_with_draws_and_noise_is_named() -> None:
    few, many = sampled(10), sampled()  # which is made once for all tests
    assert many.signal > 2 * few.signal > 0
    assert "8 chains x 400 draws" in str(many)
    assert "not to be used" not in str(many)
    assert "take more chains or draws" in str(sampled(2, num_chains=2))


def test_has_the_door_of_all_scores(tmp_path) -> None:
    found, (model, train, _) = sampled(10), least_squares()
    assert "negative: helps; units of the loss per unit of weight" in str(found)
    table = found.table(1)
    assert table["point"][:2].tolist() == [int(found.scores[0].argmin()), int(found.scores[0].argmax())]
    assert table["stderr"][0] == float(found.stderr[0, found.top(1)[0, 0]])
    found.save(tmp_path / "scores")
    again = BayesianInfluence.load(tmp_path / "scores", model, nn.MSELoss(), train)
    assert torch.equal(again.per_chain, found.per_chain)
    with pytest.raises(ValueError, match="scores are of other training examples"):
        again.check(model, nn.MSELoss(), tuple(part.flip(0) for part in train))
