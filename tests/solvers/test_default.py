"""The solver that is chosen where none is named, and the filter of a training."""

import math
import re

import pytest
import torch
from torch import Tensor, nn

from curvlab.curvature import FisherOperator, GaussNewtonOperator
from curvlab.linalg import DenseOperator, LinearOperator, identity
from curvlab.progress import can_be_silent
from curvlab.solvers import (
    BlockConjugateGradient,
    IndefiniteOperatorError,
    Nystrom,
    Rows,
    TrainingFilter,
    default_solver,
)
from curvlab.solvers.gradient_flow import KrylovSpace
from curvlab.solvers.preconditioners import plan_rows, predicted_steps
from curvlab.spectrum import top_eigenvalues
from tests.matrices import CountingOperator, with_spectrum
from tests.refusals import refuses


def test_nystrom_for_several_right_hand_sides_of_a_large_matrix() -> None:
    assert default_solver(100_000, 25).preconditioner == Nystrom(100)
    assert default_solver(100_000, 1).preconditioner is None
    assert default_solver(60, 2).preconditioner is None  # a rank of 8 of 60
    assert default_solver(100_000, 25, rtol=1e-4).rtol == 1e-4
    refuses("num_columns must be at least 1, got 0", default_solver, 10, 0)


def test_fewer_products_than_block_cg_alone(generator: torch.Generator) -> None:
    # Some large eigenvalues and a tail down to the damping, as in trained networks.
    eigenvalues = torch.cat([torch.logspace(0, -2, 50), torch.logspace(-2, -4, 1450)]).double()
    matrix = with_spectrum(eigenvalues, generator)
    damped = DenseOperator(matrix) + 1e-4 * identity
    b = torch.randn(1500, 10, generator=generator, dtype=torch.float64)
    alone = BlockConjugateGradient().solve(damped, b)
    solution = default_solver(1500, 10).solve(damped, b, generator=generator)
    assert solution.converged
    assert solution.num_matvecs < 0.9 * alone.num_matvecs
    exact = torch.linalg.solve(matrix + 1e-4 * torch.eye(1500, dtype=torch.float64), b)
    assert float((damped @ (solution.x - exact)).norm()) <= 1e-2 * float(b.norm())


def test_small_matrices_with_more_right_hand_sides_than_rows(generator: torch.Generator) -> None:
    matrix = torch.randn(14, 14, generator=generator)
    damped = DenseOperator(matrix @ matrix.T) + 1e-3 * identity
    b = torch.randn(14, 20, generator=generator)
    for solver in (default_solver(14, 20), BlockConjugateGradient(preconditioner=Nystrom(14))):
        assert solver.solve(damped, b, generator=generator).converged


