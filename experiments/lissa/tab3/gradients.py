"""Table 3, dot products of gradients under dense and per-tensor sketches (Klochkov & Liu 2024, App. C)."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from curvlab.influence import per_example_gradients
from curvlab.runs import Run
from experiments.shared.spectrum import drawn_examples
from experiments.shared.trained_task import TrainedTask


def gradient_pairs(run: Run, task: TrainedTask, cfg: DictConfig) -> dict[str, Any]:
    """Return (n,) vectors about n pairs of training gradients θ, θ': how well sketches keep <θ, θ'>.

    `dense`, `per_tensor`: d Var <Φθ, Φθ'> / (‖θ‖²‖θ'‖²), measured over independent sketches.
    `dense_exact`, `per_tensor_exact`: what it is for normal Φ, sum_l (‖θ_l‖²‖θ'_l‖² + <θ_l, θ'_l>²) over the same,
    with one tensor for the dense one (the paper leaves out the second term, and has <= up to a constant).
    `cosine_squared`: that second term, of the dense sketch.
    """
    settings = dict(cfg.gradients)

    def compute() -> dict[str, Any]:
        generator = run.generator("gradient pairs", task.seed_name)
        examples = drawn_examples(task, 2 * cfg.gradients.num_pairs, generator)
        gradients = per_example_gradients(task.model, task.loss, examples, batch_size=16)
        gradients = gradients / torch.linalg.vector_norm(gradients, dim=1, keepdim=True).clamp(min=1e-30)
        sizes = task.tensor_sizes
        left, right = (torch.stack(half) for half in zip(*gradients.split(2), strict=True))
        sketched = _sketched_products(left, right, sizes, cfg, generator)
        return {**sketched, **_exact(left, right, sizes)}

    about = f"sketches of gradients of {task.label}"
    return run.unit("lissa/gradient_sketches", task.key | settings, compute, version=1, about=about)


def _sketched_products(
    left: Tensor, right: Tensor, sizes: list[int], cfg: DictConfig, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return d times the variance of each pair's sketched product, of both forms, from the same Φ."""
    size = cfg.gradients.sketch_size
    products: dict[str, list[Tensor]] = {"dense": [], "per_tensor": []}
    for _ in range(cfg.gradients.num_sketches):
        images = []
        for columns in zip(left.split(sizes, dim=1), right.split(sizes, dim=1), strict=True):
            phi = torch.randn(size, columns[0].shape[1], generator=generator) / size**0.5
            images.append([(vectors.cpu() @ phi.T).double() for vectors in columns])
        summed = [sum(image[side] for image in images) for side in (0, 1)]
        products["dense"].append((summed[0] * summed[1]).sum(1))
        products["per_tensor"].append(torch.stack([(a * b).sum(1) for a, b in images]).sum(0))
    return {name: size * torch.stack(values).var(dim=0) for name, values in products.items()}


def _exact(left: Tensor, right: Tensor, sizes: list[int]) -> dict[str, Tensor]:
    pieces = list(zip(left.double().split(sizes, dim=1), right.double().split(sizes, dim=1), strict=True))
    masses = sum((a.square().sum(1) * b.square().sum(1)) for a, b in pieces)
    dots = torch.stack([(a * b).sum(1) for a, b in pieces])
    cosine = dots.sum(0)
    return {
        "dense_exact": 1 + cosine.square(),
        "per_tensor_exact": masses + dots.square().sum(0),
        "cosine_squared": cosine.square(),
    }
