"""Covariances of losses over chains against the exact ones of a Gaussian, and against damped influence."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from curvlab.influence import influence
from curvlab.iterate import Checkpoint
from curvlab.sampling import BayesianInfluence, bayesian_influence

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


def test_goes_on_after_a_kill(tmp_path) -> None:
    class Killed(Exception):
        pass

    def kill(state) -> None:
        if state.num_steps == 230:
            raise Killed

    file = Checkpoint(tmp_path / "chains.pt", every=10)
    with pytest.raises(Killed):
        sampled.__wrapped__(20, checkpoint=file, callback=kill)
    torch.testing.assert_close(sampled.__wrapped__(20, checkpoint=file).scores, sampled(20).scores)


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
