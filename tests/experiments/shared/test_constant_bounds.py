"""Bounds of the constant of condition C.1 against dense matrices of every example."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from experiments.shared import constant_bounds as module
from experiments.shared.constant_bounds import constant_bounds

CFG = SimpleNamespace(constant={"num_leading": 2, "num_random": 3})


class UnitRun:
    """Computes every unit."""

    def unit(self, name: str, key: dict, compute, *, version: int, about: str) -> dict:
        return compute()

    def generator(self, *names: object) -> torch.Generator:
        return torch.Generator().manual_seed(len(names))

    def add_matvecs(self, count: int) -> None:
        pass


class Scaled(nn.Module):
    """A linear layer and a parameter outside of it, so that exact traces are not to be had."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale * self.linear(inputs)


def small_task(model: nn.Module, *, length: int | None = None) -> SimpleNamespace:
    torch.manual_seed(1)
    shape = (12,) if length is None else (12, length)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(2 * torch.randn_like(parameter))
    inputs = 2 * torch.randn(*shape, 4, dtype=torch.float64)
    return SimpleNamespace(
        label="small",
        seed_name="small",
        is_language=length is not None,
        predictions_per_example=float(length or 1),
        key={},
        model=model,
        loss=nn.CrossEntropyLoss(),
        train=(inputs, torch.randint(3, shape)),
        num_train=12,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def examples(task: SimpleNamespace) -> Tensor:
    """G_i from its definition, the Jacobian one output at a time, (N, P, P)."""
    found = []
    for inputs in task.train[0]:
        outputs = task.model(inputs).reshape(-1, 3)
        rows = [
            torch.autograd.grad(o, list(task.model.parameters()), retain_graph=True) for o in outputs.flatten()
        ]
        jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).view(len(outputs), 3, -1)
        p = outputs.detach().softmax(-1)
        middle = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        found.append((jacobian.mT @ middle @ jacobian).mean(0))
    return torch.stack(found)


def needed(of_one: Tensor) -> float:
    """The least c with E G_i² - G² ⪯ c G, on the range of G."""
    mean = of_one.mean(0)
    values, vectors = torch.linalg.eigh(mean)
    kept = values > 1e-9 * values.max()
    half = vectors[:, kept] / values[kept].sqrt()
    gap = (of_one @ of_one).mean(0) - mean @ mean
    return float(torch.linalg.eigvalsh(half.T @ gap @ half).max())


@pytest.mark.parametrize(("model", "length"), [(nn.Linear(4, 3), None), (Scaled(), None), (Scaled(), 5)])
def test_bounds_hold_what_is_needed(model: nn.Module, length: int | None) -> None:
    task = small_task(model, length=length)
    of_one, unit = examples(task), task.predictions_per_example
    found = constant_bounds(UnitRun(), task, CFG)
    assert found["at_least"] <= unit * needed(of_one) * (1 + 1e-9) <= found["at_most"] * (1 + 1e-9)
    assert found["at_least"] > 0.3 * unit * needed(of_one)
    traces = of_one.diagonal(dim1=1, dim2=2).sum(1)
    if isinstance(model, nn.Linear):
        assert found["at_most"] == pytest.approx(float(traces.max()), rel=1e-9)
        assert found["trace"] == pytest.approx(float(traces.mean()), rel=1e-9)
    else:  # by Lanczos, a little above the largest eigenvalue
        largest = unit * float(torch.linalg.eigvalsh(of_one).max())
        assert largest * (1 - 1e-9) <= found["at_most"] <= 1.07 * largest


def test_leading_direction_is_that_of_dense_matrices() -> None:
    task = small_task(nn.Linear(4, 3))
    of_one = examples(task)
    mean = of_one.mean(0)
    values, vectors = torch.linalg.eigh(mean)
    v = vectors[:, -1]
    expected = float(((of_one @ v).square().sum(1).mean() - (mean @ v).square().sum()) / values[-1])
    found = constant_bounds(UnitRun(), task, CFG)
    assert found["leading"][0] == pytest.approx(expected, rel=0.02)


def test_without_traces_too_many_examples_have_no_upper_bound(monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST_EXAMPLES", 5)
    found = constant_bounds(UnitRun(), small_task(Scaled()), CFG)
    assert found["at_most"] == float("inf")
    assert found["at_least"] > 0
