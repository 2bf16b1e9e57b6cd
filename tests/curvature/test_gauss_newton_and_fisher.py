"""Gauss-Newton, Hessian and Fisher matrices, with weights."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator
from curvlab.curvature.rows import dense_matrix, numbers_of_row, principal_rows
from curvlab.linalg import DenseOperator, LinearOperator, identity
from tests.curvature.curvature_cases import MODELS, Problem, language_problem, problem
from tests.curvature.curvature_oracles import (
    dense_empirical_fisher,
    dense_exact_fisher,
    dense_gauss_newton,
    dense_hessian,
)
from tests.curvature.loss_cases import CLASSES, WEIGHTS, focal, inputs, network
from tests.refusals import refuses


@pytest.mark.parametrize(
    ("operator", "oracle"), [(GaussNewtonOperator, dense_gauss_newton), (HessianOperator, dense_hessian)]
)
def test_matches_dense(each_problem: Problem, operator, oracle) -> None:
    dense = oracle(each_problem.model, each_problem.loss, each_problem.inputs, each_problem.targets)
    op = operator(*each_problem)
    assert (op.shape, op.dtype) == (dense.shape, torch.float64)
    for found in (op.to_dense(), dense_matrix(op)):  # the second by rows where layers hold all parameters
        assert_close(found, dense, rtol=1e-10, atol=1e-10 * dense.abs().max().item())


def test_they_are_one_for_a_linear_model() -> None:
    linear = problem("linear", "ce_all")
    hessian, gauss_newton = HessianOperator(*linear).to_dense(), GaussNewtonOperator(*linear).to_dense()
    assert_close(hessian, gauss_newton, rtol=1e-10, atol=1e-12)


# --- Weights of examples and draws by probabilities, against sums of single examples' dense matrices
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
    refuses(r"one weight for each of 6 examples.*\(5,\)", op.weighted, torch.ones(5))
    refuses(r"whole data.*not a sample", op.sample(3).weighted, torch.ones(6))


def test_weights_of_zero_leave_nothing() -> None:
    model, data = network(3).float(), (inputs().float(), CLASSES)
    for op in (
        GaussNewtonOperator(model, nn.CrossEntropyLoss(), data),
        FisherOperator(model, nn.CrossEntropyLoss(), data, kind="empirical"),
    ):
        nothing = torch.full((6,), 1e-60, dtype=torch.float64)  # 0 in the model's dtype
        assert float(op.weighted(nothing).to_dense().abs().max()) == 0
        refuses("all weights are 0: no example is left", op.weighted, torch.zeros(6))


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
    refuses(message, GaussNewtonOperator(*problem("mlp_tanh", "ce")).sample, 2, None, probabilities)


# ----------------------------------------------------------------------------------------
def monte_carlo(case: Problem, seed: int = 0) -> FisherOperator:
    return FisherOperator(*case, kind="monte_carlo", generator=torch.Generator().manual_seed(seed))


def test_empirical_matches_dense(each_problem: Problem) -> None:
    case = each_problem
    dense = dense_empirical_fisher(case.model, case.loss, case.inputs, case.targets)
    op = FisherOperator(*case, kind="empirical")
    assert_close(op.to_dense(), dense, rtol=1e-10, atol=1e-10 * dense.abs().max().item())
    assert op.is_psd


@pytest.mark.parametrize("loss", ["ce", "ce_sum", "ce_ignore"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_exact_is_the_expectation_over_all_labels(model, loss: str) -> None:
    case = problem(model, loss)
    dense = dense_exact_fisher(case.model, case.loss, case.inputs, case.targets)
    assert_close(FisherOperator(*case, kind="exact").to_dense(), dense, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loss", ["ce", "ce_smoothing", "mse", "mse_sum", "bce", "bce_sum"])
def test_exact_is_the_gauss_newton_matrix(loss: str) -> None:
    case = problem("mlp_tanh", loss)
    assert_close(FisherOperator(*case, kind="exact").to_dense(), GaussNewtonOperator(*case).to_dense())


@pytest.mark.parametrize("loss", ["ce", "ce_sum", "ce_all", "ce_smoothing", "mse", "mse_sum", "bce", "bce_sum"])
def test_monte_carlo_is_unbiased_for_exact(loss: str) -> None:
    check_mean(problem("linear", loss))


@pytest.mark.parametrize("loss", ["mean", "smoothing"])
def test_monte_carlo_is_unbiased_for_exact_language_models(loss: str) -> None:
    check_mean(language_problem(loss))


def test_monte_carlo_may_draw_the_class_that_marks_ignored_targets() -> None:
    case = problem("linear", "ce")
    padded = Problem(case.model, nn.CrossEntropyLoss(ignore_index=0), case.inputs, case.targets)
    check_mean(padded)


def check_mean(case: Problem, *, num_copies: int = 20, num_operators: int = 40) -> None:
    """The data 20 times over: one operator then holds 20 independent draws of every label."""
    exact = GaussNewtonOperator(*case)
    vectors = exact.randn(3, torch.Generator().manual_seed(0))
    expected = exact @ vectors
    copies = Problem(
        case.model,
        case.loss,
        case.inputs.repeat(num_copies, *[1] * (case.inputs.ndim - 1)),
        case.targets.repeat(num_copies, *[1] * (case.targets.ndim - 1)),
    )
    scale = num_copies if case.loss.reduction == "sum" else 1
    stacked = torch.stack([monte_carlo(copies, seed) @ vectors / scale for seed in range(num_operators)])
    stderr = stacked.std(0) / num_operators**0.5
    assert (stderr < 0.2 * expected.abs().max()).all()  # enough draws to notice a wrong factor
    assert ((stacked.mean(0) - expected).abs() <= 5 * stderr + 1e-12).all()


@pytest.mark.parametrize("loss", ["ce", "ce_ignore", "mse", "bce_sum"])
def test_monte_carlo_labels_are_drawn_once(loss: str) -> None:
    case = problem("mlp_tanh", loss)
    op = monte_carlo(case)
    dense = op.to_dense()
    assert torch.equal(op.to_dense(), dense)
    assert_close(dense, dense.T)
    assert_close(monte_carlo(case).to_dense(), dense, rtol=0, atol=0)
    assert not torch.allclose(monte_carlo(case, seed=1).to_dense(), dense)
    kept = 3 if loss == "ce_ignore" else 5
    assert torch.linalg.matrix_rank(dense, rtol=1e-10) == kept  # one gradient an example that is not ignored
    assert op.is_psd


def test_monte_carlo_ignores_the_data_labels() -> None:
    case = problem("mlp_tanh", "ce")
    other = Problem(case.model, case.loss, case.inputs, (case.targets + 1) % 3)
    assert_close(monte_carlo(case).to_dense(), monte_carlo(other).to_dense(), rtol=0, atol=0)
    assert not torch.allclose(
        FisherOperator(*case, kind="empirical").to_dense(), FisherOperator(*other, kind="empirical").to_dense()
    )


def test_monte_carlo_labels_stay_with_their_examples_in_a_loader() -> None:
    # The model is certain of a different class for every example: labels drawn from it leave no gradient.
    model = nn.Linear(8, 8, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(100 * torch.eye(8))
    dataset = TensorDataset(torch.eye(8).double(), torch.zeros(8, dtype=torch.long))
    op = FisherOperator(
        model,
        nn.CrossEntropyLoss(),
        DataLoader(dataset, batch_size=3, sampler=[3, 1, 0, 2, 7, 6, 5, 4]),
        kind="monte_carlo",
        generator=torch.Generator().manual_seed(0),
    )
    assert op.to_dense().abs().max() < 1e-20


def test_empirical_vanishes_where_the_data_are_fitted() -> None:
    case = problem("linear", "mse")
    fitted = Problem(case.model, nn.MSELoss(), case.inputs, case.model(case.inputs).detach())
    assert FisherOperator(*fitted, kind="empirical").to_dense().abs().max() < 1e-20


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_empirical_of_outputs_without_an_axis_of_their_own(reduction: str, generator: torch.Generator) -> None:
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)).double()  # (N, 3) -> (N,)
    inputs, targets = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 3), (4,)))
    loss = nn.MSELoss(reduction=reduction)
    op = FisherOperator(model, loss, (inputs, targets), kind="empirical")
    assert_close(op.to_dense(), dense_empirical_fisher(model, loss, inputs, targets), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("name", "reader"), [("layer_norm", "_rows_of_one"), ("conv", "recorded")])
def test_no_more_rows_are_held_than_asked_for(name: str, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of all parameters, and of convolutions: those of 256 examples with all outputs may be gigabytes."""
    one, module, held = problem(name, "ce"), sys.modules[principal_rows.__module__], []
    size, original = [0], getattr(module, reader)

    def counted(*args: Any) -> Any:
        found = [each for each in gc.get_objects() if type(each) is Tensor and each.ndim == 2]
        held.append(sum(len(each) for each in found if each.shape[1] == size[0]))
        return original(*args)

    every = torch.arange(len(one.inputs))
    dense = next(part for part in principal_rows(GaussNewtonOperator(*one), every, 3)[0] if len(part.tensors) == 1)
    size[0] = dense.tensors[0].shape[1]
    dense = None
    monkeypatch.setattr(module, reader, counted)
    parts, num_outputs = principal_rows(GaussNewtonOperator(*one), every, 3)
    (dense,) = (part for part in parts if len(part.tensors) == 1 and part.tensors[0].shape[1] == size[0])
    assert len(dense.tensors[0]) == 3
    assert len(held) == len(every)  # one example at a time
    assert max(held) <= 3 + num_outputs
    assert_close(dense.gram().diagonal().sort().values, dense.squares.sort().values)


@pytest.mark.parametrize(("places", "expected"), [((), 3 + 5 + 1 + 2 + 3 + 1), ((4,), 3 * 6 + 2 + 3 + 1)])
def test_a_row_of_a_linear_layer_with_several_places_is_as_long_as_its_weights(places, expected) -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).tanh().flatten(1, -2).mean(1) if x.ndim > 2 else self.first(x).tanh())

    data = torch.randn(6, *places, 5), torch.arange(6) % 2
    assert numbers_of_row(GaussNewtonOperator(Mean().eval(), nn.CrossEntropyLoss(), data)) == expected
