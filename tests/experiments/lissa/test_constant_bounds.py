"""Bounds of the constant of condition C.1 against dense matrices of every example."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experiments.lissa import constant_bounds as module
from experiments.lissa.constant_bounds import constant_bounds

NUMBERS = {"num_leading": 2, "num_random": 3}


class Scaled(nn.Module):
    """A linear layer and a parameter outside of it, so that exact traces are not to be had."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale * self.linear(inputs)


def bounded_task(run: Any, model: nn.Module, *, length: int | None = None) -> SimpleNamespace:
    torch.manual_seed(1)
    shape = (12,) if length is None else (12, length)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(2 * torch.randn_like(parameter))
    data = 2 * torch.randn(*shape, 4, dtype=torch.float64), torch.randint(3, shape)
    size, loss = sum(parameter.numel() for parameter in model.parameters()), nn.CrossEntropyLoss()
    own: dict[str, Any] = {"run": run, "key": {"seed_name": "small"}, "is_language": length is not None}
    own |= {"predictions_per_example": float(length or 1), "num_train": 12, "num_parameters": size}
    own |= {"generator": lambda stream: run.generator(stream, "small")}
    return SimpleNamespace(model=model, loss=loss, train=data, **own)


def examples(task: SimpleNamespace) -> Tensor:
    """G_i from its definition, the Jacobian one output at a time, (N, P, P)."""
    found = []
    for inputs in task.train[0]:
        outputs = task.model(inputs).reshape(-1, 3)
        parameters = list(task.model.parameters())
        rows = [torch.autograd.grad(output, parameters, retain_graph=True) for output in outputs.flatten()]
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
def test_bounds_hold_what_is_needed(stub_run, model: nn.Module, length: int | None) -> None:
    task = bounded_task(stub_run, model, length=length)
    of_one, unit = examples(task), task.predictions_per_example
    found = constant_bounds(task, **NUMBERS)
    assert found["at_least"] <= unit * needed(of_one) * (1 + 1e-9) <= found["at_most"] * (1 + 1e-9)
    assert found["at_least"] > 0.3 * unit * needed(of_one)
    traces = of_one.diagonal(dim1=1, dim2=2).sum(1)
    if isinstance(model, nn.Linear):
        assert found["at_most"] == pytest.approx(float(traces.max()), rel=1e-9)
        assert found["trace"] == pytest.approx(float(traces.mean()), rel=1e-9)
    else:  # by Lanczos, a little above the largest eigenvalue
        largest = unit * float(torch.linalg.eigvalsh(of_one).max())
        assert largest * (1 - 1e-9) <= found["at_most"] <= 1.07 * largest


def test_leading_direction_is_that_of_dense_matrices(stub_run) -> None:
    task = bounded_task(stub_run, nn.Linear(4, 3))
    of_one = examples(task)
    mean = of_one.mean(0)
    values, vectors = torch.linalg.eigh(mean)
    v = vectors[:, -1]
    expected = float(((of_one @ v).square().sum(1).mean() - (mean @ v).square().sum()) / values[-1])
    found = constant_bounds(task, **NUMBERS)
    assert found["leading"][0] == pytest.approx(expected, rel=0.02)


def test_without_traces_too_many_examples_have_no_upper_bound(stub_run, monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST_EXAMPLES", 5)
    found = constant_bounds(bounded_task(stub_run, Scaled()), **NUMBERS)
    assert found["at_most"] == float("inf")
    assert found["at_least"] > 0
