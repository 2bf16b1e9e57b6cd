"""Operators over data in batches, and what is computed example by example."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from curvlab.curvature import (
    FisherOperator,
    GaussNewtonOperator,
    HessianOperator,
    exact_traces,
    has_exact_traces,
    output_curvatures,
    sampled_traces,
)
from tests.curvature.curvature_cases import MODELS, ModelCase, Problem, language_problem, problem
from tests.curvature.curvature_oracles import counts_in, dense_gauss_newton, outputs
from tests.refusals import refuses


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
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_products_equal_the_matrix_column_by_column(operator, model: ModelCase) -> None:
    case = problem(model, "ce")
    op = operator(*case, columns="vmap")
    vectors = op.randn(3, torch.Generator().manual_seed(1))
    expected = operator(*case).to_dense() @ vectors
    together = (op @ vectors, operator(*case, columns="loop") @ vectors)
    for found in (*together, torch.stack([op @ v for v in vectors.T], dim=1)):
        assert_close(found, expected, rtol=1e-10, atol=1e-12)


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
@pytest.mark.parametrize(
    ("form", "loss"), [("tensors", "ce"), ("dataset", "ce_sum"), ("batches", "mse"), ("batches", "bce")]
)
def test_a_sample_is_the_operator_on_the_drawn_examples(operator, form: str, loss: str) -> None:
    case = problem("mlp_tanh", loss)
    scale = 5 if loss.endswith("_sum") else 1  # a sum over the data is 5 times the mean over examples
    parts = [scale * operator(*case.part(n)).to_dense() / 3 for n in range(5)]
    op = operator(case.model, case.loss, forms(case)[form], batch_size=2)
    drawn = [counts_in(op.sample(3, torch.Generator().manual_seed(seed)).to_dense(), parts) for seed in range(4)]
    assert all(counts.sum() == 3 and counts.min() >= 0 for counts in drawn)
    assert len({tuple(counts.tolist()) for counts in drawn}) > 1


@pytest.mark.parametrize("operator", DETERMINISTIC, ids=lambda operator: operator.__name__)
@pytest.mark.parametrize(("form", "loss"), [("tensors", "sum"), ("dataset", "mean"), ("batches", "mean")])
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


def test_examples_are_drawn_uniformly_with_replacement(generator: torch.Generator) -> None:
    # With unit vectors as inputs, 1 output and squared loss, the matrix is diag(2 / 5): counts can be read off.
    case = Problem(
        nn.Linear(5, 1, bias=False).double(), nn.MSELoss(), torch.eye(5).double(), torch.ones(5, 1).double()
    )
    op = GaussNewtonOperator(*case)
    ones, num_samples = torch.ones(5, dtype=torch.float64), 400
    counts = torch.stack([op.sample(4, generator) @ ones for _ in range(num_samples)]) * 4 / 2
    assert_close(counts, counts.round())
    assert (counts.sum(1) == 4).all()
    # each count is binomial(4, 1/5)
    assert ((counts.mean(0) - 4 / 5).abs() < 5 * (4 * 0.2 * 0.8 / num_samples) ** 0.5).all()
    assert_close(counts.var(0), torch.full((5,), 4 * 0.2 * 0.8).double(), rtol=0.25, atol=0)


def test_the_draw_does_not_depend_on_the_form_of_the_data() -> None:
    case = problem("mlp_tanh", "ce")
    samples = [
        GaussNewtonOperator(case.model, case.loss, data).sample(3, torch.Generator().manual_seed(7)).to_dense()
        for data in (*forms(case).values(), DataLoader(TensorDataset(case.inputs, case.targets), batch_size=2))
    ]
    for sample in samples[1:]:
        assert_close(sample, samples[0])


# --- Traces of single examples against dense fp64 Gauss-Newton blocks, one autograd row at a time
LAYERED = ["linear", "mlp_tanh", "mlp_relu", "conv", "linear-ce_sum", "linear-ce_ignore", "linear-ce_smoothing"]
LAYERED += ["linear-mse", "linear-mse_sum", "linear-bce", "conv-bce", "conv-mse", "conv-ce_ignore"]


def named(name: str) -> Problem:
    model, _, loss = name.partition("-")
    if model == "language":
        return language_problem(loss)
    return problem(model, loss or "ce")


def dense_traces(one: Problem) -> Tensor:
    """tr(G_i) with mean tr(G): the sum over example i, as the loss of reduction="sum" has it, N/n times."""
    whole = torch.trace(dense_gauss_newton(*one_tuple(one)))
    summed = summing(one.loss)
    parts = []
    for n in range(len(one.targets)):
        part = one.part(n)
        ignored = isinstance(summed, nn.CrossEntropyLoss) and bool((part.targets == summed.ignore_index).all())
        block = (
            torch.zeros(()).double()
            if ignored
            else torch.trace(dense_gauss_newton(part.model, summed, part.inputs, part.targets))
        )
        parts.append(block)
    traces = torch.stack(parts)
    return traces * whole / traces.mean()  # the scale from the loss as it is


def one_tuple(one: Problem) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    return one.model, one.loss, one.inputs, one.targets


def summing(loss: nn.Module) -> nn.Module:
    if isinstance(loss, nn.CrossEntropyLoss):
        return nn.CrossEntropyLoss(
            reduction="sum", ignore_index=loss.ignore_index, label_smoothing=loss.label_smoothing
        )
    return type(loss)(reduction="sum")


@pytest.mark.parametrize("name", LAYERED)
@pytest.mark.parametrize("batch_size", [2, 512])
def test_exact_traces_are_those_of_dense_blocks(name: str, batch_size: int) -> None:
    one = named(name)
    operator = GaussNewtonOperator(*one, batch_size=batch_size)
    assert has_exact_traces(operator)
    traces = exact_traces(operator)
    torch.testing.assert_close(traces, dense_traces(one), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(traces.mean(), torch.trace(dense_gauss_newton(*one_tuple(one))), rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", ["layer_norm", "frozen", "tied", "unused", "attention", "recurrent"])
def test_exact_traces_refuse_what_no_layer_holds(name: str) -> None:
    operator = GaussNewtonOperator(*named(name))
    refuses("Use sampled_traces", exact_traces, operator)
    assert not has_exact_traces(operator)


def test_only_the_whole_gauss_newton_matrix_has_them() -> None:
    one = named("mlp_tanh")
    with pytest.raises(TypeError, match="pass a GaussNewtonOperator, got FisherOperator"):
        output_curvatures(FisherOperator(*one, kind="empirical"))
    sample, labels = GaussNewtonOperator(*one).sample(2), FisherOperator(*one, kind="empirical")
    refuses("not a sample", exact_traces, sample)
    assert not has_exact_traces(sample)
    assert not has_exact_traces(labels)
    torch.testing.assert_close(exact_traces(FisherOperator(*one)), exact_traces(GaussNewtonOperator(*one)))


def drawn_traces(one: Problem, generator: torch.Generator, *, num_draws: int = 1, num_copies: int = 10) -> Tensor:
    """(copies, examples): the data many times over, so that one pass draws as often for each example."""
    inputs, targets = (part.repeat(num_copies, *[1] * (part.ndim - 1)) for part in (one.inputs, one.targets))
    op = GaussNewtonOperator(one.model, one.loss, (inputs, targets), batch_size=2000)
    scale = num_copies if one.loss.reduction == "sum" else 1
    return sampled_traces(op, num_draws=num_draws, generator=generator).view(num_copies, -1) / scale


SAMPLED = ["conv-ce_ignore", "layer_norm-mse", "frozen-bce", "tied", "recurrent", "unused"]


@pytest.mark.parametrize("name", [*SAMPLED, "language-sum", "language-smoothing"])
def test_sampled_traces_are_unbiased(name: str, generator: torch.Generator) -> None:
    """Of a sequence, too: one gradient norm, labels drawn token by token, for the sum over its tokens."""
    one = named(name)
    blocks = torch.stack([drawn_traces(one, generator, num_draws=2).mean(0) for _ in range(20)])
    deviations = blocks.std(0) / len(blocks) ** 0.5
    expected = dense_traces(one)
    assert bool(((blocks.mean(0) - expected).abs() <= 4.5 * deviations + 1e-9 * expected).all())
    if name.startswith("language"):
        assert float(expected[2]) == float(blocks[:, 2].max()) == 0  # every token is ignored
        return
    assert float((deviations / expected.clamp(min=1e-12))[expected > 0].max()) < 0.25  # it could have failed


def test_one_draw_tells_of_confident_examples(generator: torch.Generator) -> None:
    """Where p is near 1, labels drawn from the model leave nearly all of the trace to rare draws; ours do not."""
    one = named("mlp_tanh")
    with torch.no_grad():
        one.model[-1].weight *= 20
    expected = dense_traces(one)
    assert float(outputs(one.model, one.inputs).detach().softmax(-1).amax()) > 1 - 1e-6
    draws = drawn_traces(one, generator, num_copies=400)
    torch.testing.assert_close(draws.mean(0), expected, rtol=0.15, atol=0)
    assert float((draws.std(0) / expected).max()) < 1.5  # of labels: sqrt(1 / rare p), above 100


@pytest.mark.parametrize("name", ["linear", "linear-ce_sum", "conv-ce_ignore", "linear-bce", "layer_norm"])
def test_output_curvatures_are_traces_of_output_hessians(name: str) -> None:
    one = named(name)
    op = GaussNewtonOperator(*one)
    h = outputs(one.model, one.inputs).detach()
    if isinstance(one.loss, nn.CrossEntropyLoss):
        expected = (1 - h.softmax(-1).square().sum(-1)) * (one.targets != one.loss.ignore_index)
    else:
        expected = (h.sigmoid() * (1 - h.sigmoid())).sum(-1)
    torch.testing.assert_close(output_curvatures(op), expected * len(h) / op.divisor, rtol=1e-12, atol=0)


def test_output_curvatures_of_sequences() -> None:
    one = language_problem("mean")
    h = outputs(one.model, one.inputs).detach()
    kept = one.targets != -100
    expected = ((1 - h.softmax(-1).square().sum(-1)) * kept).sum(1) * len(h) / kept.sum()
    torch.testing.assert_close(output_curvatures(GaussNewtonOperator(*one)), expected, rtol=1e-12, atol=1e-15)
