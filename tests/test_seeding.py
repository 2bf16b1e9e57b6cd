"""A whole number stands for a generator in every public function that draws, and for the same numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.linalg import identity
from curvlab.optim import UniformDirection, unit_directions
from curvlab.seeding import generator_of
from curvlab.solvers import (
    BlockConjugateGradient,
    Ekfac,
    Lissa,
    Nystrom,
    measure_constant,
    measure_importance_recipe,
    measure_recipe,
)
from curvlab.spectrum import (
    frobenius_norm,
    hutchinson_diagonal,
    hutchinson_trace,
    hutchpp_trace,
    mean_eigenvalue,
    sketch_eigenvalues,
    spectral_density,
    top_eigenvalues,
    xtrace,
)


def system() -> tuple[GaussNewtonOperator, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    data = (torch.randn(12, 4).double(), torch.arange(12) % 2)
    op = GaussNewtonOperator(model, nn.CrossEntropyLoss(), data)
    return op, torch.randn(op.shape[0], 3).double()


def direction(op: Any, _: Any, seed: Any) -> torch.Tensor:
    x = nn.Parameter(torch.ones(op.shape[0], dtype=torch.float64))
    optimizer = UniformDirection([x], op + identity, delta=0.1, alpha=1.0, generator=seed)
    x.square().sum().backward()
    optimizer.step()
    return x.detach()


DRAWING: dict[str, Callable[[Any, torch.Tensor, Any], Any]] = {
    "hutchinson_trace": lambda op, _, seed: hutchinson_trace(op, num_matvecs=5, generator=seed).value,
    "mean_eigenvalue": lambda op, _, seed: mean_eigenvalue(op, num_probes=5, generator=seed).value,
    "hutchpp_trace": lambda op, _, seed: hutchpp_trace(op, num_matvecs=9, generator=seed).value,
    "xtrace": lambda op, _, seed: xtrace(op, num_matvecs=8, generator=seed).value,
    "frobenius_norm": lambda op, _, seed: frobenius_norm(op, num_matvecs=5, generator=seed).value,
    "hutchinson_diagonal": lambda op, _, seed: hutchinson_diagonal(op, num_matvecs=5, generator=seed).values,
    "spectral_density": lambda op, _, seed: (
        spectral_density(op, num_probes=2, num_steps=3, generator=seed).density
    ),
    "top_eigenvalues": lambda op, _, seed: top_eigenvalues(op, max_matvecs=2, generator=seed).values,
    "sketch_eigenvalues": lambda op, _, seed: sketch_eigenvalues(op, 1, sketch_size=4, generator=seed).values,
    "Lissa": lambda op, b, seed: Lissa(0.1, 4, 5).solve(op + identity, b, generator=seed).x,
    "Lissa.auto": lambda op, b, seed: Lissa.auto(op, 0.1, sampling="uniform", generator=seed).step_size,
    "stationary_error": lambda op, b, seed: Lissa(0.1, 4, 5).stationary_error(op + identity, b, generator=seed),
    "measure_recipe": lambda op, _, seed: measure_recipe(op, 0.1, generator=seed).constant,
    "measure_importance_recipe": lambda op, _, seed: (
        measure_importance_recipe(op, 0.1, generator=seed).largest_eigenvalue
    ),
    "measure_constant": lambda op, b, seed: measure_constant(op, b, trace=1.0, generator=seed),
    "Nystrom": lambda op, b, seed: Nystrom(3).build(op + identity, generator=seed)[0] @ b,
    "Ekfac": lambda op, b, seed: Ekfac().build(op + identity, generator=seed)[0] @ b,
    "BlockConjugateGradient": lambda op, b, seed: (
        BlockConjugateGradient(max_steps=1, preconditioner=Nystrom(3)).solve(op + identity, b, generator=seed).x
    ),
    "unit_directions": lambda op, _, seed: unit_directions(op, 2, generator=seed),
    "UniformDirection": direction,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DRAWING)
def test_a_number_is_a_generator_with_that_seed(name: str) -> None:
    op, b = system()
    by_number = torch.as_tensor(DRAWING[name](op, b, 3))
    by_generator = torch.as_tensor(DRAWING[name](op, b, torch.Generator().manual_seed(3)))
    assert torch.equal(by_number, by_generator)


@pytest.mark.parametrize("seed", ["0", 1.0, True])
def test_what_is_neither_is_refused(seed: Any) -> None:
    with pytest.raises(TypeError, match=r"torch\.Generator or a whole number as seed"):
        generator_of(seed)
    with pytest.raises(TypeError, match=r"torch\.Generator or a whole number as seed"):
        hutchinson_trace(system()[0], num_matvecs=3, generator=seed)
