"""The optimizers that all shared tests run over (to join is one line in ENTRIES), and a counter of operations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from curvlab.curvature import FisherOperator, HessianOperator
from curvlab.optim import (
    NGD,
    QNG,
    CubicNewton,
    ExactNGD,
    FisherNewton,
    Ginger,
    UniformDirection,
    sampled_label_loss,
)


class Regression:
    """A small convex problem: softmax regression of twelve points, a frozen scale in front of it.

    The model's parameters that require gradients are a matrix and a vector.
    """

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(12, 4, generator=generator, dtype=torch.float64).to(dtype)
        self.targets = torch.randint(3, (12,), generator=generator)
        self.model = nn.Sequential(nn.LayerNorm(4, bias=False), nn.Linear(4, 3)).to(dtype)
        self.model[0].weight.requires_grad_(False)
        with torch.no_grad():
            for parameter in self.model[1].parameters():
                start = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(start)
        self.loss = nn.CrossEntropyLoss()
        self.generator = torch.Generator().manual_seed(1)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The matrix and the vector."""
        return list(self.model[1].parameters())

    @property
    def hessian(self) -> HessianOperator:
        return HessianOperator(self.model, self.loss, (self.inputs, self.targets))

    @property
    def fisher(self) -> FisherOperator:
        return FisherOperator(self.model, self.loss, (self.inputs, self.targets))

    def value(self) -> Tensor:
        return self.loss(self.model(self.inputs), self.targets)

    def set_gradients(self, sign: float = 1.0) -> None:
        self.model.zero_grad()
        (sign * self.value()).backward()

    def set_sampled_gradients(self) -> None:
        self.model.zero_grad()
        outputs = self.model(self.inputs)
        sampled_label_loss(self.loss, outputs, self.targets, generator=self.generator).backward()

    def vector(self) -> Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])


@dataclass(frozen=True)
class Entry:
    """An optimizer as the shared tests use it.

    Attributes:
        kind: its class.
        settings: its keyword arguments, `lr` among them, with which it lowers the loss of `Regression`.
        bad: settings that it refuses, and a part of the message.
        needs: "" for parameters alone; "hessian" or "fisher" for an operator as its second argument; "curvature"
            for update_curvature() with the gradient of sampled labels before each step.
        keywords: further arguments taken from the problem, such as its generator.
        one_group: it takes one group of parameters and refuses more.
    """

    kind: type[torch.optim.Optimizer]
    settings: dict[str, Any]
    bad: list[tuple[dict[str, Any], str]]
    needs: str = ""
    keywords: Callable[[Regression], dict[str, Any]] = field(default=lambda problem: {})
    one_group: bool = False

    def __str__(self) -> str:
        return self.kind.__name__

    def build(self, problem: Regression, params: Any = None, **changes: Any) -> torch.optim.Optimizer:
        """Return the optimizer of the problem's parameters (or of `params`), with changed settings."""
        operator = [getattr(problem, self.needs)] if self.needs in ("hessian", "fisher") else []
        settings = self.settings | self.keywords(problem) | changes
        return self.kind(problem.parameters if params is None else params, *operator, **settings)

    def offers(self, setting: str) -> bool:
        return setting in self.build(Regression()).param_groups[0]

    def step(self, problem: Regression, optimizer: torch.optim.Optimizer, count: int = 1) -> None:
        """Take steps as a user does."""
        for _ in range(count):
            if self.needs == "curvature":
                problem.set_sampled_gradients()
                optimizer.update_curvature()
            problem.set_gradients()
            optimizer.step()


# What is refused beside 0, -1, infinity, nan and texts, which conformance/test_bad_input.py tries of every number.
LOW_RANK = [
    ({"decay": 1.0}, "decay must lie between 0 and 1"),
    ({"momentum": 1.0}, "momentum must be at least 0 and below 1"),
    ({"scope": "layer"}, "scope must be 'global', 'group' or 'tensor', got 'layer'"),
]
KALDI = [
    ({"alpha": -0.1}, "the paper uses 0.01 to 0.1"),
    ({"eta": 1.0}, "between 0 and 1"),
    ({"delta": 1.0}, "delta from 0 to 1"),
    ({"rank": 0}, "rank must be at least 1, got 0: None chooses"),
]
EXACT = [({"max_size": 1}, "use NGD, or raise max_size")]
CUBIC = [({"max_size": 1}, r"forms the \(15, 15\) Hessian, more than max_size = 1")]


def seeded(problem: Regression) -> dict[str, Any]:
    return {"generator": problem.generator}


ENTRIES = [
    Entry(NGD, {"lr": 0.3}, KALDI),
    Entry(ExactNGD, {"lr": 0.5, "alpha": 1.0, "epsilon": 1.0}, EXACT, needs="fisher", one_group=True),
    Entry(Ginger, {"lr": 0.02, "rank": 3, "decay": 0.9, "damping": 0.1}, LOW_RANK, needs="curvature"),
    Entry(QNG, {"lr": 0.1, "rank": 3, "decay": 0.9}, LOW_RANK, needs="curvature"),
    Entry(FisherNewton, {"sigma": 0.1}, [], needs="fisher", one_group=True),
    Entry(CubicNewton, {"hessian_lipschitz": 1.0}, CUBIC, needs="hessian", one_group=True),
    Entry(UniformDirection, {"sigma": 0.5}, [], needs="hessian", keywords=seeded, one_group=True),
    # A variant of one above, where it takes another path through the shared tests.
    Entry(NGD, {"lr": 0.3, "rescale": False, "update_period": 1}, []),
    Entry(
        Ginger,
        {"lr": 0.1, "rank": 2, "decay": 0.9, "damping": 0.1, "momentum": 0.9, "scope": "tensor"},
        [],
        needs="curvature",
    ),
    Entry(QNG, {"lr": 0.1, "rank": 2, "decay": 0.9, "momentum": 0.5, "as_coded": True}, [], needs="curvature"),
    # torch's own, which shows that the shared tests ask for no more than its conventions.
    Entry(torch.optim.SGD, {"lr": 0.3, "momentum": 0.5}, [({"lr": -1.0}, "Invalid learning rate")]),
]


def twin(problem: Regression, optimizer: torch.optim.Optimizer) -> tuple[Regression, torch.optim.Optimizer]:
    """Return independent copies that belong together."""
    return copy.deepcopy((problem, optimizer))


# --- What operations touch, counted: the cost of a step without a clock
class Counter(TorchDispatchMode):
    """Calls, entries of all tensors that they read and write, the largest among them, and single numbers read."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.entries = self.largest = self.host_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        self.calls += 1
        self.entries += sum(sizes)
        self.host_reads += func is torch.ops.aten._local_scalar_dense.default
        self.largest = max([self.largest, *sizes])
        return result