def classifier(scale: float) -> tuple[nn.Module, nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """A softmax regression; a large scale makes it sure of nearly all of its 240 points."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(240, 6, generator=generator, dtype=torch.float64)
    model = nn.Linear(6, 3).double()
    with torch.no_grad():
        model.weight.copy_(scale * torch.randn(3, 6, generator=generator))
        model.bias.zero_()
    return model, nn.CrossEntropyLoss(), (inputs, torch.zeros(240, dtype=torch.long))


def sure_network() -> GaussNewtonOperator:
    """An MLP on the same points that is sure of most of them."""
    torch.manual_seed(0)
    _, loss, data = classifier(1.0)
    model = nn.Sequential(nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 3)).double()
    with torch.no_grad():
        model[4].weight.mul_(30)  # type: ignore[operator, union-attr]
    return GaussNewtonOperator(model, loss, data)


def planned(damped: LinearOperator, num_columns: int = 25, memory_budget: int = 2**30) -> int | None:
    plan = plan_rows(damped, num_columns, rtol=1e-2, memory_budget=memory_budget)
    return None if plan is None else plan.num_rows


@pytest.mark.parametrize(("excess", "columns"), [(1e5, 25), (1e3, 25), (1e3, 1), (5.0, 25)])
def test_predicted_steps_solve_their_equation_and_bound_those_taken(excess: float, columns: int) -> None:
    """Eigenvalues that fall as 1/j, which is what an eigenvalue can be at most: no fewer steps than half of it."""
    steps = predicted_steps(excess, columns, 1e-2)
    if steps > 1:
        root = math.sqrt(1 + 2 * excess / (columns * steps))
        assert steps == pytest.approx(math.log(200) / math.log((root + 1) / (root - 1)), rel=1e-6)
    eigenvalues = 1 / torch.arange(1, 601, dtype=torch.float64)
    damping = float(eigenvalues.sum()) / excess
    b = torch.randn(600, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    solution = BlockConjugateGradient().solve(DenseOperator(torch.diag(eigenvalues)) + damping * identity, b)
    assert solution.history is not None
    assert len(solution.history) <= 1.5 * steps + 1


def test_without_curvature_one_step() -> None:
    assert predicted_steps(0.0, 25, 1e-2) == 1


def regression(num_examples: int, num_inputs: int, width: int) -> GaussNewtonOperator:
    """A network of one layer on points of which none has more curvature of the loss than another."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_examples, num_inputs, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(num_inputs, width), nn.Tanh(), nn.Linear(width, 1)).double()
    return GaussNewtonOperator(model, nn.MSELoss(), (inputs, inputs[:, :1]))


@pytest.mark.parametrize(
    ("shape", "damping", "num_rows"),
    [
        ((200, 40, 30), 1e-3, 200),  # 1,261 parameters
        ((2000, 20, 32), 1e-6, 2000),  # 705: all rows are more than the parameters
        ((2000, 20, 32), 1e-1, 0),  # few steps take less than to set rows up
        ((8000, 20, 24), 1e-5, 2048),  # 529: so many rows are a sample of all
    ],
)
def test_all_rows_of_a_regression_few_or_none_by_what_the_steps_cost(
    shape: tuple[int, int, int], damping: float, num_rows: int
) -> None:
    damped = regression(*shape) + damping * identity
    b = damped.randn(10, torch.Generator().manual_seed(1))
    solver = default_solver(damped.shape[0], 10, operator=damped)
    plan = plan_rows(damped, 10, rtol=1e-2, memory_budget=2**30)
    assert plan is not None
    assert plan.num_rows == num_rows
    found, plain = solver.solve(damped, b), BlockConjugateGradient().solve(damped, b)
    assert found.converged
    assert found.history is not None
    assert 0.5 * plan.steps < len(found.history) < 1.5 * plan.steps
    if num_rows == 0:
        assert solver.preconditioner is None
        assert solver.progress == "block CG, no preconditioner"
        return
    assert solver.preconditioner == Rows(num_rows, memory_budget=2**30)
    assert found.num_matvecs < plain.num_matvecs / 3
    assert f"block conjugate gradients, preconditioned by {num_rows:,} rows of examples" in str(found)
    assert solver.progress == f"block CG, {num_rows:,} rows of examples"
    assert str(plain).endswith("by block conjugate gradients")
    if num_rows == shape[0]:
        assert found.num_matvecs <= 3 * 10


def test_rows_have_no_cliff_in_the_number_of_examples_and_there_are_none_at_a_damping_of_lambda_max() -> None:
    """Around 17,376 examples of 10 outputs: above them an earlier rule took no rows at all."""
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.rand(60_000, 196, generator=generator), torch.zeros(60_000, dtype=torch.long)
    torch.manual_seed(0)
    model, counts = nn.Sequential(nn.Linear(196, 32), nn.Tanh(), nn.Linear(32, 10)), []
    for num_examples in (17_000, 18_000, 60_000):
        op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), (inputs[:num_examples], labels[:num_examples]))
        counts.append(planned(op + 1e-3 * identity, 10))
        largest = float(top_eigenvalues(op, 1, rtol=0.1, generator=generator).values[0])
        assert planned(op + largest * identity, 10) == 0
    assert counts == [1024, 1024, 2048]


