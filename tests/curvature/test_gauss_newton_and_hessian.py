"""Every kind of layer and of loss against dense matrices."""

import pytest
import torch
from curvature_cases import Problem, problem
from curvature_oracles import dense_gauss_newton, dense_hessian
from torch.testing import assert_close

from curvlab.curvature import GaussNewtonOperator, HessianOperator


@pytest.mark.parametrize(
    ("operator", "oracle"), [(GaussNewtonOperator, dense_gauss_newton), (HessianOperator, dense_hessian)]
)
def test_matches_dense(each_problem: Problem, operator, oracle) -> None:
    dense = oracle(each_problem.model, each_problem.loss, each_problem.inputs, each_problem.targets)
    op = operator(*each_problem)
    assert (op.shape, op.dtype) == (dense.shape, torch.float64)
    assert_close(op.to_dense(), dense, rtol=1e-10, atol=1e-10 * dense.abs().max().item())


def test_the_gauss_newton_matrix_is_positive_semi_definite_and_the_hessian_is_not() -> None:
    gauss_newton, hessian = (
        GaussNewtonOperator(*problem("mlp_tanh", "ce")),
        HessianOperator(*problem("mlp_tanh", "mse")),
    )
    values = torch.linalg.eigvalsh(gauss_newton.to_dense())
    assert gauss_newton.is_psd
    assert values[0] > -1e-12 * values[-1]
    assert not hessian.is_psd
    assert torch.linalg.eigvalsh(hessian.to_dense())[0] < -1e-3


def test_they_are_one_for_a_linear_model() -> None:
    linear = problem("linear", "ce_all")
    hessian, gauss_newton = HessianOperator(*linear).to_dense(), GaussNewtonOperator(*linear).to_dense()
    assert_close(hessian, gauss_newton, rtol=1e-10, atol=1e-12)
