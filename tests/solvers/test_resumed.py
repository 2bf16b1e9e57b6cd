"""Solves and traces that are killed go on where they were, and end at the same numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import curvlab.checkpoint
from curvlab.linalg import DenseOperator, identity
from curvlab.solvers import (
    BlockConjugateGradient,
    Chebyshev,
    ConjugateGradient,
    Lissa,
    MinimumResidual,
    Nystrom,
    TrainingFilter,
)
from curvlab.spectrum import (
    frobenius_norm,
    hutchinson_trace,
    hutchpp_trace,
    sketch_eigenvalues,
    spectral_density,
    top_eigenvalues,
    xtrace,
)

SOLVERS = {
    "cg": ConjugateGradient(rtol=1e-9),
    "cg, preconditioned": ConjugateGradient(rtol=1e-9, preconditioner=Nystrom(3)),
    "block cg": BlockConjugateGradient(rtol=1e-9),
    "block cg, preconditioned": BlockConjugateGradient(rtol=1e-9, preconditioner=Nystrom(3)),
    "minimum residual": MinimumResidual(rtol=1e-9),
    "chebyshev": Chebyshev(rtol=1e-9),
    "training filter": TrainingFilter(time=20.0, rtol=1e-9),
    "lissa": Lissa(0.02, 4, 40, average_last=10, raise_on_divergence=False),
}


class Killed(BaseException):
    """What no solver catches."""


class Mortal(DenseOperator):
    """Dies at its n-th product, samples included."""

    def __init__(self, matrix: Tensor, *, dies_at: int | None = None) -> None:
        super().__init__(matrix)
        self.products, self.dies_at = [0], dies_at

    def matmat(self, vectors: Tensor) -> Tensor:
        self.products[0] += 1
        if self.products[0] == self.dies_at:
            raise Killed
        return super().matmat(vectors)


@pytest.mark.parametrize("name", SOLVERS)
def test_a_killed_solve_goes_on_and_ends_at_the_same_numbers(name: str, build_examples, tmp_path: Path) -> None:
    matrices = build_examples("decaying", num_examples=60, size=20)
    sides = torch.randn(20, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    solver = SOLVERS[name]

    def solve(operator: Mortal, with_solver):
        generator = torch.Generator().manual_seed(2)
        return with_solver.solve(operator + 0.05 * identity, sides, generator=generator)

    whole = Mortal(matrices)
    expected = solve(whole, solver)
    kept = replace(solver, checkpoint=tmp_path / "solve.pt", checkpoint_every=2)
    dies_at = whole.products[0] - 3
    with pytest.raises(Killed):
        solve(Mortal(matrices, dies_at=dies_at), kept)
    again = Mortal(matrices)
    found = solve(again, kept)
    assert torch.equal(found.x, expected.x)
    assert torch.equal(found.residual, expected.residual)
    assert found.num_matvecs == expected.num_matvecs
    assert (found.history is None) == (expected.history is None)
    assert found.history is None or torch.equal(found.history, expected.history)
    assert again.products[0] < dies_at  # the steps before the last save were not taken again
    with pytest.raises(ValueError, match="belongs to other work"):
        kept.solve(again + 0.05 * identity, sides[:, :1], generator=torch.Generator().manual_seed(2))
    with pytest.raises(ValueError, match="belongs to other work"):
        kept.solve(again + 0.06 * identity, sides, generator=torch.Generator().manual_seed(2))


def test_killed_estimates_go_on(build_examples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curvlab.checkpoint, "SECONDS_BETWEEN_SAVES", 0.0)
    monkeypatch.setattr(curvlab.checkpoint, "MAX_SHARE", 1e9)
    matrices = build_examples("decaying", num_examples=60, size=20)

    def trace(operator: Mortal, **settings):
        generator = torch.Generator().manual_seed(2)
        return hutchinson_trace(operator, num_matvecs=20, chunk_size=2, generator=generator, **settings)

    def eigenvalues(operator: Mortal, **settings):
        found = top_eigenvalues(operator, 2, rtol=1e-9, generator=torch.Generator().manual_seed(2), **settings)
        return [found.values.tolist(), found.vectors.tolist(), found.num_matvecs]

    def with_random(estimator, **work):
        def estimate(operator: Mortal, **settings):
            return estimator(operator, **work, generator=torch.Generator().manual_seed(2), **settings)

        return estimate

    def density(operator: Mortal, **settings):
        found = with_random(spectral_density, num_probes=3, num_steps=4)(operator, **settings)
        return [found.density.tolist(), found.nodes.tolist(), found.stderr.tolist(), found.num_matvecs]

    def sketch(chunk_size: int, **rest):
        def estimate(operator: Mortal, **settings):
            work = {"sketch_size": 12, "chunk_size": chunk_size, **rest}
            return with_random(sketch_eigenvalues, **work)(operator, **settings).sketch.tolist()

        return estimate

    estimates = {
        "sketch": sketch(2),
        "sketch row by row": sketch(1, memory_budget=5 * 20 * 8),
        "trace": trace,
        "eigenvalues": eigenvalues,
        "density": density,
        "hutch++": with_random(hutchpp_trace, num_matvecs=30),
        "xtrace": with_random(xtrace, num_matvecs=30),
        "norm": with_random(frobenius_norm, num_matvecs=20, chunk_size=2),
        "norm of batches": with_random(frobenius_norm, num_matvecs=20, batch_size=3),
    }
    monkeypatch.setattr("curvlab.spectrum.resumed_products._CHUNK", 4)  # several products for few vectors
    for name, estimate in estimates.items():
        whole, again = Mortal(matrices), Mortal(matrices)
        expected = estimate(whole)
        with pytest.raises(Killed):
            estimate(Mortal(matrices, dies_at=5), checkpoint=tmp_path / name)
        assert estimate(again, checkpoint=tmp_path / name) == expected
        # Nothing finished is computed again; of a pair of batches, the first is.
        assert again.products[0] == whole.products[0] - 4
        with pytest.raises(ValueError, match="belongs to other work"):
            estimate(Mortal(matrices[:, :9, :9]), checkpoint=tmp_path / name)


def test_a_checkpoint_needs_a_generator_whose_state_it_keeps(build_examples, tmp_path: Path) -> None:
    operator = DenseOperator(build_examples("decaying", num_examples=6, size=5))
    with pytest.raises(ValueError, match="pass generator="):
        Lissa(0.1, 2, 3, checkpoint=tmp_path / "a").solve(operator + 0.1 * identity, torch.ones(5).double())
    with pytest.raises(ValueError, match="pass generator="):
        hutchinson_trace(operator, num_matvecs=3, checkpoint=tmp_path / "b")
    with pytest.raises(ValueError, match="pass generator="):
        top_eigenvalues(operator, checkpoint=tmp_path / "c")
    for estimator in (hutchpp_trace, xtrace, frobenius_norm):
        with pytest.raises(ValueError, match="pass generator="):
            estimator(operator, num_matvecs=6, checkpoint=tmp_path / "d")
    with pytest.raises(ValueError, match="pass generator="):
        spectral_density(operator, checkpoint=tmp_path / "d")