@pytest.mark.parametrize("damping", [1e-4, 1e-3, 1e-2])
def test_rows_that_hold_less_than_half_of_the_trace_pay_where_the_network_is_small(damping: float) -> None:
    """They hold the leading directions: of a network that is not sure of its points, they halve the steps."""
    torch.manual_seed(0)
    inputs = torch.randn(3000, 20, dtype=torch.float64)
    labels = (inputs @ torch.randn(20, 5, dtype=torch.float64)).argmax(1)
    model = nn.Sequential(nn.Linear(20, 24), nn.Tanh(), nn.Linear(24, 5)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    damped = GaussNewtonOperator(model, nn.CrossEntropyLoss(), (inputs, labels)) + damping * identity
    plan = plan_rows(damped, 10, rtol=1e-2, memory_budget=2**30)
    assert plan is not None
    assert 0 < plan.share < 0.5
    b = damped.randn(10, torch.Generator().manual_seed(0))
    chosen, plain = default_solver(damped.shape[0], 10, operator=damped), BlockConjugateGradient()
    steps, without = (solver.solve(damped, b).num_matvecs / 10 for solver in (chosen, plain))
    assert chosen.preconditioner == Rows(plan.num_rows, memory_budget=2**30)
    assert steps < 0.75 * without
    assert 0.45 * plan.steps < steps < 1.5 * plan.steps
    assert 0.6 * plan.steps_without < without < 1.3 * plan.steps_without


def test_nystrom_of_a_small_matrix_where_many_steps_are_predicted() -> None:
    """A rank above a tenth of the size: refused where nothing is known of the steps."""
    op = sure_network()
    damped = op + 1e-4 * identity
    assert default_solver(op.shape[0], 80).preconditioner is None
    chosen = default_solver(op.shape[0], 80, operator=damped, memory_for_rows=1)  # which holds no row
    assert chosen.preconditioner == Nystrom(320)


def test_the_choice_is_told_in_a_line(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    damped = sure_network() + 1e-4 * identity
    with caplog.at_level("INFO", logger="curvlab"):
        solver = default_solver(damped.shape[0], 25, operator=damped)
        plan = plan_rows(damped, 25, rtol=1e-2, memory_budget=2**30)
        assert plan is not None
        (line,) = caplog.messages
        assert f"{plan.num_rows:,} rows of examples" in line
        assert f"{round(25 * plan.steps):,} products" in line
        assert "one CPU core" not in line
        default_solver(damped.shape[0], 10**6, operator=damped)
        assert re.search(r"products, \d.* (s|min|h) on one CPU core$", caplog.messages[-1])
        paid = solver.solve(damped, damped.randn(25, torch.Generator().manual_seed(0))).num_matvecs
        assert 25 * plan.steps < paid < 3 * 25 * plan.steps
        caplog.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stderr.isatty", lambda: True)
            default_solver(damped.shape[0], 25, operator=damped)
            assert capsys.readouterr().err == (f"{line}\n" if round(25 * plan.steps) >= 100 else "")
        can_be_silent(lambda progress: default_solver(damped.shape[0], 25, operator=damped))(progress=False)
        assert (not caplog.messages) == (round(25 * plan.steps) >= 100)


def test_as_many_rows_as_the_steps_are_worth(generator: torch.Generator) -> None:
    """More where the damping is small, none where one step is enough, and never more than the budget holds."""
    op = sure_network()
    counts = [planned(op + damping * identity) for damping in (1e-4, 1e-2, 1.0, 1e6)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-2] > counts[-1] == 0
    damped = op + 1e-4 * identity
    for budget in (10**5, 10**6):
        assert planned(damped, memory_budget=budget) == Rows(memory_budget=budget).affordable(op)
    assert Rows(memory_budget=10**5).affordable(op) < 240 // 6  # where the old rule took none
    chosen = default_solver(100_000, 25, operator=damped, memory_for_rows=10**5).preconditioner
    assert chosen == Rows(Rows(memory_budget=10**5).affordable(op), memory_budget=10**5)
    b = damped.randn(3, generator)
    solution = default_solver(op.shape[0], 3, operator=damped).solve(damped, b)
    assert solution.converged
    torch.testing.assert_close(damped @ solution.x, b, rtol=0, atol=0.02 * float(b.norm()))


def test_the_choice_says_why() -> None:
    plan = plan_rows(sure_network() + 1e-4 * identity, 5, rtol=1e-2, memory_budget=2**30)
    assert plan is not None
    assert plan.num_rows > 0
    assert plan.steps < plan.steps_without
    assert str(plan).startswith(f"{plan.num_rows} rows of examples, ")
    assert f"({plan.steps_without:.0f} without)" in str(plan)


def test_no_set_up_where_few_steps_are_needed() -> None:
    """With a damping of λmax block CG takes three steps: a Nyström preconditioner would cost four."""
    op = sure_network()
    assert default_solver(100_000, 25, operator=op + 1e6 * identity) == BlockConjugateGradient()


def test_nystrom_where_rows_do_not_apply() -> None:
    """Tokens are no examples; an indefinite output Hessian; other matrices; nothing known of the matrix."""
    model, loss, data = classifier(30.0)
    damped = GaussNewtonOperator(model, loss, data) + 1e-3 * identity
    of_tokens = GaussNewtonOperator(model, loss, (data[0].reshape(24, 10, 6), data[1].reshape(24, 10)))

    def wavy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.sin().sum(1).mean()

    indefinite = GaussNewtonOperator(model, wavy, data)
    assert not indefinite.is_psd
    for op in (
        of_tokens,
        indefinite,
        FisherOperator(model, loss, data, kind="empirical"),
        DenseOperator(torch.eye(4)),
    ):
        assert planned(op + 1e-3 * identity) is None
        assert default_solver(100_000, 25, operator=op + 1e-3 * identity).preconditioner == Nystrom(100)
    assert default_solver(100_000, 25).preconditioner == Nystrom(100)
    assert default_solver(21, 3, operator=of_tokens + 1e-3 * identity).solve(damped, damped.randn(3)).converged


@pytest.mark.parametrize("error", [TypeError, ValueError, AttributeError])
def test_a_bug_in_the_question_does_not_choose_another_solver(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(operator: GaussNewtonOperator) -> None:
        raise error("a bug")

    monkeypatch.setattr("curvlab.solvers.preconditioners.rows_plan.covering_layers", broken)
    model, loss, data = classifier(30.0)
    with pytest.raises(error, match="a bug"):
        default_solver(100_000, 25, operator=GaussNewtonOperator(model, loss, data) + 1e-3 * identity)


# --- The filter against the dense eigendecomposition, and its two limits
FP64 = torch.float64


def dense_filter(matrix: Tensor, time: float, b: Tensor) -> Tensor:
    """The geometric sum of many small steps would give the same; here by eigenvalues."""
    values, vectors = torch.linalg.eigh(matrix)
    flat = values.abs() * time < 1e-10
    gains = torch.where(flat, time, -torch.expm1(-time * values) / torch.where(flat, 1.0, values))
    return vectors @ (gains[:, None] * (vectors.T @ b))


@pytest.mark.parametrize("rtol", [1e-2, 1e-9])
@pytest.mark.parametrize("time", [1e-3, 1.0, 100.0, 1e4])
@pytest.mark.parametrize("num_columns", [1, 5])
def test_equals_the_dense_filter(build_examples, generator, num_columns: int, time: float, rtol: float) -> None:
    for kind in ("decaying", "heavy_tailed", "rank_deficient"):
        matrix = build_examples(kind, num_examples=200, size=80).mean(0)
        b = torch.randn(80, num_columns, generator=generator, dtype=FP64)
        solution = TrainingFilter(time, rtol=rtol).solve(DenseOperator(matrix, is_psd=True), b)
        expected = dense_filter(matrix, time, b)
        error = (solution.x - expected).norm(dim=0) / (time * b.norm(dim=0))
        assert float(error.max()) <= rtol
        assert float(((solution.x - expected).norm(dim=0) / expected.norm(dim=0)).max()) <= 3 * rtol
        assert solution.converged
        assert float(solution.residual.max()) <= rtol


def test_columns_share_their_products(build_examples, generator) -> None:
    operator = CountingOperator(build_examples("decaying", num_examples=300, size=120).mean(0))
    operator_is_psd = DenseOperator(operator.matrix, is_psd=True)
    b = torch.randn(120, 8, generator=generator, dtype=FP64)
    together = TrainingFilter(1000.0).solve(operator + 1e-9 * identity, b)
    assert together.num_matvecs == operator.columns
    alone = [TrainingFilter(1000.0).solve(operator_is_psd, column).num_matvecs for column in b.T]
    assert together.num_matvecs < 0.8 * sum(alone)


def test_too_few_steps_are_told(build_examples, generator) -> None:
    matrix = build_examples("decaying", num_examples=300, size=120).mean(0)
    b = torch.randn(120, 2, generator=generator, dtype=FP64)
    solution = TrainingFilter(1e4, max_steps=2).solve(DenseOperator(matrix, is_psd=True), b)
    assert not solution.converged
    assert solution.num_matvecs == 3 * 2
    exponential = torch.linalg.matrix_exp(-1e4 * matrix) @ b
    # What is left of the flow, by the dense matrix; the speed x' belongs to the approximate flow.
    left = (b - matrix @ solution.x - exponential).norm(dim=0) / b.norm(dim=0)
    assert bool((left > 0.01).all())
    assert bool((solution.residual > 0.01).all())


def test_single_precision_reaches_its_tolerance(build_examples, generator) -> None:
    matrix = build_examples("heavy_tailed", num_examples=200, size=80).mean(0)
    b = torch.randn(80, 4, generator=generator, dtype=FP64)
    solution = TrainingFilter(50.0, rtol=1e-3).solve(DenseOperator(matrix.float(), is_psd=True), b.float())
    assert solution.converged
    expected = dense_filter(matrix, 50.0, b)
    assert float((solution.x.double() - expected).norm() / expected.norm()) < 3e-3


def test_krylov_space_is_orthonormal_and_closes(build_examples, generator) -> None:
    matrix = build_examples("rank_deficient", num_examples=60, size=20).mean(0)  # rank 10
    b = torch.randn(20, 3, generator=generator, dtype=FP64)
    space = KrylovSpace(DenseOperator(matrix), torch.cat([b, b[:, :1]], dim=1))
    assert space.factor.shape == (3, 4)
    while not space.complete:
        space.step()
    assert space.basis.shape[1] == 13
    eye = torch.eye(13, dtype=FP64)
    torch.testing.assert_close(space.basis.T @ space.basis, eye, rtol=0, atol=1e-12)
    torch.testing.assert_close(space.basis.T @ matrix @ space.basis, space.projected, rtol=0, atol=1e-12)
    torch.testing.assert_close(matrix @ space.basis, space.basis @ space.projected, rtol=0, atol=1e-11)


def test_indefinite_matrices_are_refused() -> None:
    operator = DenseOperator(torch.diag(torch.tensor([1.0, -1.0], dtype=FP64)))
    with pytest.raises(IndefiniteOperatorError, match="add damping larger"):
        TrainingFilter(1.0).solve(operator, torch.ones(2, dtype=FP64))
