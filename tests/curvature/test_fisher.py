import pytest
import torch
from curvature_cases import MODELS, Problem, language_problem, problem
from curvature_oracles import dense_empirical_fisher, dense_exact_fisher
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from curvlab.curvature import FisherOperator, GaussNewtonOperator


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


@pytest.mark.parametrize("loss", ["ce", "mse", "bce"])
def test_monte_carlo_labels_stay_with_their_examples_in_batches(loss: str) -> None:
    case = problem("mlp_tanh", loss)
    batches = [(case.inputs[:2], case.targets[:2]), (case.inputs[2:], case.targets[2:])]
    op = FisherOperator(
        case.model, case.loss, batches, kind="monte_carlo", generator=torch.Generator().manual_seed(0)
    )
    dense = op.to_dense()
    assert torch.linalg.matrix_rank(dense, rtol=1e-10) == 5
    assert torch.equal(op.to_dense(), dense)


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


def test_monte_carlo_needs_a_generator() -> None:
    with pytest.raises(ValueError, match="generator"):
        FisherOperator(*problem("linear", "ce"), kind="monte_carlo")


def test_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"exact.*monte_carlo.*empirical"):
        FisherOperator(*problem("linear", "ce"), kind="true")


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
