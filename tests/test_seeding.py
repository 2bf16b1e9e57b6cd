"""A whole number stands for a generator in what draws and is no call of `conformance/calls`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.linalg import identity
from curvlab.optim import UniformDirection, unit_directions
from curvlab.solvers import Ekfac, Lissa, Nystrom


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
    "stationary_error": lambda op, b, seed: Lissa(0.1, 4, 5).stationary_error(op + identity, b, generator=seed),
    "Nystrom": lambda op, b, seed: Nystrom(3).build(op + identity, generator=seed)[0] @ b,
    "Ekfac": lambda op, b, seed: Ekfac().build(op + identity, generator=seed)[0] @ b,
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
