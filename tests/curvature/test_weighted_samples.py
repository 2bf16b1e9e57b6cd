"""`op.sample(batch_size, generator, weights)` against dense fp64 blocks: moments by enumerating all examples."""

from __future__ import annotations

import pytest
import torch
from curvature_cases import Problem, language_problem, problem
from curvature_oracles import dense_empirical_fisher, dense_gauss_newton, dense_hessian
from torch import Tensor

from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator
from curvlab.linalg import DenseOperator, LinearOperator, identity

KINDS = {
    "gauss_newton": (GaussNewtonOperator, dense_gauss_newton),
    "hessian": (HessianOperator, dense_hessian),
    "empirical": (lambda *one: FisherOperator(*one, kind="empirical"), dense_empirical_fisher),
}
WEIGHTS = torch.tensor([3.0, 0.5, 1, 4, 2])
Q = WEIGHTS.double() / WEIGHTS.double().sum()


def single_samples(op: LinearOperator) -> list[Tensor]:
    """B_i for each example i: batches of one, told apart by the generator's number and the distribution of q."""
    found: dict[int, Tensor] = {}
    for seed in range(60):
        number = torch.rand(1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        i = int((Q.cumsum(0) <= number).sum())
        if i not in found:
            found[i] = op.sample(1, torch.Generator().manual_seed(seed), WEIGHTS).to_dense()
    assert sorted(found) == list(range(5))
    return [found[i] for i in range(5)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["mlp_tanh-ce", "layer_norm-mse", "linear-bce", "linear-ce_sum"])
def test_first_and_second_moment(kind: str, case: str) -> None:
    """E B = G and E B² = Σ G_i² / (N² q_i), with G_i from autograd rows of the oracle."""
    one = problem(*case.split("-"))
    build, dense = KINDS[kind]
    whole = dense(one.model, one.loss, one.inputs, one.targets)
    blocks = [dense(p.model, p.loss, p.inputs, p.targets) for p in (one.part(i) for i in range(5))]
    if case.endswith("sum"):
        blocks = [5 * block for block in blocks]
    torch.testing.assert_close(sum(blocks) / 5, whole, rtol=1e-9, atol=1e-12)
    samples = single_samples(build(*one))
    first = sum(q * sample for q, sample in zip(Q, samples, strict=True))
    torch.testing.assert_close(first, whole, rtol=1e-9, atol=1e-12)
    second = sum(q * sample @ sample for q, sample in zip(Q, samples, strict=True))
    expected = sum(block @ block / (25 * q) for q, block in zip(Q, blocks, strict=True))
    torch.testing.assert_close(second, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["gauss_newton", "hessian"])
def test_sequences(kind: str) -> None:
    """Tokens of one sequence stand and fall together; one divisor for all: unbiased."""
    one: Problem = language_problem("mean")
    build, dense = KINDS[kind]
    samples = single_samples(build(*one))
    first = sum(q * sample for q, sample in zip(Q, samples, strict=True))
    torch.testing.assert_close(first, dense(one.model, one.loss, one.inputs, one.targets), rtol=1e-9, atol=1e-12)


def test_monte_carlo_fisher_keeps_its_labels() -> None:
    one = problem("mlp_tanh", "ce")
    op = FisherOperator(*one, kind="monte_carlo", generator=torch.Generator().manual_seed(3))
    first = sum(q * sample for q, sample in zip(Q, single_samples(op), strict=True))
    torch.testing.assert_close(first, op.to_dense(), rtol=1e-9, atol=1e-12)


def test_dense_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(5, 4, 2, generator=generator, dtype=torch.float64)
    blocks = factors @ factors.mT
    samples = single_samples(DenseOperator(blocks, is_psd=True))
    for q, block, sample in zip(Q, blocks, samples, strict=True):
        torch.testing.assert_close(sample, block / (5 * q))


def test_sums_multiples_and_samples_of_samples() -> None:
    op = GaussNewtonOperator(*problem("mlp_tanh", "ce"))
    seeded = lambda: torch.Generator().manual_seed(4)  # noqa: E731
    alone = op.sample(3, seeded(), WEIGHTS)
    both = (2 * op + 0.5 * identity).sample(3, seeded(), WEIGHTS).to_dense()
    eye = torch.eye(len(both), dtype=torch.float64)
    torch.testing.assert_close(both, 2 * alone.to_dense() + 0.5 * eye)
    torch.testing.assert_close(alone.sample(3, seeded(), WEIGHTS).to_dense(), alone.to_dense())
    torch.testing.assert_close(alone.sample(3, seeded()).to_dense(), op.sample(3, seeded()).to_dense())
    assert not torch.allclose(alone.to_dense(), op.sample(3, seeded()).to_dense())


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(4), "one probability for each of 5 examples"),
        (torch.zeros(5), "not all 0"),
        (torch.tensor([1.0, -1, 1, 1, 1]), "not negative"),
    ],
)
def test_bad_weights(weights: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GaussNewtonOperator(*problem("mlp_tanh", "ce")).sample(2, None, weights)
