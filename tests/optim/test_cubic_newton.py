import pytest
import torch

from curvlab.optim import CubicNewton


@pytest.mark.parametrize("eigenvalues", [[3.0, 1.0, 0.2], [2.0, 0.0, -1.5], [-1.0, -1.0, -0.5]])
def test_step_minimises_the_cubic_model(make_quadratic, eigenvalues) -> None:
    problem, lipschitz = make_quadratic(eigenvalues), 0.7
    start = problem.x.detach().clone()
    gradient = problem.matrix @ start - problem.linear
    CubicNewton(problem.parameters(), problem.operator, hessian_lipschitz=lipschitz).step(problem.closure)
    h = problem.x.detach() - start
    # Nesterov & Polyak (2006), Prop. 1: stationary, and H + M‖h‖/2 I positive semi-definite, is the minimum.
    stationary = gradient + problem.matrix @ h + lipschitz / 2 * h.norm() * h
    torch.testing.assert_close(stationary, torch.zeros_like(h), rtol=0, atol=1e-9)
    assert min(eigenvalues) + lipschitz * float(h.norm()) / 2 >= -1e-9


def test_without_cubic_term_it_is_newtons_method(make_quadratic) -> None:
    problem = make_quadratic([3.0, 1.0, 0.2])
    optimizer = CubicNewton(problem.parameters(), problem.operator)
    optimizer.step(problem.closure)
    expected = torch.linalg.solve(problem.matrix, problem.linear)
    torch.testing.assert_close(problem.x.detach(), expected, rtol=1e-10, atol=1e-10)
    assert optimizer.num_matvecs == 3
