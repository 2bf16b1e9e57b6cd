import torch
from curvature_cases import Problem, problem
from curvature_oracles import dense_gauss_newton
from torch.testing import assert_close

from curvlab.curvature import GaussNewtonOperator


def test_matches_dense(each_problem: Problem) -> None:
    dense = dense_gauss_newton(each_problem.model, each_problem.loss, each_problem.inputs, each_problem.targets)
    op = GaussNewtonOperator(*each_problem)
    assert op.shape == dense.shape
    assert op.dtype == torch.float64
    assert_close(op.to_dense(), dense, rtol=1e-10, atol=1e-10 * dense.abs().max().item())


def test_is_known_to_be_positive_semi_definite() -> None:
    op = GaussNewtonOperator(*problem("mlp_tanh", "ce"))
    assert op.is_psd
    eigenvalues = torch.linalg.eigvalsh(op.to_dense())
    assert eigenvalues[0] > -1e-12 * eigenvalues[-1]
