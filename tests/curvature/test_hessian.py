import torch
from curvature_cases import Problem, problem
from curvature_oracles import dense_hessian
from torch.testing import assert_close

from curvlab.curvature import GaussNewtonOperator, HessianOperator


def test_matches_dense(each_problem: Problem) -> None:
    dense = dense_hessian(each_problem.model, each_problem.loss, each_problem.inputs, each_problem.targets)
    op = HessianOperator(*each_problem)
    assert op.shape == dense.shape
    assert_close(op.to_dense(), dense, rtol=1e-10, atol=1e-10 * dense.abs().max().item())


def test_is_not_claimed_to_be_positive_semi_definite() -> None:
    op = HessianOperator(*problem("mlp_tanh", "mse"))
    assert not op.is_psd
    assert torch.linalg.eigvalsh(op.to_dense())[0] < -1e-3


def test_is_the_gauss_newton_matrix_of_a_linear_model() -> None:
    linear = problem("linear", "ce_all")
    assert_close(
        HessianOperator(*linear).to_dense(), GaussNewtonOperator(*linear).to_dense(), rtol=1e-10, atol=1e-12
    )
