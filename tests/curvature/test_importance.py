"""Importance sampling against dense fp64 blocks: expectation by enumeration, condition C.1, LiSSA."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from curvlab.curvature import (
    FisherOperator,
    GaussNewtonOperator,
    ImportanceOperator,
    certified_constant,
    exact_traces,
    example_importance,
    importance_probabilities,
    output_curvatures,
)
from tests.curvature.curvature_cases import Problem, fitted, language_problem, problem
from tests.curvature.curvature_oracles import dense_gauss_newton
from tests.refusals import refuses


def named(name: str) -> Problem:
    return language_problem("mean") if name == "language" else problem(*name.split("-"))


@pytest.mark.parametrize("name", ["mlp_tanh-ce", "language"])
@pytest.mark.parametrize("as_list", [False, True])
def test_batches_are_weighted_sums_of_drawn_examples(name: str, as_list: bool, generator: torch.Generator) -> None:
    """The examples are those that the distribution function of q gives for the generator's numbers."""
    one = named(name)
    q = importance_probabilities(torch.tensor([3.0, 0.5, 1, 4, 2]))
    data = [(one.inputs[:2], one.targets[:2]), (one.inputs[2:], one.targets[2:])]
    op = GaussNewtonOperator(one.model, one.loss, data if as_list else (one.inputs, one.targets))
    found = ImportanceOperator(op, q).sample(7, torch.Generator().manual_seed(2)).to_dense()
    numbers = torch.rand(7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    drawn = [int((q.cumsum(0) <= number).sum()) for number in numbers]
    blocks = [example_block(one, i) for i in range(5)]
    expected = sum(blocks[i] / (5 * q[i]) for i in drawn) / 7
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert len(set(drawn)) > 2


def example_block(one: Problem, i: int) -> Tensor:
    """G_i with mean G: 5 times the share of example i, from summed losses."""
    summed = nn.CrossEntropyLoss(reduction="sum")
    part = one.part(i)
    if bool((part.targets == -100).all()):
        return torch.zeros_like(dense_gauss_newton(one.model, one.loss, one.inputs, one.targets))
    return dense_gauss_newton(part.model, summed, part.inputs, part.targets) * 5 / int((one.targets != -100).sum())


def test_examples_of_several_shapes(generator: torch.Generator) -> None:
    """Sequences of two lengths: a batch for each, with their own weights, and one divisor."""
    one = language_problem("mean")
    data = [(one.inputs[:2], one.targets[:2]), (one.inputs[3:, :3], one.targets[3:, :3])]
    op = GaussNewtonOperator(one.model, one.loss, data)
    q = importance_probabilities(torch.tensor([1.0, 2, 3, 0.5]))
    importance = ImportanceOperator(op, q)
    vectors = op.randn(4, torch.Generator().manual_seed(1))
    draws = torch.stack([importance.sample(50, generator) @ vectors for _ in range(60)])
    mean, deviation, expected = draws.mean(0), draws.std(0) / 60**0.5, op @ vectors
    assert bool(((mean - expected).abs() <= 5 * deviation + 1e-12).all())
    assert float(deviation.max()) < 0.1 * float(expected.max())


def test_condition_holds_with_the_certified_constant() -> None:
    """E H̃² - G² ⪯ C tr(G) G in dense fp64, with C = 1 for q ∝ tr(G_i), and with less it fails somewhere."""
    one = fitted()
    blocks = torch.stack(
        [dense_gauss_newton(p.model, p.loss, p.inputs, p.targets) for p in map(one.part, range(150))]
    )
    matrix = blocks.mean(0)
    traces = exact_traces(GaussNewtonOperator(*one))
    torch.testing.assert_close(traces, blocks.diagonal(dim1=1, dim2=2).sum(1), rtol=1e-9, atol=1e-12)
    scores = output_curvatures(GaussNewtonOperator(*one))
    candidates = {
        "traces": importance_probabilities(traces),
        "floor": importance_probabilities(traces, floor=0.1),
        "cheap": importance_probabilities(scores, uniform=0.1),
        "uniform": torch.full_like(traces, 1 / len(traces)),
    }
    measured = {}
    for name, q in candidates.items():
        second = torch.einsum("nij,njk->ik", blocks / (len(blocks) ** 2 * q)[:, None, None], blocks)
        bound = certified_constant(traces, q)
        gap = bound * torch.trace(matrix) * matrix - (second - matrix @ matrix)
        assert float(torch.linalg.eigvalsh(gap).min()) >= -1e-9 * float(torch.linalg.eigvalsh(second).max())
        values, vectors = torch.linalg.eigh(matrix)
        top = vectors[:, -1]
        measured[name] = float(top @ (second - matrix @ matrix) @ top / (torch.trace(matrix) * values[-1]))
        assert measured[name] <= bound
    assert certified_constant(traces, candidates["traces"]) == pytest.approx(1)
    assert certified_constant(traces, candidates["floor"]) <= 1.1
    assert certified_constant(traces, candidates["uniform"]) == pytest.approx(float(traces.max() / traces.mean()))
    assert measured["uniform"] > 3 * measured["traces"]
    assert measured["uniform"] > 2 * measured["cheap"]


def test_probabilities_and_their_bound() -> None:
    scores = torch.tensor([0.0, 1.0, 7.0])
    torch.testing.assert_close(importance_probabilities(scores), torch.tensor([0, 1 / 8, 7 / 8]).double())
    mean = 8 / 3
    raised = torch.tensor([0.5 * mean, 0.5 * mean, 7.0]).double()
    torch.testing.assert_close(importance_probabilities(scores, floor=0.5), raised / raised.sum())
    mixed = 0.9 * torch.tensor([0, 1 / 8, 7 / 8]).double() + 0.1 / 3
    torch.testing.assert_close(importance_probabilities(scores, uniform=0.1), mixed)
    torch.testing.assert_close(importance_probabilities(torch.zeros(4)), torch.full((4,), 0.25).double())
    assert certified_constant(scores, mixed) == pytest.approx(7 / 3 / (7 / 8 * 0.9 + 0.1 / 3) / mean)
    assert certified_constant(scores, torch.tensor([0.5, 0.5, 0])) == torch.inf
    assert certified_constant(scores, importance_probabilities(scores)) == pytest.approx(1)
    assert certified_constant(torch.zeros(3), mixed) == 0


def test_what_is_refused() -> None:
    one = named("mlp_tanh-ce")
    op = GaussNewtonOperator(*one)
    refuses("one probability for each of 5 examples", ImportanceOperator, op, torch.ones(4))
    refuses("not all 0", ImportanceOperator, op, torch.zeros(5))
    with pytest.raises(TypeError, match="pass a GaussNewtonOperator"):
        ImportanceOperator(FisherOperator(*one, kind="empirical"), torch.ones(5))
    refuses("batch_size must be at least 1", ImportanceOperator(op, torch.ones(5)).sample, 0)
    refuses("finite and not negative", importance_probabilities, torch.tensor([1.0, -1.0]))
    refuses("floor must be at least 0", importance_probabilities, torch.ones(2), floor=-1)


@pytest.mark.parametrize("name", ["mlp_tanh-ce", "recurrent-ce", "layer_norm-ce", "language"])
def test_importance_is_found_for_any_model(name: str) -> None:
    op = GaussNewtonOperator(*named(name))
    q = example_importance(op).probabilities
    assert float(q.sum()) == pytest.approx(1)
    if name == "mlp_tanh-ce":
        assert certified_constant(exact_traces(op), q) <= 1.01 + 1e-12
    else:
        assert float(q.min()) >= 0.1 / len(q)
