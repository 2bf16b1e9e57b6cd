"""Solves and estimates that are killed end at the same numbers, and take no other work's file.

A new solver or estimator is a line in SOLVERS or ESTIMATORS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from curvlab.iterate import Checkpoint
from curvlab.linalg import DenseOperator, identity
from curvlab.solvers import (
    BlockConjugateGradient,
    ConjugateGradient,
    Lissa,
    MinimumResidual,
    Nystrom,
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
from experiments.benchmarks.solvers.chebyshev import Chebyshev

SOLVERS: dict[str, Any] = {
    "cg": ConjugateGradient(rtol=1e-9),
    "cg, preconditioned": ConjugateGradient(rtol=1e-9, preconditioner=Nystrom(3)),
    "cg, restarted": ConjugateGradient(rtol=1e-14, max_steps=60),
    "block cg": BlockConjugateGradient(rtol=1e-9),
    "block cg, preconditioned": BlockConjugateGradient(rtol=1e-9, preconditioner=Nystrom(3)),
    "minimum residual": MinimumResidual(rtol=1e-9),
    "chebyshev": Chebyshev(rtol=1e-3),
    "training filter": TrainingFilter(time=20.0, rtol=1e-9),
    "lissa": Lissa(0.02, 4, 40, average_last=10, raise_on_divergence=False),
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
CALLS = [*SOLVERS, *ESTIMATORS]
SIDES = torch.randn(20, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Killed(BaseException):
    """What no solver catches."""


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
    kill: Callable[[Any], None] | None = None,
    sides: Tensor = SIDES,
) -> dict[str, Any]:
    """Make the call; return the fields of what it returns."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    if name in ESTIMATORS:
        damped = operator if damping == 0.05 else operator + damping * identity
        return vars(ESTIMATORS[name](damped, checkpoint=checkpoint, callback=kill, generator=generator))
    solver = replace(SOLVERS[name], checkpoint=checkpoint, callback=kill)
    return vars(solver.solve(operator + damping * identity, sides, generator=generator))


@pytest.fixture
def matrices(build_examples, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    monkeypatch.setattr("curvlab.spectrum.deflated_trace._CHUNK", 4)  # several products for few vectors
    return build_examples("decaying", num_examples=60, size=20)


def killed(name: str, matrices: Tensor, place: Checkpoint, at: int) -> None:
    def kill(state: Any) -> None:
        if state.num_steps == at:
            raise Killed

    with pytest.raises(Killed):
        called(name, DenseOperator(matrices), checkpoint=place, kill=kill)


@pytest.mark.parametrize("at", ["second", "half", "last"])
@pytest.mark.parametrize("name", CALLS)
def test_a_killed_call_goes_on_and_ends_at_the_same_numbers(
    name: str, at: str, matrices: Tensor, tmp_path: Path
) -> None:
    steps: list[int] = []
    whole, again = Counted(matrices), Counted(matrices)
    expected = called(name, whole, kill=lambda state: steps.append(state.num_steps))
    place = Checkpoint(tmp_path / "work.pt", every=1)
    killed_at = {"second": 2, "half": steps[-1] // 2 + 1, "last": steps[-1]}[at]
    killed(name, matrices, place, killed_at)
    found = called(name, again, checkpoint=place, kill=lambda state: steps.append(state.num_steps))
    assert steps[expected_steps(steps) :] == list(range(killed_at, steps[expected_steps(steps) - 1] + 1))
    for field, value in expected.items():
        if isinstance(value, Tensor):
            assert torch.equal(found[field], value), field
        else:
            assert found[field] == value, field
    assert not list(tmp_path.iterdir())
    # What was finished is not computed again, but for set-ups; one product tells whether it is the same matrix.
    assert again.products[0] <= whole.products[0] - killed_at + 2 + (8 if name in ("chebyshev",) else 2)


def expected_steps(steps: list[int]) -> int:
    """Return how many steps the undisturbed call took: the first number that does not grow."""
    return next(i for i in range(1, len(steps)) if steps[i] <= steps[i - 1])


@pytest.mark.parametrize("name", CALLS)
def test_a_file_of_another_matrix_damping_generator_or_right_hand_side_is_refused(
    name: str, matrices: Tensor, tmp_path: Path
) -> None:
    place = Checkpoint(tmp_path / "work.pt", every=1)
    killed(name, matrices, place, 2)
    content = (tmp_path / "work.pt").read_bytes()
    # As weights that are trained further: the same size, and other numbers.
    with pytest.raises(ValueError, match=r"belongs to other work \(.*operator.* differ\)"):
        called(name, DenseOperator(1.01 * matrices), checkpoint=place)
    with pytest.raises(ValueError, match=r"belongs to other work \(.*operator.* differ\)"):
        called(name, DenseOperator(matrices), damping=0.06, checkpoint=place)
    if name in ESTIMATORS or name == "lissa":
        with pytest.raises(ValueError, match=r"belongs to other work \(generator differ\)"):
            called(name, DenseOperator(matrices), seed=3, checkpoint=place)
    if name in SOLVERS:
        with pytest.raises(ValueError, match=r"belongs to other work \(right-hand sides differ\)"):
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
    with pytest.raises(ValueError, match="pass generator="):
        called(name, DenseOperator(matrices), seed=None, checkpoint=tmp_path / "a")
