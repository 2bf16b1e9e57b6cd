"""What holds of every solver: its answer, its history, and that a killed call goes on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

from curvlab.iterate import Checkpoint
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
from curvlab.spectrum import (
    frobenius_norm,
    hutchinson_diagonal,
    hutchinson_trace,
    hutchpp_trace,
    sketch_eigenvalues,
    spectral_density,
    top_eigenvalues,
    xtrace,
)
from tests.refusals import refuses, stopped

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


def column_2(number: float) -> Tensor:
    b = torch.ones(20, 4, dtype=torch.float64)
    b[3, 2] = number
    return b


@pytest.fixture(scope="module")
def matrix(build_examples) -> Tensor:
    return build_examples("decaying", num_examples=80, size=20).mean(0)


@pytest.fixture(params=list(SOLVERS))
def build_solver(request: pytest.FixtureRequest) -> Callable[[Tensor], Solver]:
    return SOLVERS[request.param]


# Kinds of matrices, each with one kind of right-hand side; tolerances are relative: to a short b as to a long one.
SYSTEMS = [("isotropic", (20,), 1.0), ("decaying", (20, 1), 1e-8), ("heavy_tailed", (20, 6), 1.0)]
SYSTEMS += [("rank_deficient", (20, 3), 1.0)]


@pytest.mark.parametrize("name", list(SOLVERS))
@pytest.mark.parametrize(("kind", "shape", "scale"), SYSTEMS)
def test_equals_dense_solve(
    build_examples, kind: str, shape: tuple[int, ...], scale: float, name: str, generator
) -> None:
    matrix = build_examples(kind, num_examples=80, size=20).mean(0)
    b = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    before = b.clone()
    solution = SOLVERS[name](matrix).solve(FullBatch(matrix) + DAMPING * identity, b, generator=generator)
    assert torch.equal(b, before)
    damped = matrix + DAMPING * torch.eye(20, dtype=torch.float64)
    wanted = b - REMAINS[name](damped) @ b if name in REMAINS else b
    torch.testing.assert_close(solution.x, torch.linalg.solve(damped, wanted), rtol=1e-8, atol=scale * 1e-9)
    assert solution.x.shape == b.shape
    assert solution.residual.shape == b.shape[1:]
    truth = (wanted - damped @ solution.x).norm(dim=0) / b.norm(dim=0)
    # A solver that leaves a part of b by design knows that part to its tolerance only.
    torch.testing.assert_close(solution.residual, truth, rtol=1e-6, atol=1e-11 if name in REMAINS else 1e-13)
    assert solution.converged
    assert solution.num_matvecs > 0


def test_history_has_the_residual_of_every_step_and_zero_columns_give_zero(
    matrix: Tensor, build_solver, generator
) -> None:
    b = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    b[:, 1] = 0
    solver = build_solver(matrix)
    solution = solver.solve(FullBatch(matrix) + DAMPING * identity, b, generator=generator)
    assert bool((solution.x[:, 1] == 0).all())
    assert float(solution.residual[1]) == 0
    assert solution.converged
    if isinstance(solver, Direct):
        return
    assert solution.history is not None
    assert solution.history.shape[1] == 3
    # The last step's is that of x, to rounding (Lissa's of the u before x, a step earlier).
    assert float(solution.history[-1].max()) < 1e-9
    assert float(solution.history[0].max()) > 1e-3
    ax = solution.plot(Figure().add_subplot())
    lines = [line for line in ax.lines if str(line.get_label()).startswith("right-hand side")]
    assert [list(line.get_ydata()) for line in lines] == solution.history.T.tolist()
    assert ax.get_yscale() == "log"


@pytest.mark.parametrize(
    ("b", "said"),
    [
        (torch.zeros(19).double(), r"has shape \(19,\), but SumOperator acts on vectors of length 20"),
        (torch.ones(20), r".*torch.float32 .* convert it"),
        *((column_2(bad), r"is not finite \(NaN or inf in column 2\)") for bad in (math.nan, math.inf)),
        (column_2(1e200), "'s length overflows in torch.float64"),
    ],
    ids=["length", "dtype", "nan", "inf", "large"],
)
def test_bad_right_hand_sides_are_refused(matrix: Tensor, build_solver, b: Tensor, said: str) -> None:
    refuses(f"right-hand side ?{said}", build_solver(matrix).solve, FullBatch(matrix) + DAMPING * identity, b)


def test_products_must_be_finite(matrix: Tensor, build_solver) -> None:
    solver, operator = build_solver(matrix), FullBatch(matrix.clone(), is_psd=True)
    operator.matrix[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"DenseOperator|FullBatch.* is not finite"):
        solver.solve(operator + DAMPING * identity, torch.ones(20, dtype=torch.float64))


@pytest.mark.parametrize("name", NEED_DEFINITE)
@pytest.mark.parametrize("damping", [0.0, -1.0])
def test_indefinite_without_damping_is_refused(name: str, damping: float) -> None:
    matrix = torch.diag(torch.tensor([2.0, 1.0, -0.5], dtype=torch.float64))
    message = r"FullBatch \+ IdentityOperator is not known to be positive semi-definite.*add damping larger"
    solver = SOLVERS[name](EYE)
    refuses(message, solver.solve, FullBatch(matrix) + damping * identity, torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("name", KNOW_THEIR_RESIDUAL)
def test_callback_sees_iterates_and_residuals(matrix: Tensor, name: str, generator) -> None:
    b = torch.randn(20, 4, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 1e3, 0.0, 1e-3]).double()
    seen: list[tuple[int, Tensor, Tensor]] = []
    solver = replace(
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


# --- Solves and estimates that are killed end at the same numbers, and take no other work's file
RESUMED: dict[str, Any] = {
    "cg": ConjugateGradient(rtol=1e-9),
    "cg, preconditioned": ConjugateGradient(rtol=1e-9, preconditioner=Nystrom(3)),
    "cg, restarted": ConjugateGradient(rtol=1e-14, max_steps=60),
    "block cg": BlockConjugateGradient(rtol=1e-9),
    "block cg, preconditioned": BlockConjugateGradient(rtol=1e-9, preconditioner=Nystrom(3)),
    "minimum residual": MinimumResidual(rtol=1e-9),
    "training filter": TrainingFilter(time=20.0, rtol=1e-9),
    "lissa": Lissa(0.02, 4, 40, average_last=10, raise_on_divergence=False),
    "lissa, to an error": Lissa(
        0.02, 4, 40, average_last=10, error_rtol=1e-3, max_steps=100, raise_on_divergence=False
    ),
}
ESTIMATORS: dict[str, Callable[..., Any]] = {
    "sketch": lambda op, **s: sketch_eigenvalues(op, sketch_size=12, chunk_size=2, **s),
    "sketch of tensors": lambda op, **s: sketch_eigenvalues(
        op, sketch_size=4, chunk_size=2, tensor_sizes=[5, 15], **s
    ),
    "sketch row by row": lambda op, **s: sketch_eigenvalues(
        op, sketch_size=12, chunk_size=1, memory_budget=5 * 20 * 8, **s
    ),
    "trace": lambda op, **s: hutchinson_trace(op, num_matvecs=20, chunk_size=2, **s),
    "trace to a tolerance": lambda op, **s: hutchinson_trace(op, rtol=0.1, chunk_size=2, **s),
    "eigenvalues": lambda op, **s: top_eigenvalues(op, 2, rtol=1e-9, **s),
    "density": lambda op, **s: spectral_density(op, num_probes=3, num_steps=4, **s),
    "diagonal": lambda op, **s: hutchinson_diagonal(op, num_matvecs=20, chunk_size=2, **s),
    "hutch++": lambda op, **s: hutchpp_trace(op, num_matvecs=30, **s),
    "xtrace": lambda op, **s: xtrace(op, num_matvecs=30, **s),
    "norm": lambda op, **s: frobenius_norm(op, num_matvecs=20, chunk_size=2, **s),
    "norm of batches": lambda op, **s: frobenius_norm(op, num_matvecs=20, batch_size=3, **s),
}
CALLS = [*RESUMED, *ESTIMATORS]
SIDES = torch.randn(20, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Counted(DenseOperator):
    """Counts its products, samples included."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__(matrix)
        self.products = [0]

    def matmat(self, vectors: Tensor) -> Tensor:
        self.products[0] += 1
        return super().matmat(vectors)


