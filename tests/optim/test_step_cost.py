"""A step by a uniform direction costs O(n): what the operations of one step touch, counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from operation_counter import Counter
from torch import Tensor, nn

from curvlab.lab.models import LeNet5
from curvlab.linalg import LinearOperator
from curvlab.optim import NGD, UniformDirection


class Diagonal(LinearOperator):
    def matmat(self, vectors: Tensor) -> Tensor:
        return torch.linspace(1, 2, len(vectors), dtype=vectors.dtype)[:, None] * vectors


def counted_step(size: int, **settings: Any) -> Counter:
    x = nn.Parameter(torch.ones(size, dtype=torch.float64))
    optimizer = UniformDirection([x], Diagonal(size, dtype=torch.float64, device="cpu"), **settings)
    x.grad = torch.ones_like(x)
    with Counter() as counter:
        optimizer.step()
    return counter


@pytest.mark.parametrize(
    "settings",
    [
        {"sigma": 1.0, "hessian_lipschitz": 1.0},
        {"sigma": 1.0, "hessian_lipschitz": 1.0, "symmetrize": False, "safeguard": False},
        {"sigma": 1.0, "num_directions": 8},  # M estimated
    ],
)
def test_twice_the_parameters_cost_twice_as_much(settings: dict[str, Any]) -> None:
    once, twice = counted_step(20_000, **settings), counted_step(40_000, **settings)
    assert twice.entries / once.entries == pytest.approx(2, rel=0.02)
    assert once.entries > 20_000 * 5  # the count sees the step at all
    assert once.largest <= 20_000 * 2 * settings.get("num_directions", 1)


def test_a_step_of_ngd_between_updates_waits_once() -> None:
    # Every read of a number by the host is a wait for the device; the check of the gradients needs one.
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in [(6, 5), (6, 5), (7,), (4, 3, 2)]]
    optimizer = NGD(parameters, lr=0.1)
    for _ in range(11):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    with Counter() as counter:
        optimizer.step()
    assert counter.host_reads == 1


def test_small_networks_take_few_calls() -> None:
    # A call takes microseconds, more than its arithmetic: 10 tensors and 18 axes once took 1,563 and 423.
    generator = torch.Generator().manual_seed(0)
    parameters = list(LeNet5(input_shape=[1, 28, 28], num_outputs=10).parameters())
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer = NGD(parameters, lr=0.1)
    calls = []
    for _ in range(16):
        with Counter() as counter:
            optimizer.step()
        calls.append(counter.calls)
    assert calls[12] <= 400  # an update
    assert calls[13] <= 100  # the first after it: products that are kept until the next update
    assert calls[14] <= 60


def test_the_counter_sees_a_dense_matrix() -> None:
    x = torch.ones(300)
    with Counter() as counter:
        torch.outer(x, x).sum()
    assert counter.largest == 300**2
