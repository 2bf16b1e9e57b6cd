"""What every solver must do: a new one is a line in SOLVERS (and in REMAINS, if it leaves part of b by design)."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

from curvlab.linalg import DenseOperator, LinearOperator, identity
from curvlab.solvers import (
    BlockConjugateGradient,
    ConjugateGradient,
    Direct,
    Lissa,
    MinimumResidual,
    Nystrom,
    Solver,
    TrainingFilter,
)

DAMPING = 0.1
TIME = 3.0


class FullBatch(DenseOperator):
    """Every sample is the whole operator: the deterministic limit of a stochastic solver."""

    def sample(self, batch_size: int, generator: torch.Generator | None = None) -> LinearOperator:
        return self


def converged_lissa(matrix: Tensor) -> Lissa:
    largest = float(torch.linalg.eigvalsh(matrix).max())
    step_size = 1 / (largest + DAMPING)
    return Lissa(step_size, batch_size=1, num_steps=int(25 / (step_size * DAMPING)), rtol=1e-8)


SOLVERS: dict[str, Callable[[Tensor], Solver]] = {
    "direct": lambda matrix: Direct(),
    "conjugate_gradient": lambda matrix: ConjugateGradient(rtol=1e-11),
    "jacobi_conjugate_gradient": lambda matrix: ConjugateGradient(
        rtol=1e-11, preconditioner=DenseOperator(torch.diag(1 / (matrix.diagonal() + DAMPING)))
    ),
    "nystrom_conjugate_gradient": lambda matrix: ConjugateGradient(rtol=1e-11, preconditioner=Nystrom(rank=5)),
    "block_conjugate_gradient": lambda matrix: BlockConjugateGradient(rtol=1e-11),
    "nystrom_block_conjugate_gradient": lambda matrix: BlockConjugateGradient(
        rtol=1e-11, preconditioner=Nystrom(rank=5)
    ),
    "minimum_residual": lambda matrix: MinimumResidual(rtol=1e-11),
    "lissa": converged_lissa,
    "training_filter": lambda matrix: TrainingFilter(TIME, rtol=1e-11),
}
# What a solver leaves of b by design: x = A⁻¹ (b - remains b).
REMAINS: dict[str, Callable[[Tensor], Tensor]] = {"training_filter": lambda a: torch.linalg.matrix_exp(-TIME * a)}


EYE = torch.eye(3, dtype=torch.float64)
NEED_DEFINITE = [name for name, build in SOLVERS.items() if not isinstance(build(EYE), Direct | MinimumResidual)]
KNOW_THEIR_RESIDUAL = [
    name for name, build in SOLVERS.items() if not isinstance(build(EYE), Direct | Lissa | TrainingFilter)
]


@pytest.fixture(params=list(SOLVERS))
def build_solver(request: pytest.FixtureRequest) -> Callable[[Tensor], Solver]:
    return SOLVERS[request.param]


@pytest.mark.parametrize("name", list(SOLVERS))
@pytest.mark.parametrize("num_columns", [None, 1, 6])
def test_equals_dense_solve(examples: Tensor, name: str, num_columns: int | None, generator) -> None:
    matrix, build_solver = examples.mean(0), SOLVERS[name]
    shape = (20,) if num_columns is None else (20, num_columns)
    b = torch.randn(shape, generator=generator, dtype=torch.float64)
    solution = build_solver(matrix).solve(FullBatch(matrix) + DAMPING * identity, b, generator=generator)
    damped = matrix + DAMPING * torch.eye(20, dtype=torch.float64)
    wanted = b - REMAINS[name](damped) @ b if name in REMAINS else b
    torch.testing.assert_close(solution.x, torch.linalg.solve(damped, wanted), rtol=1e-8, atol=1e-9)
    assert solution.x.shape == b.shape
    assert solution.residual.shape == b.shape[1:]
    truth = (wanted - damped @ solution.x).norm(dim=0) / b.norm(dim=0)
    # A solver that leaves a part of b by design knows that part to its tolerance only.
    torch.testing.assert_close(solution.residual, truth, rtol=1e-6, atol=1e-11 if name in REMAINS else 1e-13)
    assert solution.converged
    assert solution.num_matvecs > 0


@pytest.mark.parametrize("name", [name for name in SOLVERS if name != "direct"])
def test_history_has_the_residual_of_every_step_and_is_drawn(examples: Tensor, name: str, generator) -> None:
    matrix = examples.mean(0)
    b = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    damped = FullBatch(matrix) + DAMPING * identity
    solution = SOLVERS[name](matrix).solve(damped, b, generator=generator)
    assert solution.history is not None
    assert solution.history.shape[1] == 3
    # The last step's is that of x, to rounding (Lissa's of the u before x, a step earlier).
    assert float(solution.history[-1].max()) < 1e-9
    assert float(solution.history[0].max()) > 1e-3
    ax = solution.plot(Figure().add_subplot())
    lines = [line for line in ax.lines if str(line.get_label()).startswith("right-hand side")]
    assert [list(line.get_ydata()) for line in lines] == solution.history.T.tolist()
    assert ax.get_yscale() == "log"


def test_zero_columns_give_zero(examples: Tensor, build_solver, generator) -> None:
    matrix = examples.mean(0)
    b = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    b[:, 1] = 0
    solution = build_solver(matrix).solve(FullBatch(matrix) + DAMPING * identity, b, generator=generator)
    assert bool((solution.x[:, 1] == 0).all())
    assert float(solution.residual[1]) == 0
    assert solution.converged


def test_leaves_the_right_hand_side_alone(examples: Tensor, build_solver, generator) -> None:
    matrix = examples.mean(0)
    b = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    before = b.clone()
    build_solver(matrix).solve(FullBatch(matrix) + DAMPING * identity, b, generator=generator)
    assert torch.equal(b, before)


def test_wrong_length_is_refused(examples: Tensor, build_solver) -> None:
    matrix = examples.mean(0)
    operator = FullBatch(matrix) + DAMPING * identity
    with pytest.raises(ValueError, match=r"has shape \(19,\), but SumOperator acts on vectors of length 20"):
        build_solver(matrix).solve(operator, torch.zeros(19, dtype=torch.float64))


def test_wrong_dtype_is_refused(examples: Tensor, build_solver) -> None:
    matrix = examples.mean(0)
    with pytest.raises(ValueError, match=r"torch.float32 .* convert it"):
        build_solver(matrix).solve(FullBatch(matrix) + DAMPING * identity, torch.ones(20))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_right_hand_side_must_be_finite(examples: Tensor, build_solver, bad: float) -> None:
    matrix = examples.mean(0)
    b = torch.ones(20, 4, dtype=torch.float64)
    b[3, 2] = bad
    with pytest.raises(ValueError, match=r"the right-hand side is not finite \(NaN or inf in column 2\)"):
        build_solver(matrix).solve(FullBatch(matrix) + DAMPING * identity, b)


def test_products_must_be_finite(examples: Tensor, build_solver) -> None:
    matrix = examples.mean(0)
    solver = build_solver(matrix)
    operator = FullBatch(matrix, is_psd=True)
    operator.matrix[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"DenseOperator|FullBatch.* is not finite"):
        solver.solve(operator + DAMPING * identity, torch.ones(20, dtype=torch.float64))


@pytest.mark.parametrize("name", NEED_DEFINITE)
@pytest.mark.parametrize("damping", [0.0, -1.0])
def test_indefinite_without_damping_is_refused(name: str, damping: float) -> None:
    matrix = torch.diag(torch.tensor([2.0, 1.0, -0.5], dtype=torch.float64))
    message = r"FullBatch \+ IdentityOperator is not known to be positive semi-definite.*add damping larger"
    solver = SOLVERS[name](EYE)
    with pytest.raises(ValueError, match=message):
        solver.solve(FullBatch(matrix) + damping * identity, torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("name", KNOW_THEIR_RESIDUAL)
def test_callback_sees_iterates_and_residuals(examples: Tensor, name: str, generator) -> None:
    matrix = examples.mean(0)
    b = torch.randn(20, 4, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 1e3, 0.0, 1e-3]).double()
    seen: list[tuple[int, Tensor, Tensor]] = []
    solver = dataclasses.replace(
        SOLVERS[name](matrix),  # type: ignore[type-var]
        callback=lambda state: seen.append((state.num_steps, state.x, state.relative_residuals)),
    )
    solution = solver.solve(FullBatch(matrix) + DAMPING * identity, b, generator=generator)
    damped = matrix + DAMPING * torch.eye(20, dtype=torch.float64)
    assert [step for step, _, _ in seen] == list(range(1, len(seen) + 1))
    for _, x, residuals in seen:
        truth = (b - damped @ x).norm(dim=0) / b.norm(dim=0).clamp(min=1e-300)
        torch.testing.assert_close(truth, residuals, rtol=1e-3, atol=1e-9)
    torch.testing.assert_close(seen[-1][1], solution.x)
    torch.testing.assert_close(solution.history, torch.stack([residuals for _, _, residuals in seen]))