def called(
    name: str,
    operator: DenseOperator,
    *,
    seed: int | None = 2,
    damping: float = 0.05,
    checkpoint: Any = None,
    callback: Callable[[Any], None] | None = None,
    sides: Tensor = SIDES,
) -> dict[str, Any]:
    """Make the call; return the fields of what it returns."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    if name in ESTIMATORS:
        damped = operator if damping == 0.05 else operator + damping * identity
        return vars(ESTIMATORS[name](damped, checkpoint=checkpoint, callback=callback, generator=generator))
    solver = replace(RESUMED[name], checkpoint=checkpoint, callback=callback)
    return vars(solver.solve(operator + damping * identity, sides, generator=generator))


@pytest.fixture
def matrices(build_examples, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    monkeypatch.setattr("curvlab.spectrum.deflated_trace._CHUNK", 4)  # several products for few vectors
    return build_examples("decaying", num_examples=60, size=20)


@pytest.mark.parametrize("at", ["second", "half", "last"])
@pytest.mark.parametrize("name", CALLS)
def test_a_killed_call_goes_on_and_ends_at_the_same_numbers(
    name: str, at: str, matrices: Tensor, tmp_path: Path
) -> None:
    steps: list[int] = []
    whole, again = Counted(matrices), Counted(matrices)
    expected = called(name, whole, callback=lambda state: steps.append(state.num_steps))
    place = Checkpoint(tmp_path / "work.pt", every=1)
    killed_at = {"second": 2, "half": steps[-1] // 2 + 1, "last": steps[-1]}[at]
    stopped(killed_at, called, name, DenseOperator(matrices), checkpoint=place)
    found = called(name, again, checkpoint=place, callback=lambda state: steps.append(state.num_steps))
    assert steps[expected_steps(steps) :] == list(range(killed_at, steps[expected_steps(steps) - 1] + 1))
    for field, value in expected.items():
        if isinstance(value, Tensor):
            assert torch.equal(found[field], value), field
        else:
            assert found[field] == value, field
    assert not list(tmp_path.iterdir())
    # What was finished is not computed again, but for set-ups; one product tells whether it is the same matrix.
    assert again.products[0] <= whole.products[0] - killed_at + 4


def expected_steps(steps: list[int]) -> int:
    """Return how many steps the undisturbed call took: the first number that does not grow."""
    return next(i for i in range(1, len(steps)) if steps[i] <= steps[i - 1])


@pytest.mark.parametrize("name", CALLS)
def test_a_file_of_another_matrix_damping_generator_or_right_hand_side_is_refused(
    name: str, matrices: Tensor, tmp_path: Path
) -> None:
    place = Checkpoint(tmp_path / "work.pt", every=1)
    stopped(2, called, name, DenseOperator(matrices), checkpoint=place)
    content = (tmp_path / "work.pt").read_bytes()
    # As weights that are trained further: the same size, and other numbers.
    with pytest.raises(ValueError, match=r"belongs to other work \(.*operator.* differs?\)"):
        called(name, DenseOperator(1.01 * matrices), checkpoint=place)
    with pytest.raises(ValueError, match=r"belongs to other work \(.*operator.* differs?\)"):
        called(name, DenseOperator(matrices), damping=0.06, checkpoint=place)
    if name in ESTIMATORS or name == "lissa":
        with pytest.raises(ValueError, match=r"belongs to other work \(generator differs?\)"):
            called(name, DenseOperator(matrices), seed=3, checkpoint=place)
    if name in RESUMED:
        with pytest.raises(ValueError, match=r"belongs to other work \(right-hand sides differs?\)"):
            called(name, DenseOperator(matrices), sides=SIDES[:, :1], checkpoint=place)
    assert (tmp_path / "work.pt").read_bytes() == content  # it is still there for its own work


def test_a_file_that_has_all_samples_is_a_result(matrices: Tensor, tmp_path: Path) -> None:
    # A chunk that takes longer than a minute was saved after the last one, too.
    operator, place = DenseOperator(matrices), Checkpoint(tmp_path / "work.pt", every=1)
    expected = hutchinson_trace(operator, num_matvecs=4, chunk_size=2, generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        found = hutchinson_trace(
            operator, num_matvecs=4, chunk_size=2, checkpoint=place, generator=torch.Generator().manual_seed(2)
        )
        assert found == expected


@pytest.mark.parametrize("name", [*ESTIMATORS, "lissa"])
def test_a_checkpoint_needs_a_generator_whose_state_it_keeps(name: str, matrices: Tensor, tmp_path: Path) -> None:
    refuses("pass generator=", called, name, DenseOperator(matrices), seed=None, checkpoint=tmp_path / "a")
