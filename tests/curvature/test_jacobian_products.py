"""Forward mode against finite differences."""

import pytest
import torch
from curvature_cases import MODELS, language_problem, problem
from curvature_oracles import dense_gauss_newton
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.testing import assert_close

from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator

SMOOTH = [model for model in MODELS if model.smooth]


def relative_error(approximate: Tensor, exact: Tensor) -> float:
    return ((approximate - exact).norm() / exact.norm()).item()


def errors(*args, scale: float = 1.0, **settings) -> list[float]:
    forward = GaussNewtonOperator(*args)
    finite = GaussNewtonOperator(*args, jvp="finite_difference", **settings)
    vectors = scale * forward.randn(2, torch.Generator().manual_seed(0))
    together = finite @ vectors
    assert_close(together, torch.stack([finite @ v for v in vectors.T], dim=1))
    return [relative_error(finite @ v, forward @ v) for v in vectors.T]


@pytest.mark.parametrize("loss", ["ce", "mse", "bce"])
@pytest.mark.parametrize("model", SMOOTH, ids=lambda model: model.name)
def test_finite_differences_of_smooth_models(model, loss: str) -> None:
    assert max(errors(*problem(model, loss))) < 1e-6


def test_finite_differences_of_a_language_model() -> None:
    assert max(errors(*language_problem("mean"))) < 1e-6


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1e3, 1e12])
def test_the_step_is_the_norm_of_the_perturbation(scale: float) -> None:
    case = problem("mlp_tanh", "ce")
    assert max(errors(*case, scale=scale)) < 1e-6  # δ = step / ‖v‖: the vector's own length does not matter
    unscaled = GaussNewtonOperator(*case, jvp="finite_difference")
    vector = unscaled.randn(1, torch.Generator().manual_seed(0))[:, 0]
    assert_close(unscaled @ (scale * vector), scale * (unscaled @ vector), rtol=1e-6, atol=0)


def test_the_error_is_of_second_order_in_the_step() -> None:
    case = problem("mlp_tanh", "ce")
    coarse, fine = (max(errors(*case, fd_step=step)) for step in (1e-2, 1e-3))
    assert 80 < coarse / fine < 125


def test_default_step_in_single_precision() -> None:
    case = problem("mlp_tanh", "ce")
    case.model.float()
    default, stated, other = (
        GaussNewtonOperator(*case, jvp="finite_difference", fd_step=step) for step in (None, 1e-3, 1e-2)
    )
    vector = default.randn(1, torch.Generator().manual_seed(0))[:, 0]
    assert torch.equal(default @ vector, stated @ vector)
    assert not torch.equal(default @ vector, other @ vector)
    assert max(errors(*case)) < 2e-3


def test_the_zero_vector_gives_zero() -> None:
    op = GaussNewtonOperator(*problem("mlp_tanh", "ce"), jvp="finite_difference")
    assert torch.equal(op @ torch.zeros(op.shape[0]).double(), torch.zeros(op.shape[0]).double())


def bag_of_words() -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]:
    """A model whose kernel has no forward-mode derivative."""
    model = nn.EmbeddingBag(6, 3).double()
    tokens = torch.tensor([[0, 1, 2], [3, 3, 4], [5, 0, 1], [2, 2, 2]])
    return model, nn.CrossEntropyLoss(), (tokens, torch.tensor([0, 1, 2, 0]))


def test_finite_differences_do_without_forward_mode() -> None:
    model, loss, (tokens, classes) = bag_of_words()
    dense = dense_gauss_newton(model, loss, tokens, classes)
    op = GaussNewtonOperator(model, loss, (tokens, classes), jvp="finite_difference")
    assert_close(op.to_dense(), dense, rtol=0, atol=1e-7)


@pytest.mark.parametrize("operator", [GaussNewtonOperator, HessianOperator, FisherOperator])
@pytest.mark.parametrize("num_columns", [1, 3])
@pytest.mark.parametrize("layer", ["embedding_bag", "weight_norm"])
def test_a_kernel_without_forward_mode_is_reported_with_the_way_out(
    operator, num_columns: int, layer: str
) -> None:
    model, loss, (tokens, classes) = bag_of_words()
    if layer == "weight_norm":
        model, tokens = weight_norm(nn.Linear(3, 3)).double(), tokens.double()
    op = operator(model, loss, (tokens, classes))
    with pytest.raises(NotImplementedError, match=f"_{layer}.*jvp='finite_difference'"):
        op @ op.randn(num_columns, torch.Generator())


def test_a_missing_forward_is_not_taken_for_a_missing_derivative() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2))
    op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), bag_of_words()[2])
    with pytest.raises(NotImplementedError, match='required "forward"'):
        op @ torch.zeros(2)


@pytest.mark.parametrize("kind", ["exact", "empirical"])
def test_fishers_by_finite_differences(kind: str) -> None:
    case = problem("mlp_tanh", "ce")
    forward, finite = (FisherOperator(*case, kind=kind, jvp=jvp) for jvp in ("forward", "finite_difference"))
    vector = forward.randn(1, torch.Generator().manual_seed(0))[:, 0]
    assert 0 < relative_error(finite @ vector, forward @ vector) < 1e-6


def test_samples_keep_the_mode(generator: torch.Generator) -> None:
    op = GaussNewtonOperator(*problem("mlp_tanh", "ce"), jvp="finite_difference", fd_step=0.5)
    forward = GaussNewtonOperator(*problem("mlp_tanh", "ce"))
    vector = op.randn(1, generator)[:, 0]
    sampled, exact = (o.sample(3, torch.Generator().manual_seed(1)) @ vector for o in (op, forward))
    assert 1e-4 < relative_error(sampled, exact) < 0.5  # the large step shows


@pytest.mark.parametrize("settings", [{"jvp": "backward"}, {"jvp": "finite_difference", "fd_step": 0.0}])
def test_unknown_modes_and_steps_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"forward.*finite_difference|fd_step"):
        GaussNewtonOperator(*problem("linear", "ce"), **settings)
