"""Learning coefficients that are known: in closed form, by theorem, or by quadrature."""

from __future__ import annotations

import math

import pytest
import torch
from analytic_models import (
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
from torch import nn

from curvlab.sampling import LLC, RMSProp, default_nbeta, estimate_llc


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Underdamped chains reach as far in a tenth of the steps.
SAMPLERS = {"sgld": (None, 8e-4), "averaged": (math.inf, 8e-4), "underdamped": (7.0, 8e-4)}


@pytest.mark.parametrize(
    ("powers", "sampler"), [((4,), "sgld"), *(((2, 4, 6), name) for name in SAMPLERS)], ids=str
)
def test_monomials_and_sums(powers: tuple[int, ...], sampler: str) -> None:
    friction, step_size = SAMPLERS[sampler]
    further = 10 if sampler == "underdamped" else 1
    llc = estimate_llc(
        Polynomial(powers, product=False),
        mean_output,
        no_inputs(),
        num_chains=800,
        num_draws=100,
        num_burnin_steps=300 // further,
        step_size=step_size,
        friction=friction,
        batch_size=8,
        nbeta=default_nbeta(1000),
        localization=1e-3,
        generator=generator(),
    )
    # Standard errors of 4 % and 2 %: what is off by 20 % (temperature, a step's noise) is seen.
    assert llc.value == pytest.approx(sum(1 / power for power in powers), rel=0.1)


# The asymptotic coefficient is 1 / largest power; at this n and localization the truth is far below.
@pytest.mark.parametrize(("powers", "asymptotic"), [((2, 4), 1 / 4), ((2, 2, 2), 1 / 2)], ids=str)
def test_products_against_quadrature(powers: tuple[int, ...], asymptotic: float) -> None:
    nbeta, localization = default_nbeta(10_000), 20.0
    truth = quadrature(powers, nbeta=nbeta, localization=localization)
    assert 0.05 * asymptotic < truth < 0.9 * asymptotic
    llc = estimate_llc(
        Polynomial(powers, product=True),
        mean_output,
        no_inputs(),
        num_chains=3000,  # a chain forgets in 250 steps: chains tell more than draws
        num_draws=100,
        num_burnin_steps=350,
        step_size=4e-4,
        batch_size=8,
        nbeta=nbeta,
        localization=localization,
        generator=generator(),
    )
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

    def estimate(own: RMSProp | None, friction: float | None, step_size: float) -> LLC:
        return estimate_llc(
            Stretched([1000.0] * 4 + [1.0] * 4),
            mean_output,
            no_inputs(),
            num_chains=60,
            num_draws=60,
            num_burnin_steps=1200,
            step_size=step_size,
            batch_size=8,
            nbeta=100.0,
            localization=1e-3,
            preconditioner=own,
            friction=friction,
            generator=generator(),
        )

    if preconditioner is not None:
        assert estimate(None, None, step_size=5e-6).value == pytest.approx(2 * 8 / 7 + 0.92, rel=0.1)
    assert estimate(preconditioner, friction, step_size).value == pytest.approx(4.0, rel=0.1)


# Where the rank is 1, a larger step would be too large for the regular directions.
@pytest.mark.parametrize(
    ("pattern", "coefficient", "step_size", "preconditioner"),
    [
        ((4, 2, 1, 0), 1.0, 4.8e-4, None),
        ((3, 2, 2, 1), 2.5, 2.4e-4, None),
        ((3, 2, 2, 1), 2.5, 2e-5, RMSProp()),
    ],
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


def test_regular_models_have_half_the_number_of_parameters() -> None:
    num_features = 11
    model, data = linear_regression(2000, num_features, seed=1)
    llc = estimate_llc(
        model,
        nn.MSELoss(),
        data,
        num_chains=100,
        num_draws=500,
        num_burnin_steps=250,
        step_size=1e-4,
        batch_size=200,
        localization=0.1,
        generator=generator(),
    )
    assert llc.value == pytest.approx((num_features + 1) / 2, rel=0.05)
    assert llc.valid, llc.problems


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
    llc = estimate_llc(
        Polynomial((2, 2), product=True),
        mean_output,
        no_inputs(),
        num_chains=40 * 8,
        num_draws=1300,
        num_burnin_steps=500,
        step_size=3e-4,
        batch_size=8,
        nbeta=nbeta,
        localization=localization,
        generator=generator(),
    )
    assert coverage(llc, quadrature((2, 2), nbeta=nbeta, localization=localization)) >= 36
