"""Texts of work: different wherever a result would be; the same in every process, see test_package."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from curvlab.described import described, fingerprint
from curvlab.linalg import DenseOperator, identity
from tests.models import Examples

SCALE = 2.0


class Pairs(Dataset):
    """A map-style data set whose examples can be changed from outside, or be drawn when they are read."""

    def __init__(self, value: float, *, random: bool = False) -> None:
        self.value, self.random = value, random

    def __len__(self) -> int:
        return 500

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        return torch.full((2,), self.value + place) + (torch.randn(2) if self.random else 0), place % 3


def focal(outputs: Tensor, targets: Tensor, gamma: float) -> Tensor:
    return ((1 - outputs) ** gamma * targets).mean()


def scaled(outputs: Tensor, targets: Tensor) -> Tensor:
    return SCALE * (outputs - targets).mean()


def warmed_up(steps: int) -> Callable[[int], float]:
    return lambda step: min(1.0, (step + 1) / steps)


class Schedule:
    def __init__(self, power: float) -> None:
        self.power = power

    def factor(self, step: int) -> float:
        return step**self.power


def edited(base: type, name: str, body: str) -> Any:
    """Return an object of a class of one name and of attributes that do not differ, only the code of a method."""
    space: dict[str, Any] = {}
    exec(f"def {name}(self, x):\n    return {body}", {"__name__": __name__}, space)  # noqa: S102 - what users edit
    return type("Edited", (base,), {"__module__": __name__, **space})()


def linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(2, 2)


def cyclic(value: int) -> dict[str, Any]:
    found: dict[str, Any] = {"value": value}
    found["self"] = found
    return found


# Each made by a function of one number: equal numbers give equal texts, others other texts.
PARTS: dict[str, Callable[[int], Any]] = {
    "class weights": lambda k: nn.CrossEntropyLoss(weight=torch.tensor([1.0, k])),
    "label smoothing": lambda k: nn.CrossEntropyLoss(label_smoothing=0.1 * k),
    "a module's parameters": linear,
    "the argument of a partial": lambda k: partial(focal, gamma=k),
    "the closure of a schedule": warmed_up,
    "the object of a method": lambda k: Schedule(k).factor,
    "a default": lambda k: lambda step, power=k: step**power,
    "a default by keyword": lambda k: lambda step, *, power=k: step**power,
    "a tensor": lambda k: torch.tensor([0.0, k]),
    "an array": lambda k: np.array([0.0, k]),
    "an array of objects": lambda k: np.array([None, str(k)], dtype=object),
    "tensors as data": lambda k: (torch.arange(4.0), torch.full((4,), k)),
    "a TensorDataset": lambda k: TensorDataset(torch.full((4, 2), k)),
    "a map-style data set": Pairs,
    "a data set that draws": lambda k: Pairs(k, random=True),
    "indices of a subset": lambda k: Subset(Pairs(0), [0, k]),
    "a loader's batches": lambda k: DataLoader(Pairs(0), batch_size=k),
    "batches": lambda k: [{"ids": torch.tensor([[k]]), "labels": torch.tensor([0])}],
    "a generator": lambda k: torch.Generator().manual_seed(k),
    "an operator": lambda k: DenseOperator(torch.eye(3) * k),
    "an operator's damping": lambda k: {"operator": DenseOperator(torch.eye(3)), "damping": k},
    "an object that holds itself": cyclic,
    "a set": lambda k: {f"name {i}" for i in range(5 * k)},
    "a model's forward": lambda k: edited(nn.Module, "forward", f"x * {k}"),
    "the forward of a part": lambda k: nn.Sequential(edited(nn.Module, "forward", f"x * {k}")),
    "another method of a loss": lambda k: edited(nn.MSELoss, "scale", f"x + {k}"),
    "the call of an object": lambda k: edited(object, "__call__", f"x ** {k}"),
    "the 101st of 200 examples": lambda k: Examples([torch.tensor(k * (i == 101)) for i in range(200)]),
    "an operator under a large damping": lambda k: DenseOperator(torch.eye(3) * k / 1e9) + 1e9 * identity,
    "a constant": lambda k: (lambda x: x + 1) if k == 1 else (lambda x: x + 2),
}


@pytest.mark.parametrize("make", PARTS.values(), ids=PARTS.keys())
def test_equal_parts_have_equal_texts_and_others_do_not(make: Callable[[int], Any]) -> None:
    assert described(make(1)) == described(make(1))
    assert described(make(1)) != described(make(2))


def test_a_global_of_the_functions_own_module_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = described(scaled)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert described(scaled) != before


def test_reading_examples_changes_no_random_state() -> None:
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    described(Pairs(0, random=True))
    assert torch.equal(torch.randn(3), expected)


@pytest.mark.parametrize(
    "part", [threading.Lock(), iter([1]), (k for k in "ab")], ids=["lock", "iterator", "generator"]
)
def test_what_nothing_distinguishes_is_refused(part: Any) -> None:
    with pytest.raises(TypeError, match="a checkpoint would not know whether it belongs to the same work: pass"):
        described({"loss": partial(focal, gamma=part)})


def test_a_fingerprint_is_of_values_shapes_and_types() -> None:
    base = torch.arange(6.0)
    others = [base + 1, base.view(2, 3), base.double(), base.bfloat16(), base.bool()]
    assert len({fingerprint([tensor]) for tensor in [base, *others]}) == 6
    assert fingerprint([base.view(2, 3).T.contiguous().T]) == fingerprint([base.view(2, 3)])
    assert fingerprint([torch.tensor(2.0).expand(3)]) == fingerprint([torch.full((3,), 2.0)])
    assert fingerprint([]) == fingerprint(iter([]))
