"""MINRES where conjugate gradients refuse: against the dense solution and SciPy's iterates."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse.linalg
import torch

from curvlab.linalg import DenseOperator
from curvlab.solvers import MinimumResidual


def indefinite(size: int, generator: torch.Generator) -> torch.Tensor:
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    eigenvalues = torch.linspace(0.5, 3.0, size, dtype=torch.float64)
    eigenvalues[::3] *= -1
    return basis @ torch.diag(eigenvalues) @ basis.T


def test_solves_indefinite_systems_and_states_the_residual(generator: torch.Generator) -> None:
    matrix = indefinite(30, generator)
    b = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    seen: list[torch.Tensor] = []
    solver = MinimumResidual(rtol=1e-9, callback=lambda state: seen.append(state.relative_residuals))
    solution = solver.solve(DenseOperator(matrix), b)
    torch.testing.assert_close(solution.x, torch.linalg.solve(matrix, b), rtol=1e-7, atol=1e-8)
    assert solution.converged
    assert solution.num_matvecs == 4 * (len(seen) + 1)
    history = torch.stack(seen)
    assert solution.history is not None
    assert torch.equal(solution.history, history)
    assert bool((history[1:] <= history[:-1] + 1e-14).all())  # it never grows


def test_iterates_are_scipys(generator: torch.Generator) -> None:
    matrix = indefinite(25, generator)
    b = torch.randn(25, 1, generator=generator, dtype=torch.float64)
    found = MinimumResidual(rtol=1e-12, max_steps=7).solve(DenseOperator(matrix), b)
    expected, _ = scipy.sparse.linalg.minres(matrix.numpy(), b.numpy()[:, 0], rtol=1e-14, maxiter=7)
    np.testing.assert_allclose(found.x[:, 0].numpy(), expected, rtol=1e-8, atol=1e-10)
    assert not found.converged


@pytest.mark.parametrize(
    ("settings", "text"),
    [({"rtol": 0.0}, "rtol must be between 0 and 1"), ({"max_steps": 0}, "at least 1, got 0")],
)
def test_settings_out_of_range_are_refused(settings: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        MinimumResidual(**settings)
