"""dattri's EK-FAC as the benchmark mends it, without dattri: its inverse against a dense one."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from experiments.benchmarks.attribution.libraries.mended_ekfac import mended

DAMPING = 0.1


def estimate_eigenvector(covariances: dict[str, tuple[Tensor, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    """Eigenvectors in columns, as dattri 0.3.0 has them."""
    return {name: (torch.linalg.eigh(a)[1], torch.linalg.eigh(s)[1]) for name, (a, s) in covariances.items()}


@pytest.fixture
def fisher(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    fisher = SimpleNamespace(estimate_eigenvector=estimate_eigenvector)
    func = ModuleType("dattri.func")
    func.fisher = fisher  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dattri", ModuleType("dattri"))
    monkeypatch.setitem(sys.modules, "dattri.func", func)
    return fisher


def covariance(size: int) -> Tensor:
    factor = torch.randn(size, size, dtype=torch.float64)
    return factor @ factor.T


def test_the_mended_inverse_is_the_dense_one(fisher: SimpleNamespace) -> None:
    torch.manual_seed(0)
    layers = {"0": nn.Linear(4, 3).double(), "2": nn.Linear(3, 2).double()}
    covariances = {n: (covariance(m.in_features + 1), covariance(m.out_features)) for n, m in layers.items()}
    lambdas = {n: torch.rand(m.out_features, m.in_features + 1).double() for n, m in layers.items()}
    mended(object)
    attributor = mended(object)()  # again, as a call that is repeated for its seconds does
    attributor.module_name, attributor.name_to_module = list(layers), layers
    attributor.cached_q, attributor.cached_lambdas = fisher.estimate_eigenvector(covariances), lambdas
    attributor.damping = DAMPING
    gradients = torch.randn(5, sum(p.numel() for m in layers.values() for p in m.parameters())).double()
    found = attributor.transform_test_rep(0, gradients)

    start = 0
    for name, layer in layers.items():
        (rows, columns), size = (
            (layer.out_features, layer.in_features + 1),
            sum(p.numel() for p in layer.parameters()),
        )
        # Where an entry of [W b], row by row, lies among the weights and then the biases.
        place = torch.arange(rows * (columns - 1)).view(rows, -1)
        place = torch.cat([place, place.numel() + torch.arange(rows)[:, None]], dim=1).flatten()
        (q_a, q_s), scale = estimate_eigenvector(covariances)[name], lambdas[name].flatten() + DAMPING
        rotation = torch.kron(q_s, q_a)
        dense = rotation @ torch.diag(1 / scale) @ rotation.T
        own = gradients[:, start : start + size][:, place] @ dense
        torch.testing.assert_close(found[:, start : start + size][:, place], own)
        start += size
