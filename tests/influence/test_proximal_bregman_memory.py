"""Proximal Bregman objectives where memory runs out: halved, said, and the same numbers."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from curvlab.influence import ProximalBregmanObjective
from curvlab.influence.proximal_bregman import objective as module
from curvlab.problem.memory import MemoryWarning

CPU_ERROR = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"


class Limited(nn.Module):
    """A model on a machine that has room for a few rows at a time."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double().eval()
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise RuntimeError(CPU_ERROR)
        return self.inner(x)


def objective(most: int, weights: Tensor | None = None) -> ProximalBregmanObjective:
    torch.manual_seed(0)
    model = Limited(most).eval()
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    targets = torch.randint(2, (40,), generator=generator)
    points = (inputs[:3], targets[:3])
    return ProximalBregmanObjective(
        model, nn.CrossEntropyLoss(), (inputs, targets), points, damping=0.1, epsilon=0.1, weights=weights
    )


def quantities(of: ProximalBregmanObjective) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    u = torch.randn(of.shape, generator=generator, dtype=torch.float64)
    return {
        "gradient": of.gradient(u),
        "of two points": of.gradient(u[:, 1:], columns=torch.tensor([1, 2])),
        "value": of.value(u),
        "on a batch": of.sampled_gradient(u, batch_size=20, generator=generator),
        "drawn by weights": of.sampled_gradient(
            u, batch_size=20, weights=torch.arange(1.0, 41), generator=generator
        ),
    }


@pytest.mark.parametrize("weights", [None, torch.linspace(0, 2, 40)], ids=["alike", "weighted"])
def test_passes_are_halved_until_they_fit_and_stay_so(weights: Tensor | None) -> None:
    roomy, narrow = objective(10**6, weights), objective(12, weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MemoryWarning)
        expected = quantities(roomy)
    with pytest.warns(MemoryWarning, match="memory ran out: a pass now takes 10 examples and 3 vectors"):
        found = quantities(narrow)
    for name, value in expected.items():
        assert_close(found[name], value, rtol=1e-11, atol=1e-13)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MemoryWarning)  # it has learnt
        quantities(narrow)


def test_points_are_halved_when_there_are_more_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy, narrow = objective(10**6), objective(10**6)
    narrow_gradient = module.ProximalBregmanObjective._divergence_gradient

    def limited(own, batch, loss, displacement: Tensor, epsilon: Tensor) -> Tensor:
        if own is narrow and displacement.shape[1] * len(batch[1]) > 1:
            raise MemoryError
        return narrow_gradient(own, batch, loss, displacement, epsilon)

    monkeypatch.setattr(module.ProximalBregmanObjective, "_divergence_gradient", limited)
    u = torch.randn(roomy.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with pytest.warns(MemoryWarning, match="1 examples and 1 vectors"):
        found = narrow.gradient(u)
    assert_close(found, roomy.gradient(u), rtol=1e-11, atol=1e-13)


def test_the_budget_reaches_the_curvature() -> None:
    of = objective(10**6)
    tight = ProximalBregmanObjective(
        of.model, of.loss_module, of.train, of.train, damping=0.1, epsilon=0.1, memory_budget=2**11
    )
    vectors = torch.ones(of.shape[0], 2, dtype=torch.float64)
    with pytest.warns(MemoryWarning, match="that are given: a pass takes"):
        found = tight.curvature(torch.float64) @ vectors
    assert_close(found, of.curvature(torch.float64) @ vectors, rtol=1e-11, atol=1e-13)
