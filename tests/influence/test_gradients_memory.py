"""Gradients of single examples, and self-influence, where memory runs out: halved, said, and the same numbers."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from curvlab.influence import derivatives, directional_derivatives, per_example_gradients, self_influence
from curvlab.influence.self_influence import curvature_probes
from curvlab.problem import Problem, mean_gradient
from curvlab.problem.memory import MemoryWarning
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


@pytest.mark.parametrize("convolution", [False, True])
def test_derivatives_along_directions_are_halved_until_they_fit(data, convolution: bool) -> None:
    model = Limited(6, convolution=convolution).eval()
    gradients = one_by_one(model, data)
    directions = torch.randn(gradients.shape[1], 3, dtype=torch.float64)
    with pytest.warns(MemoryWarning, match="a pass now takes 5 examples"):
        found = directional_derivatives(model, nn.CrossEntropyLoss(), data, directions)
    assert_close(found, gradients @ directions, rtol=1e-11, atol=1e-13)


def test_so_are_directions_where_fewer_examples_do_not_help(data, monkeypatch: pytest.MonkeyPatch) -> None:
    vmap, seen = derivatives.vmap, []

    def narrow(function):
        def call(*columns: Tensor) -> Tensor:
            seen.append(len(columns[0]))
            if len(columns[0]) > 3:
                raise RuntimeError(CPU_ERROR)
            return vmap(function)(*columns)

        return call

    monkeypatch.setattr(derivatives, "vmap", narrow)
    model = Limited(SIZE, convolution=False).eval()
    gradients = one_by_one(model, data)
    directions = torch.randn(gradients.shape[1], 8, dtype=torch.float64)
    with pytest.warns(MemoryWarning, match="2 vectors"):
        found = directional_derivatives(model, nn.CrossEntropyLoss(), data, directions)
    assert max(seen) == 8
    assert seen[-1] == 2
    assert_close(found, gradients @ directions, rtol=1e-11, atol=1e-13)


def test_the_mean_gradient_is_halved_until_it_fits(data) -> None:
    model = Limited(6, convolution=False).eval()
    with pytest.warns(MemoryWarning, match="a pass now takes 5 examples"):
        found = mean_gradient(model, nn.CrossEntropyLoss(), data)
    assert_close(found, one_by_one(model, data).mean(0), rtol=1e-11, atol=1e-13)


def test_probes_of_pieces_have_the_covariance_of_all(data, generator: torch.Generator) -> None:
    weights = torch.linspace(0, 2, SIZE, dtype=torch.float64)
    probes = []
    for most in (SIZE, 6):
        model = Limited(most, convolution=False).eval()
        problem = Problem.of(model, nn.CrossEntropyLoss(), data, weights)
        if most < SIZE:
            with pytest.warns(MemoryWarning, match="a pass now takes 5 examples"):
                probes.append(curvature_probes(problem, 4000, generator))
        else:
            probes.append(curvature_probes(problem, 4000, generator))
    whole, pieces = (sample @ sample.T / sample.shape[1] for sample in probes)
    dense = dense_gauss_newton(model.inner, data, weights)
    assert (whole - dense).norm() / dense.norm() < 0.1
    assert (pieces - dense).norm() / dense.norm() < 0.1


def dense_gauss_newton(model: nn.Module, data: tuple[Tensor, Tensor], weights: Tensor) -> Tensor:
    """Return 1/N Σ w_n J_nᵀ (diag p - p pᵀ) J_n, row by row."""
    parameters, total = list(model.parameters()), 0
    for x, weight in zip(data[0], weights, strict=True):
        outputs = model(x[None])[0]
        rows = [torch.autograd.grad(out, parameters, retain_graph=True) for out in outputs]
        jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        p = outputs.detach().softmax(0)
        total += weight * jacobian.T @ (torch.diag(p) - torch.outer(p, p)) @ jacobian
    return total / len(data[0])


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
