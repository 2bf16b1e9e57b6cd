"""Weights of examples and draws by probabilities, against sums of single examples' dense matrices."""

from __future__ import annotations

import pytest
import torch
from curvature_cases import Problem, language_problem, problem
from curvature_oracles import dense_empirical_fisher, dense_gauss_newton, dense_hessian
from loss_cases import CLASSES, WEIGHTS, focal, inputs, network
from torch import Tensor, nn
from torch.testing import assert_close

from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator
from curvlab.linalg import DenseOperator, LinearOperator, identity

EXAMPLES = torch.tensor([0.0, 2.0, 0.5, 1.0, 3.0, 0.1], dtype=torch.float64)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=WEIGHTS), focal])
@pytest.mark.parametrize(
    ("operator", "dense"), [(GaussNewtonOperator, dense_gauss_newton), (HessianOperator, dense_hessian)]
)
def test_each_example_counts_as_its_weight_says(loss, operator, dense) -> None:
    model, x = network(3), inputs()
    # Of one example alone a class-weighted mean loses its weight, which is put back.
    terms = WEIGHTS[CLASSES] / WEIGHTS[CLASSES].mean() if getattr(loss, "weight", None) is not None else [1.0] * 6
    expected = (
        sum(EXAMPLES[n] * terms[n] * dense(model, loss, x[n : n + 1], CLASSES[n : n + 1]) for n in range(6)) / 6
    )
    for data in ((x, CLASSES), [(x[:4], CLASSES[:4]), (x[4:], CLASSES[4:])]):
        found = operator(model, loss, data, batch_size=3).weighted(EXAMPLES)
        assert_close(found.to_dense(), expected, rtol=1e-10, atol=1e-12)


def test_what_is_no_weighting_is_refused() -> None:
    op = GaussNewtonOperator(network(3), nn.CrossEntropyLoss(), (inputs(), CLASSES))
    with pytest.raises(ValueError, match=r"one weight for each of 6 examples.*\(5,\)"):
        op.weighted(torch.ones(5))
    with pytest.raises(ValueError, match="not negative"):
        op.weighted(-torch.ones(6))
    with pytest.raises(ValueError, match=r"whole data.*not a sample"):
        op.sample(3).weighted(torch.ones(6))


def test_weights_of_zero_leave_nothing() -> None:
    model, data = network(3).float(), (inputs().float(), CLASSES)
    for op in (
        GaussNewtonOperator(model, nn.CrossEntropyLoss(), data),
        FisherOperator(model, nn.CrossEntropyLoss(), data, kind="empirical"),
    ):
        for weights in (torch.zeros(6), torch.full((6,), 1e-60, dtype=torch.float64)):  # 0 in the model's dtype
            assert float(op.weighted(weights).to_dense().abs().max()) == 0


KINDS = {
    "gauss_newton": (GaussNewtonOperator, dense_gauss_newton),
    "hessian": (HessianOperator, dense_hessian),
    "empirical": (lambda *one: FisherOperator(*one, kind="empirical"), dense_empirical_fisher),
}
DRAWN = torch.tensor([3.0, 0.5, 1, 4, 2])
Q = DRAWN.double() / DRAWN.double().sum()


def single_samples(op: LinearOperator) -> list[Tensor]:
    """B_i for each example i: batches of one, told apart by the generator's number and the distribution of q."""
    found: dict[int, Tensor] = {}
    for seed in range(60):
        number = torch.rand(1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        i = int((Q.cumsum(0) <= number).sum())
        if i not in found:
            found[i] = op.sample(1, torch.Generator().manual_seed(seed), DRAWN).to_dense()
    assert sorted(found) == list(range(5))
    return [found[i] for i in range(5)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["mlp_tanh-ce", "layer_norm-mse", "linear-bce", "linear-ce_sum", "conv-ce"])
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
    alone = op.sample(3, seeded(), DRAWN)
    both = (2 * op + 0.5 * identity).sample(3, seeded(), DRAWN).to_dense()
    eye = torch.eye(len(both), dtype=torch.float64)
    torch.testing.assert_close(both, 2 * alone.to_dense() + 0.5 * eye)
    torch.testing.assert_close(alone.sample(3, seeded(), DRAWN).to_dense(), alone.to_dense())
    torch.testing.assert_close(alone.sample(3, seeded()).to_dense(), op.sample(3, seeded()).to_dense())
    assert not torch.allclose(alone.to_dense(), op.sample(3, seeded()).to_dense())


@pytest.mark.parametrize(
    ("probabilities", "message"),
    [
        (torch.ones(4), "one probability for each of 5 examples"),
        (torch.zeros(5), "not all 0"),
        (torch.tensor([1.0, -1, 1, 1, 1]), "not negative"),
    ],
)
def test_bad_probabilities(probabilities: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GaussNewtonOperator(*problem("mlp_tanh", "ce")).sample(2, None, probabilities)
