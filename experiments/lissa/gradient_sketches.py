"""Dot products of gradients under dense and per-tensor sketches (Klochkov & Liu 2024, App. C)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvlab.influence import per_example_gradients
from curvlab.lab import unit
from curvlab.problem import stack
from experiments.shared.spectrum import gauss_newton
from experiments.shared.task import TrainedTask


@dataclass(frozen=True)
class _Tensors:
    """Parameter tensors, and what this process holds of their gradients: all, unless the model is cut up.

    Attributes:
        sizes: numbers of each, whole.
        own: those that are here, of each.
        total: sums over the processes that hold the others.
    """

    sizes: list[int]
    own: list[slice]
    total: Callable[[Tensor], Tensor]

    @classmethod
    def whole(cls, sizes: list[int]) -> _Tensors:
        """Return those of a model that is in one place."""
        return cls(sizes, [slice(0, size) for size in sizes], lambda part: part)

    def split(self, vectors: Tensor) -> tuple[Tensor, ...]:
        """Return the columns of each tensor."""
        return vectors.split([len(range(n)[own]) for n, own in zip(self.sizes, self.own, strict=True)], dim=1)


@unit("lissa/gradient_sketches", version=1, about="sketches of gradients of {seed_name}")
def gradient_pairs(
    task: TrainedTask, /, *, num_pairs: int, sketch_size: int, num_sketches: int, **_: Any
) -> dict[str, Any]:
    """Return (n,) vectors about n pairs of training gradients θ, θ': how well sketches keep <θ, θ'>.

    `dense`, `per_tensor`: d Var <Φθ, Φθ'> / (‖θ‖²‖θ'‖²), measured over independent sketches.
    `dense_exact`, `per_tensor_exact`: what it is for normal Φ, sum_l (‖θ_l‖²‖θ'_l‖² + <θ_l, θ'_l>²) over the same,
    with one tensor for the dense one (the paper leaves out the second term, and has <= up to a constant).
    `cosine_squared`: that second term, of the dense sketch.
    """
    generator = task.generator("gradient pairs")
    gradients, tensors = _unit_gradients(task, 2 * num_pairs, generator)
    left, right = (torch.stack(half) for half in zip(*gradients.split(2), strict=True))
    sketched = _sketched_products(left, right, tensors, sketch_size, num_sketches, generator)
    return {**sketched, **_exact(left, right, tensors)}


def _unit_gradients(task: TrainedTask, num: int, generator: torch.Generator) -> tuple[Tensor, _Tensors]:
    """Return gradients of training examples, (num, P) or this rank's part of them, each divided by its norm."""
    sizes = task.tensor_sizes
    operator: Any = gauss_newton(task)
    examples = stack(task.train, torch.randperm(task.num_train, generator=generator)[:num])
    if operator.num_rows == operator.shape[0]:
        gradients = per_example_gradients(task.model, task.loss, examples, batch_size=16)
        gradients = gradients / torch.linalg.vector_norm(gradients, dim=1, keepdim=True).clamp(min=1e-30)
        return gradients, _Tensors.whole(sizes)
    columns = operator.example_gradients(examples)
    columns = columns / operator.norm(columns).clamp(min=1e-30)
    return columns.T, _Tensors(sizes, operator.cut.cuts, operator.ranks.sum)


def _sketched_products(  # noqa: PLR0917
    left: Tensor, right: Tensor, tensors: _Tensors, size: int, num_sketches: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return d times the variance of each pair's sketched product, of both forms, from the same Φ."""
    products: dict[str, list[Tensor]] = {"dense": [], "per_tensor": []}
    zero = torch.zeros((), dtype=torch.float64)
    places = list(zip(tensors.split(left), tensors.split(right), tensors.sizes, tensors.own, strict=True))
    for _ in range(num_sketches):
        images = []
        for *columns, whole, own in places:
            phi = torch.randn(size, whole, generator=generator)[:, own] / size**0.5
            images.append([tensors.total((vectors.cpu() @ phi.T).double()) for vectors in columns])
        summed = [sum((image[side] for image in images), start=zero) for side in (0, 1)]
        products["dense"].append((summed[0] * summed[1]).sum(1))
        products["per_tensor"].append(torch.stack([(a * b).sum(1) for a, b in images]).sum(0))
    return {name: size * torch.stack(values).var(dim=0) for name, values in products.items()}


def _exact(left: Tensor, right: Tensor, tensors: _Tensors) -> dict[str, Tensor]:
    pieces = list(zip(tensors.split(left.double()), tensors.split(right.double()), strict=True))
    squares = [[tensors.total(side.square().sum(1)) for side in pair] for pair in pieces]
    masses = sum(a * b for a, b in squares)
    dots = torch.stack([tensors.total((a * b).sum(1)) for a, b in pieces])
    cosine = dots.sum(0)
    return {
        "dense_exact": 1 + cosine.square(),
        "per_tensor_exact": masses + dots.square().sum(0),
        "cosine_squared": cosine.square(),
    }
