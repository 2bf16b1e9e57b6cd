"""What all three operators share: products, columns, sampling, conversion, a model left untouched."""

import copy

import pytest
import torch
from curvature_cases import MODELS, ModelCase, Problem, language_problem, problem
from curvature_oracles import counts_in
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator


def empirical(*args, **settings) -> FisherOperator:
    return FisherOperator(*args, kind="empirical", **settings)


def exact(*args, **settings) -> FisherOperator:
    return FisherOperator(*args, kind="exact", **settings)


def monte_carlo(*args, **settings) -> FisherOperator:
    return FisherOperator(*args, kind="monte_carlo", generator=torch.Generator().manual_seed(0), **settings)


def finite_differences(*args, **settings) -> GaussNewtonOperator:
    return GaussNewtonOperator(*args, jvp="finite_difference", **settings)


DETERMINISTIC = [GaussNewtonOperator, HessianOperator, exact, empirical]
OPERATORS = [*DETERMINISTIC, monte_carlo]
every_operator = pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.__name__)


# ---------------------------------------------------------------------------------------- products
@pytest.mark.parametrize("operator", [GaussNewtonOperator, HessianOperator, monte_carlo])
@pytest.mark.parametrize("columns", ["loop", "vmap"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_products_equal_the_matrix_column_by_column(operator, columns: str, model: ModelCase) -> None:
    op = operator(*problem(model, "ce"), columns=columns)
    vectors = op.randn(3, torch.Generator().manual_seed(1))
    together, one_by_one = op @ vectors, torch.stack([op @ v for v in vectors.T], dim=1)
    reference = operator(*problem(model, "ce")).to_dense()
    assert_close(together, one_by_one, rtol=1e-10, atol=1e-12)
    assert_close(together, reference @ vectors, rtol=1e-10, atol=1e-12)


@every_operator
@pytest.mark.parametrize("columns", ["loop", "vmap"])
def test_columns_on_a_language_model(operator, columns: str) -> None:
    op = operator(*language_problem("mean"), columns=columns, batch_size=2)
    vectors = op.randn(3, torch.Generator().manual_seed(1))
    assert_close(op @ vectors, operator(*language_problem("mean")).to_dense() @ vectors, rtol=1e-10, atol=1e-12)


def test_more_columns_than_go_through_vmap_at_once() -> None:
    op = GaussNewtonOperator(*problem("mlp_tanh", "ce"), columns="vmap")
    vectors = op.randn(70, torch.Generator().manual_seed(0))
    assert_close(op @ vectors, op.to_dense() @ vectors)


def test_unknown_columns_are_refused() -> None:
    with pytest.raises(ValueError, match=r"auto.*vmap.*loop|loop.*vmap"):
        GaussNewtonOperator(*problem("linear", "ce"), columns="parallel") @ torch.zeros(15).double()


# ------------------------------------------------------------------------------ model left untouched
@pytest.mark.parametrize("operator", [*OPERATORS, "finite_difference"])
@pytest.mark.parametrize("model", ["conv_batch_norm", "frozen"])
def test_the_model_and_the_global_generator_are_left_as_they_were(operator, model: str) -> None:
    case = problem(model, "ce")
    before = copy.deepcopy(case.model.state_dict())
    trained = [parameter.requires_grad for parameter in case.model.parameters()]
    random_state, parameters = torch.get_rng_state(), list(case.model.parameters())
    gradients = [torch.full_like(parameter, 3.0) for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    if operator == "finite_difference":
        op = GaussNewtonOperator(*case, jvp="finite_difference")
    else:
        op = operator(*case)
    product = op @ op.randn(2, torch.Generator()) + op.sample(2, torch.Generator()) @ op.randn(
        2, torch.Generator()
    )
    assert not product.requires_grad
    for name, tensor in case.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(a is b for a, b in zip(case.model.parameters(), parameters, strict=True))
    assert [parameter.requires_grad for parameter in case.model.parameters()] == trained
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(parameters, gradients, strict=True))
    assert not any(module.training for module in case.model.modules())
    assert torch.equal(torch.get_rng_state(), random_state)


@every_operator
@pytest.mark.parametrize("columns", ["loop", "vmap"])
def test_products_carry_no_graph(operator, columns: str) -> None:
    case = problem("mlp_tanh", "mse")
    inputs, targets = case.inputs.clone().requires_grad_(), case.targets.clone().requires_grad_()
    op, reference = operator(case.model, case.loss, (inputs, targets), columns=columns), operator(*case)
    vectors = op.randn(3, torch.Generator().manual_seed(1)).requires_grad_()
    for product in (op @ vectors, op @ vectors[:, 0], op.sample(3, torch.Generator()) @ vectors):
        assert not product.requires_grad
    assert_close(op @ vectors, reference @ vectors.detach(), rtol=1e-12, atol=1e-14)
    assert inputs.grad is None


@pytest.mark.parametrize("operator", [*OPERATORS, finite_differences], ids=lambda operator: operator.__name__)
@pytest.mark.parametrize("columns", ["loop", "vmap"])
def test_products_in_inference_mode(operator, columns: str) -> None:
    case = problem("mlp_tanh", "mse")
    vectors = operator(*case).randn(3, torch.Generator().manual_seed(1))
    expected = operator(*case) @ vectors
    sampled = operator(*case).sample(3, torch.Generator().manual_seed(0)) @ vectors
    with torch.inference_mode():
        op = operator(case.model, case.loss, (case.inputs.clone(), case.targets.clone()), columns=columns)
        assert_close(op @ vectors.clone(), expected)
        assert_close(op @ vectors.clone()[:, 0], expected[:, 0])
        assert_close(op.sample(3, torch.Generator().manual_seed(0)) @ vectors, sampled)
    assert_close(op @ vectors, expected)


# ---------------------------------------------------------------------------------------- sampling
def forms(case: Problem) -> dict[str, object]:
    return {
        "tensors": (case.inputs, case.targets),
        "dataset": TensorDataset(case.inputs, case.targets),
        "batches": list(zip(case.inputs.split([1, 4]), case.targets.split([1, 4]), strict=True)),
    }


@pytest.mark.parametrize("operator", DETERMINISTIC, ids=lambda operator: operator.__name__)
@pytest.mark.parametrize("form", ["tensors", "dataset", "batches"])
@pytest.mark.parametrize("loss", ["ce", "ce_sum", "mse", "bce"])
def test_a_sample_is_the_operator_on_the_drawn_examples(operator, form: str, loss: str) -> None:
    case = problem("mlp_tanh", loss)
    scale = 5 if loss.endswith("_sum") else 1  # a sum over the data is 5 times the mean over examples
    parts = [scale * operator(*case.part(n)).to_dense() / 3 for n in range(5)]
    op = operator(case.model, case.loss, forms(case)[form], batch_size=2)
    drawn = [counts_in(op.sample(3, torch.Generator().manual_seed(seed)).to_dense(), parts) for seed in range(4)]
    assert all(counts.sum() == 3 and counts.min() >= 0 for counts in drawn)
    assert len({tuple(counts.tolist()) for counts in drawn}) > 1


@pytest.mark.parametrize("operator", DETERMINISTIC, ids=lambda operator: operator.__name__)
@pytest.mark.parametrize("form", ["tensors", "dataset", "batches"])
@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_a_sample_of_sequences_divides_by_the_mean_number_of_tokens(operator, form: str, loss: str) -> None:
    case = language_problem(loss)
    with_tokens = [0, 1, 3, 4]
    summed = Problem(case.model, nn.CrossEntropyLoss(reduction="sum"), case.inputs, case.targets)
    mean_tokens = (4 + 2 + 0 + 3 + 1) / 5
    scale = 1 / (6 * mean_tokens) if loss == "mean" else 5 / 6
    parts = [scale * operator(*summed.part(n)).to_dense() for n in with_tokens]
    op = operator(case.model, case.loss, forms(case)[form], batch_size=2)
    drawn = [counts_in(op.sample(6, torch.Generator().manual_seed(seed)).to_dense(), parts) for seed in range(8)]
    totals = [int(counts.sum()) for counts in drawn]
    assert max(totals) <= 6
    assert min(totals) < 6  # the sequence without predicted tokens is drawn as often as any other


@pytest.mark.parametrize("form", ["tensors", "dataset", "batches"])
def test_examples_are_drawn_uniformly_with_replacement(form: str, generator: torch.Generator) -> None:
    # With unit vectors as inputs, 1 output and squared loss, the matrix is diag(2 / 5): counts can be read off.
    case = Problem(
        nn.Linear(5, 1, bias=False).double(), nn.MSELoss(), torch.eye(5).double(), torch.ones(5, 1).double()
    )
    op = GaussNewtonOperator(case.model, case.loss, forms(case)[form])
    ones, num_samples = torch.ones(5, dtype=torch.float64), 400
    counts = torch.stack([op.sample(4, generator) @ ones for _ in range(num_samples)]) * 4 / 2
    assert_close(counts, counts.round())
    assert (counts.sum(1) == 4).all()
    # each count is binomial(4, 1/5)
    assert ((counts.mean(0) - 4 / 5).abs() < 5 * (4 * 0.2 * 0.8 / num_samples) ** 0.5).all()
    assert_close(counts.var(0), torch.full((5,), 4 * 0.2 * 0.8).double(), rtol=0.25, atol=0)


def test_monte_carlo_samples_keep_the_labels_drawn_at_construction(generator: torch.Generator) -> None:
    # The same diagonal model with cross-entropy over two classes: entry (k, n) is r_nk² / 5 with fixed r.
    model = nn.Linear(5, 2, bias=False).double()
    data = (torch.eye(5).double(), torch.zeros(5, dtype=torch.long))
    op = monte_carlo(model, nn.CrossEntropyLoss(), data)
    whole = op.to_dense().diagonal()
    for _ in range(10):
        counts = (op.sample(3, generator).to_dense().diagonal() / whole).view(2, 5) * 3 / 5
        assert_close(counts, counts.round())
        assert_close(counts.sum(1), torch.full((2,), 3.0).double())


def test_the_draw_does_not_depend_on_the_form_of_the_data() -> None:
    case = problem("mlp_tanh", "ce")
    samples = [
        GaussNewtonOperator(case.model, case.loss, data).sample(3, torch.Generator().manual_seed(7)).to_dense()
        for data in (*forms(case).values(), DataLoader(TensorDataset(case.inputs, case.targets), batch_size=2))
    ]
    for sample in samples[1:]:
        assert_close(sample, samples[0])


@pytest.mark.parametrize("batch_size", [0, -3])
def test_sample_size_must_be_positive(batch_size: int, generator: torch.Generator) -> None:
    with pytest.raises(ValueError, match="batch_size"):
        GaussNewtonOperator(*problem("linear", "ce")).sample(batch_size, generator)
