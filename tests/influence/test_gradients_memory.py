"""Gradients of single examples, and self-influence, where memory runs out: halved, said, and the same numbers."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from curvlab.curvature.pass_size import MemoryWarning
from curvlab.influence import per_example_gradients, self_influence
from curvlab.solvers import Direct

CPU_ERROR = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"
SIZE = 20


class Limited(nn.Module):
    """A model on a machine that has room for a few rows at a time."""

    def __init__(self, most: int, *, convolution: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        first = nn.Conv1d(1, 2, 2) if convolution else nn.Linear(4, 6)
        self.inner = nn.Sequential(nn.Unflatten(1, (1, 4)), first, nn.Tanh(), nn.Flatten(), nn.Linear(6, 3))
        self.inner.double().eval()
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise RuntimeError(CPU_ERROR)
        return self.inner(x)


@pytest.fixture
def data(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(SIZE, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (SIZE,), generator=generator)


def one_by_one(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    rows = []
    for x, y in zip(*data, strict=True):
        loss = nn.functional.cross_entropy(model(x[None]), y[None])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return torch.stack(rows)


@pytest.mark.parametrize("convolution", [False, True])
def test_gradients_are_halved_until_they_fit(data, convolution: bool) -> None:
    model = Limited(6, convolution=convolution).eval()
    with pytest.warns(MemoryWarning) as told:
        found = per_example_gradients(model, nn.CrossEntropyLoss(), data, batch_size=16)
    sizes = [str(warning.message).split(" takes ")[1].split(" examples")[0] for warning in told]
    assert sizes == ["8", "4"]  # and the second batch begins with what the first one found
    assert_close(found, one_by_one(model, data), rtol=1e-11, atol=1e-13)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MemoryWarning)
        per_example_gradients(model, nn.CrossEntropyLoss(), data, batch_size=6)


def test_other_errors_pass(data) -> None:
    def broken(outputs: Tensor, targets: Tensor) -> Tensor:
        raise RuntimeError("of something else")

    model = Limited(SIZE, convolution=False).eval()
    with pytest.raises(RuntimeError, match="of something else"):
        per_example_gradients(model, nn.CrossEntropyLoss(), data, measurement=broken)


def test_self_influence_is_halved_until_it_fits(data) -> None:
    settings = {"damping": 0.1, "solver": Direct()}
    expected = self_influence(Limited(SIZE, convolution=False).eval(), nn.CrossEntropyLoss(), data, **settings)
    narrow = Limited(6, convolution=False).eval()
    with pytest.warns(MemoryWarning, match="memory ran out"):
        found = self_influence(narrow, nn.CrossEntropyLoss(), data, **settings)
    assert_close(found.own, expected.own, rtol=1e-9, atol=1e-12)
    assert_close(found.total, expected.total, rtol=1e-9, atol=1e-12)
