"""The linear systems that influence functions solve: damped curvature, gradients of examples, fp64 references."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from curvlab.curvature import GaussNewtonOperator, HessianOperator
from curvlab.influence import per_example_gradients
from curvlab.lab import Run
from curvlab.linalg import LinearOperator, identity
from curvlab.problem import stack
from experiments.shared.task import TrainedTask

Pair = tuple[Tensor, Tensor]
MATRICES = {"gauss_newton": GaussNewtonOperator, "hessian": HessianOperator}


@dataclass(frozen=True)
class Systems:
    """(A + damping I) X = B for the gradients B of some examples' losses, and the test influences of X.

    Attributes:
        task: a `TrainedTask`, or a network with the same run, label, seed_name, key, model, loss and train.
        damping: added to A.
        sources: (inputs, targets) of the K examples whose gradients are the right-hand sides.
        tests: (inputs, targets) of the M examples whose losses are influenced.
        matrix: A at the model's weights: "gauss_newton" or "hessian".
    """

    task: Any
    damping: float
    sources: Pair
    tests: Pair
    matrix: str = "gauss_newton"

    @classmethod
    def at(cls, task: TrainedTask, damping: float, points: Tensor, test: Tensor, **more: Any) -> Self:
        """Return the systems of the places `points` in the task's `train`, and `test` in its test set."""
        return cls(task, damping, stack(task.train, points), stack(task.splits.test, test), **more)

    @property
    def run(self) -> Run:
        """The task's."""
        run: Run = self.task.run
        return run

    @property
    def key(self) -> dict[str, Any]:
        """What the answers depend on, beside how the examples were chosen."""
        sizes = {"num_points": len(self.sources[1]), "num_test": len(self.tests[1])}
        return self.task.key | {"damping": self.damping} | sizes

    @property
    def described(self) -> str:
        """The systems, for the terminal."""
        return f"{self.task.label}, damping {self.damping:.3g}"

    @cached_property
    def operator(self) -> GaussNewtonOperator | HessianOperator:
        """A, without damping."""
        return MATRICES[self.matrix](self.task.model, self.task.loss, self.task.train)

    @property
    def damped(self) -> LinearOperator:
        """A + damping I."""
        return self.operator + self.damping * identity

    @cached_property
    def right_hand_sides(self) -> Tensor:
        """B, (P, K)."""
        return per_example_gradients(self.task.model, self.task.loss, self.sources).T

    @cached_property
    def test_gradients(self) -> Tensor:
        """Gradients of the test losses, (M, P): minus their products with X are the influences, (M, K)."""
        return per_example_gradients(self.task.model, self.task.loss, self.tests)

    def in_double_precision(self) -> Self:
        """Return the same systems for a copy of the network in fp64."""
        # copy.copy, since the fields of a network are its own; the data take the model's dtype at each pass.
        task = copy.copy(self.task)
        object.__setattr__(task, "model", copy.deepcopy(self.task.model).double())
        return replace(self, task=task, sources=_double(self.sources), tests=_double(self.tests))


def _double(pair: Pair) -> Pair:
    """Return inputs and targets in fp64, integers as they are."""
    inputs, targets = (t.to(torch.float64) if t.is_floating_point() else t for t in pair)
    return inputs, targets
