from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.matrices import with_spectrum

SPECTRA: dict[str, Callable[[int], Tensor]] = {
    "flat": lambda n: torch.full((n,), 2.0),
    "nearly flat": lambda n: torch.linspace(1.0, 2.0, n).double(),
    "decaying": lambda n: torch.arange(1, n + 1).double() ** -1.5,
    "exponential": lambda n: 0.7 ** torch.arange(n).double(),
    "repeated": lambda n: torch.cat([torch.full((3,), 5.0), torch.linspace(4.9, 0.0, n - 3)]).double(),
    "indefinite": lambda n: torch.linspace(-3.0, 2.0, n).double(),
}


@pytest.fixture(params=[name for name in SPECTRA if name != "nearly flat"])
def matrix(request: pytest.FixtureRequest) -> Tensor:
    """(60, 60), fp64, one per kind of spectrum."""
    return with_spectrum(SPECTRA[request.param](60))


@pytest.fixture
def build_matrix() -> Callable[..., Tensor]:
    return lambda name, size, seed=0: with_spectrum(SPECTRA[name](size), seed)
