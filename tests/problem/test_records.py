"""Recorded calls: equal to the calls themselves, number by number, and only where a record is right."""

import threading

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from curvlab.problem.records import Records


class _Counted:
    """Gradients of a network's loss for K copies, and how often Python went through them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        self.scale = torch.ones(2)
        self.num_calls = 0

    def __call__(self, values: dict[str, Tensor], inputs: Tensor, weights: Tensor | None) -> list[Tensor]:
        self.num_calls += 1

        def loss(own: dict[str, Tensor], x: Tensor) -> Tensor:
            outputs = functional_call(self.model, own, (x,)) * self.scale
            losses = outputs.logsumexp(-1)
            return losses.mean() if weights is None else losses @ weights

        gradients, found = vmap(grad_and_value(loss), in_dims=(0, None))(values, inputs)
        return [found, *gradients.values()]

    def arguments(self, seed: int, size: int = 7) -> tuple[dict[str, Tensor], Tensor]:
        generator = torch.Generator().manual_seed(seed)
        copies = {
            name: torch.randn(4, *value.shape, generator=generator)
            for name, value in self.model.named_parameters()
        }
        return copies, torch.randn(size, 3, generator=generator)


def test_replays_are_equal_and_run_no_python() -> None:
    function, direct, records = _Counted(), _Counted(), Records(calls_before=2)
    for seed in range(6):
        for weights in (None, torch.full((7,), 0.5 + seed)):
            arguments = (*function.arguments(seed), weights)
            found = records.call("loss", function, *arguments)
            assert all(map(torch.equal, found, direct(*arguments)))
    # For each of the two: two calls, and at the third the record, a call to check it against.
    assert function.num_calls == 2 * (2 + 2)


def test_each_shape_has_its_own_record_and_tensors_read_beside_are_read_again() -> None:
    function, direct, records = _Counted(), _Counted(), Records(calls_before=0)
    for seed, size in enumerate((7, 4, 7, 4)):
        for each in (function, direct):
            each.scale.fill_(seed + 1)
        arguments = (*function.arguments(seed, size), None)
        found = records.call("loss", function, *arguments)
        assert all(map(torch.equal, found, direct(*arguments)))
    assert function.num_calls == 2 * 2


def test_a_function_that_branches_on_values_is_called_as_before() -> None:
    def function(x: Tensor) -> list[Tensor]:
        return [x.exp() if x.sum() > 0 else -x]

    records = Records(calls_before=1)
    for value in (1.0, 2.0, 3.0, -1.0):
        x = torch.tensor([value])
        (found,) = records.call("branch", function, x)
        assert torch.equal(found, function(x)[0])


@pytest.mark.parametrize("by_chance", [False, True], ids=["counter", "random"])
def test_a_record_that_returns_other_numbers_is_not_used(*, by_chance: bool) -> None:
    calls = []

    def function(x: Tensor) -> list[Tensor]:
        calls.append(1)
        return [x + torch.randn(()) if by_chance else x + len(calls)]

    records = Records(calls_before=1)
    found = [float(records.call("own state", function, torch.zeros(()))[0]) for _ in range(5)]
    assert len(set(found)) == 5
    assert len(calls) >= 5


def test_other_threads_neither_record_nor_replay() -> None:
    function, records = _Counted(), Records(calls_before=0)
    arguments = (*function.arguments(0), None)
    for _ in range(3):
        thread = threading.Thread(target=records.call, args=("loss", function, *arguments))
        thread.start()
        thread.join()
    assert function.num_calls == 3
