"""Random vectors whose covariance is the Gauss-Newton matrix."""

from __future__ import annotations

import math
from functools import partial, reduce

import torch
from torch import Tensor, nn

from curvlab.linalg import flatten
from curvlab.problem import Batches, Loss, ModelFunction, OutputLoss, output_loss
from curvlab.problem.batch import Batch, Inputs
from curvlab.problem.data import Pairs
from curvlab.problem.memory import Memory
from curvlab.problem.output_hessians import dense_hessians


def curvature_probes(  # noqa: PLR0917
    model: nn.Module,
    loss: Loss,
    train: Pairs,
    count: int,
    batch_size: int,
    generator: torch.Generator,
    weights: Tensor | None,
) -> Tensor:
    """Return normal vectors of covariance G, (P, count), from half a batch at a time whenever memory runs out."""
    function, outputs_loss = ModelFunction(model), output_loss(loss)
    probes: Tensor | None = None
    predictions, size = 0.0, 0
    passes = Memory()

    def of_piece(inputs: Inputs, targets: Tensor, own_weights: Tensor | None) -> Tensor:
        leaves = [value.detach().requires_grad_() for value in function.parameters]
        with torch.enable_grad():
            outputs = function(leaves, inputs)
        if outputs.ndim != 2:
            raise ValueError(
                f"probes need outputs (N, C), got {tuple(outputs.shape)}: use self_influence for sequences"
            )
        root = _curvature_root(outputs.detach(), targets, outputs_loss)
        if own_weights is not None:
            root = root * own_weights.to(root).sqrt()[:, None, None]
        drawn = torch.einsum("kni,nij->knj", normal_like((count, *outputs.shape), outputs, generator), root)
        pulled = [
            flatten(torch.autograd.grad(outputs, leaves, cotangent, retain_graph=True, materialize_grads=True))
            for cotangent in drawn
        ]
        return torch.stack(pulled, dim=1)

    def of_batch(batch: Batch, start: int) -> Tensor:
        found = []
        for inputs, targets in passes.pieces(batch):
            own_weights = None if weights is None else weights[start : start + len(targets)]
            found.append(of_piece(inputs, targets, own_weights))
            start += len(targets)
        return reduce(torch.add, found)

    for batch in Batches.of(function, train, batch_size=batch_size):
        pulled = passes.run(partial(of_batch, batch, size), columns=1)
        probes = pulled if probes is None else probes + pulled
        size += len(batch[1])
        predictions += outputs_loss.count(batch[1])
    if probes is None:
        raise ValueError("the training set is empty")
    return probes / math.sqrt(divided_by(loss, predictions))


def _curvature_root(outputs: Tensor, targets: Tensor, loss: OutputLoss) -> Tensor:
    """Return S_n^½, the symmetric root of each example's output Hessian, (N, C, C)."""
    values, vectors = torch.linalg.eigh(dense_hessians(loss, outputs, targets))
    return (vectors * values.clamp(min=0).sqrt()[:, None]) @ vectors.mT


def normal_like(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Return standard normal numbers with the dtype and device of `like`."""
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=generator.device).to(like.device)


def divided_by(loss: Loss, count: float) -> float:
    """Return what the training loss divides a sum by: 1 where it is a sum."""
    return 1 if output_loss(loss).reduction == "sum" else count
