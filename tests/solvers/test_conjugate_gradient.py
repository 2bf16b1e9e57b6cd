import pytest
import torch
from torch import Tensor

from curvlab.linalg import DenseOperator, identity
from curvlab.solvers import ConjugateGradient, IndefiniteOperatorError


def spd(size: int, condition: float, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    matrix = basis * torch.logspace(0, -torch.tensor(condition).log10().item(), size).double() @ basis.T
    return (matrix + matrix.T) / 2


@pytest.mark.parametrize("rtol", [1e-1, 1e-4, 1e-9])
def test_reaches_rtol_and_counts_every_product(counting_operator, generator, rtol: float) -> None:
    matrix = spd(80, 1e3)
    operator = counting_operator(matrix)
    b = torch.randn(80, 5, generator=generator, dtype=torch.float64)
    b[:, 3] = 0
    b[:, 4] = torch.linalg.eigh(matrix).eigenvectors[:, 0]  # done after one step: must not be multiplied on
    solution = ConjugateGradient(rtol=rtol).solve(operator, b)
    assert solution.converged
    assert bool((solution.residual <= rtol).all())
    assert solution.num_matvecs == operator.columns
    single = sum(ConjugateGradient(rtol=rtol).solve(operator, b[:, k]).num_matvecs for k in range(5))
    # Together they are rounded otherwise, which may cost or save a step.
    assert solution.num_matvecs == pytest.approx(single, rel=0.02)


def test_columns_are_independent(generator) -> None:
    operator = DenseOperator(spd(50, 1e2))
    b = torch.randn(50, 4, generator=generator, dtype=torch.float64)
    solver = ConjugateGradient(rtol=1e-10, max_steps=10)
    alone = torch.stack([solver.solve(operator, b[:, k]).x for k in range(4)], dim=1)
    torch.testing.assert_close(solver.solve(operator, b).x, alone, rtol=1e-9, atol=1e-12)


def test_finishes_in_as_many_steps_as_distinct_eigenvalues(generator) -> None:
    values = torch.cat([torch.full((20,), v) for v in (1.0, 4.0, 9.0)]).double()
    basis, _ = torch.linalg.qr(torch.randn(60, 60, generator=generator, dtype=torch.float64))
    steps = []
    solver = ConjugateGradient(rtol=1e-10, callback=lambda state: steps.append(state.relative_residuals))
    b = torch.randn(60, generator=generator, dtype=torch.float64)
    assert solver.solve(DenseOperator((basis * values) @ basis.T), b).converged
    assert len(steps) == 3
    assert steps[0].shape == (1,)
    assert float(steps[-1]) <= 1e-10 < float(steps[-2])


def test_exact_preconditioner_needs_one_step(generator) -> None:
    matrix = spd(40, 1e4)
    b = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    inverse = torch.linalg.inv(matrix)
    solver = ConjugateGradient(rtol=1e-8, preconditioner=DenseOperator((inverse + inverse.T) / 2))
    solution = solver.solve(DenseOperator(matrix), b)
    assert solution.num_matvecs == 3 + 3
    assert solution.converged


def test_warm_start(counting_operator, generator) -> None:
    matrix = spd(60, 1e3)
    operator = counting_operator(matrix)
    b = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    truth = torch.linalg.solve(matrix, b)
    solution = ConjugateGradient(rtol=1e-6).solve(operator, b, x0=truth)
    assert solution.num_matvecs == operator.columns == 2
    torch.testing.assert_close(solution.x, truth)
    with pytest.raises(ValueError, match="x0 has shape"):
        ConjugateGradient().solve(operator, b, x0=truth[:, 0])


def test_step_limit_is_kept_and_told(counting_operator) -> None:
    operator = counting_operator(spd(80, 1e4))
    solution = ConjugateGradient(rtol=1e-8, max_steps=5).solve(operator, torch.ones(80, dtype=torch.float64))
    assert not solution.converged
    assert solution.num_matvecs == operator.columns == 5 + 1
    assert float(solution.residual) > 1e-8


class Glitching(DenseOperator):
    """Its fifth product is wrong, so that the recurrence no longer knows the residual."""

    calls = 0

    def matmat(self, vectors: Tensor) -> Tensor:
        self.calls += 1
        return super().matmat(vectors) * (1.01 if self.calls == 5 else 1.0)


def test_restarts_when_the_recurrence_has_drifted(generator) -> None:
    matrix = spd(60, 100.0)
    operator = Glitching(matrix)
    b = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    solution = ConjugateGradient(rtol=1e-8).solve(operator, b)
    assert solution.converged
    assert float(((b - matrix @ solution.x).norm(dim=0) / b.norm(dim=0)).max()) <= 1.01e-8


@pytest.mark.parametrize(("condition", "reachable"), [(10.0, True), (1e3, False), (1e5, False)])
def test_single_precision_says_what_it_reached(generator, condition: float, reachable: bool) -> None:
    b = torch.randn(200, 3, generator=generator, dtype=torch.float64).float()
    operator = DenseOperator(spd(200, condition).float())
    solution = ConjugateGradient(rtol=1e-6, max_steps=2000).solve(operator, b)
    truth = (b.double() - operator.matrix.double() @ solution.x.double()).norm(dim=0) / b.double().norm(dim=0)
    torch.testing.assert_close(solution.residual.double(), truth, rtol=0.4, atol=1e-7)
    assert solution.converged == reachable
    assert float(truth.max()) <= (1e-6 if reachable else 1e-7 * condition)


def test_singular_but_consistent_is_solved_and_inconsistent_is_told(generator) -> None:
    factor = torch.randn(30, 10, generator=generator, dtype=torch.float64)
    operator = DenseOperator(factor @ factor.T)
    inside = factor @ torch.ones(10, dtype=torch.float64)
    assert ConjugateGradient(rtol=1e-8).solve(operator, inside).converged
    outside = torch.ones(30, dtype=torch.float64)
    assert not ConjugateGradient(rtol=1e-8, max_steps=200).solve(operator, outside).converged


@pytest.mark.parametrize("eigenvalue", [-0.5, -0.1])
def test_negative_curvature_is_reported(generator, eigenvalue: float) -> None:
    values = torch.linspace(0.01, 3, 30).double()
    values[0] = eigenvalue - 0.05
    basis, _ = torch.linalg.qr(torch.randn(30, 30, generator=generator, dtype=torch.float64))
    operator = DenseOperator((basis * values) @ basis.T, is_psd=False) + 0.05 * identity
    with pytest.raises(IndefiniteOperatorError, match=r"is not positive definite.*damping larger than"):
        ConjugateGradient(rtol=1e-10).solve(operator, torch.ones(30, dtype=torch.float64))


def test_a_false_claim_of_definiteness_is_found() -> None:
    operator = DenseOperator(torch.diag(torch.tensor([3.0, 1.0, -1.0])), is_psd=True)
    with pytest.raises(IndefiniteOperatorError, match="is not positive definite"):
        ConjugateGradient(rtol=1e-6).solve(operator, torch.ones(3))


def test_indefinite_preconditioner_is_refused() -> None:
    solver = ConjugateGradient(preconditioner=DenseOperator(-torch.eye(4)))
    with pytest.raises(ValueError, match="preconditioner DenseOperator is not positive definite"):
        solver.solve(DenseOperator(torch.eye(4)), torch.ones(4))


@pytest.mark.parametrize(
    ("settings", "message"), [({"rtol": 0.0}, "rtol must be between"), ({"max_steps": 0}, "max_steps must be")]
)
def test_bad_settings(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConjugateGradient(**settings)
