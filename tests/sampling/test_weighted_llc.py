"""The learning coefficient of a weighted mean loss: a quadratic, for which it is known at any temperature."""

from __future__ import annotations

import pytest
import torch
from analytic_models import FP64
from torch import Tensor, nn

from curvlab.sampling import choose_sgld_settings, default_nbeta, descent_to_minimum, estimate_llc
from curvlab.training import EnsembleLosses

NUM_EXAMPLES, NUM_FEATURES = 200, 4


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weighted_regression() -> tuple[nn.Module, tuple[Tensor, Tensor], Tensor]:
    """Return a linear model at the minimum of its weighted loss, data, and weights from 0 to 3."""
    inputs = torch.randn(NUM_EXAMPLES, NUM_FEATURES, generator=generator(1), dtype=FP64)
    noise = 0.3 * torch.randn(NUM_EXAMPLES, 1, generator=generator(2), dtype=FP64)
    targets = inputs.sum(1, keepdim=True) + noise
    # The weights follow the first feature: they change the spectrum, not only its scale.
    weights = (3 * inputs[:, 0].abs()).clamp(max=3.0) * (torch.arange(NUM_EXAMPLES) % 4 > 0)
    root = weights.sqrt()[:, None]
    model = nn.Linear(NUM_FEATURES, 1, bias=False).to(FP64)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(root * inputs, root * targets).solution.T)
    return model, (inputs, targets), weights


def coefficient(inputs: Tensor, weights: Tensor, *, nbeta: float, localization: float) -> float:
    """Return 1/2 Σ nbeta e / (nbeta e + localization), e eigenvalues of the Hessian 2/n Σ w_i x_i x_iᵀ."""
    hessian = 2 / len(inputs) * inputs.T @ (weights[:, None] * inputs)
    stiffness = nbeta * torch.linalg.eigvalsh(hessian)
    return 0.5 * float((stiffness / (stiffness + localization)).sum())


@pytest.mark.parametrize("batch_size", [50, NUM_EXAMPLES], ids=["batches", "all data"])
def test_llc_of_a_weighted_quadratic(batch_size: int) -> None:
    model, (inputs, targets), weights = weighted_regression()
    nbeta, localization = default_nbeta(NUM_EXAMPLES), 60.0
    expected = coefficient(inputs, weights, nbeta=nbeta, localization=localization)
    plain = coefficient(inputs, torch.ones_like(weights), nbeta=nbeta, localization=localization)
    assert abs(plain / expected - 1) > 0.1  # the weights are seen
    llc = estimate_llc(
        model,
        nn.MSELoss(),
        (inputs, targets),
        num_chains=200,
        num_draws=100,
        num_burnin_steps=100,
        step_size=5e-4,
        batch_size=batch_size,
        localization=localization,
        weights=weights,
        generator=generator(3),
    )
    assert llc.value == pytest.approx(expected, rel=0.05)
    residuals = targets - inputs @ model.weight.detach().T
    assert llc.initial_loss == pytest.approx(float((weights[:, None] * residuals.square()).mean()), rel=1e-9)


def test_losses_gradients_and_hessians_are_those_of_the_weighted_mean() -> None:
    model, (inputs, targets), weights = weighted_regression()
    losses = EnsembleLosses(model, nn.MSELoss(), (inputs, targets), example_weights=weights)
    rows = torch.tensor([[3, 3, 7], [0, 5, 9]])
    positions = torch.randn(2, NUM_FEATURES, generator=generator(4), dtype=FP64)
    found, (gradients,) = losses.losses_and_gradients(
        positions, losses.batch(rows), shared=False, weights=losses.weights_of(rows, 2)
    )
    for k, chosen in enumerate(rows):
        x, y, w = inputs[chosen], targets[chosen, 0], weights[chosen]
        residual = x @ positions[k] - y
        assert float(found[k]) == pytest.approx(float((w * residual.square()).mean()), rel=1e-10)
        torch.testing.assert_close(gradients[k, 0], 2 / 3 * x.T @ (w * residual))
        vector = positions[1 - k]
        product = losses.hessian_product(
            positions[k], losses.batch(chosen), vector, weights=losses.weights_of(chosen, 1)[0]
        )
        torch.testing.assert_close(product, 2 / 3 * x.T @ (w * (x @ vector)))


def test_settings_and_descent_see_the_weights() -> None:
    model, data, weights = weighted_regression()
    batches = {"batch_size": NUM_EXAMPLES, "num_burnin_steps": 100}
    plain, weighted = (
        choose_sgld_settings(model, nn.MSELoss(), data, **batches, weights=own, generator=generator(5))
        for own in (None, 10 * weights)
    )
    assert weighted.step_size < plain.step_size / 3  # more curvature
    # At the minimum of the weighted loss there is nothing to descend; the plain loss has its own.
    assert descent_to_minimum(model, nn.MSELoss(), data, localization=0.0, weights=weights).value < 1e-9
    assert descent_to_minimum(model, nn.MSELoss(), data, localization=0.0).value > 1e-4


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        (torch.ones(3), f"one weight for each of {NUM_EXAMPLES} examples"),
        (-torch.ones(NUM_EXAMPLES), "finite and not negative"),
        (torch.full((NUM_EXAMPLES,), torch.nan), "finite and not negative"),
    ],
    ids=["length", "negative", "nan"],
)
def test_bad_weights_are_refused(weights: Tensor, text: str) -> None:
    model, data, _ = weighted_regression()
    settings = {"num_chains": 1, "num_draws": 1, "num_burnin_steps": 1, "step_size": 1e-4, "batch_size": 5}
    with pytest.raises(ValueError, match=text):
        estimate_llc(model, nn.MSELoss(), data, **settings, weights=weights, generator=generator())
