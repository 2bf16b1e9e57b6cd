"""Recorded operations with fewer of them give the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from curvlab.problem.simplified import simplified

OFFSET = torch.randn(3, generator=torch.Generator().manual_seed(0))


def twice(x: Tensor) -> tuple[Tensor, ...]:
    return ((x.exp() + x.exp()).sum(0),)


def turned_back(x: Tensor) -> tuple[Tensor, ...]:
    return (x.transpose(0, 1).transpose(1, 0) @ x.t().t().transpose(0, 1),)


def turned_otherwise(x: Tensor) -> tuple[Tensor, ...]:
    cube = x.expand(2, *x.shape)
    return (cube.transpose(0, 1).transpose(1, 2) * 1,)


def by_one(x: Tensor) -> tuple[Tensor, ...]:
    return ((x * 1).sin(), (x.bool() * 1.0).cos(), x * 2 * 2.0)


def of_shapes_alone(x: Tensor) -> tuple[Tensor, ...]:
    return (x + torch.arange(3) + torch.ones_like(x).cumsum(0),)


def with_a_tensor_beside(x: Tensor) -> tuple[Tensor, ...]:
    return (x + OFFSET * 2 + OFFSET * 2,)


def drawn(x: Tensor) -> tuple[Tensor, ...]:
    return (x + torch.rand(3) - torch.rand(3),)


def returned_twice(x: Tensor) -> tuple[Tensor, ...]:
    return x.exp(), x.exp(), torch.zeros_like(x)


def changed_in_place(x: Tensor) -> tuple[Tensor, ...]:
    copy = x.exp()
    first = copy.sin()
    copy.add_(1)
    return first, copy.sin()


@pytest.mark.parametrize(
    ("function", "most"),
    [
        (twice, 3),
        (turned_back, 2),
        (turned_otherwise, 4),
        (by_one, 6),
        (of_shapes_alone, 2),
        (with_a_tensor_beside, 3),
        (drawn, 4),
        (returned_twice, 3),
        (changed_in_place, 4),
    ],
)
def test_fewer_operations_give_the_same_bits(function: Callable[..., tuple[Tensor, ...]], most: int) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    record = make_fx(function)(x)
    reduced = simplified(record)
    calls = [node for node in record.graph.nodes if node.op == "call_function"]
    assert len(calls) <= most
    for scale in (1.0, -3.0):
        torch.manual_seed(2)
        expected = function(scale * x)
        torch.manual_seed(2)
        found = reduced(scale * x)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert len({each.data_ptr() for each in found}) == len(found)
        OFFSET.mul_(-1)  # a tensor beside the arguments is read again


def test_what_is_returned_is_no_constant() -> None:
    x = torch.ones(2)
    reduced = simplified(make_fx(returned_twice)(x))
    reduced(x)[2].add_(1)
    assert torch.equal(reduced(x)[2], torch.zeros(2))
