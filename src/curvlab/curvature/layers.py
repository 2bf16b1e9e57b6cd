"""A network's linear and convolutional layers: their places in the flat vector, activations and signals."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from curvlab.problem.batch import Batch
from curvlab.problem.losses import OutputLoss
from curvlab.problem.model_function import ModelFunction


@dataclass(frozen=True)
class Layer:
    """A linear or convolutional layer whose weight is a parameter.

    Attributes:
        module: nn.Linear or nn.Conv2d without groups.
        weight: place of its weight in the flat vector.
        bias: place of its bias; None without one, or when it is frozen.
    """

    module: nn.Linear | nn.Conv2d
    weight: slice
    bias: slice | None

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs) of the weight as a matrix, the bias being one input more."""
        weight = self.module.weight
        return weight.shape[0], weight[0].numel() + (self.bias is not None)

    def activations(self, inputs: Tensor) -> Tensor:
        """Return the layer's inputs as (N, T, I): T places where the weight is applied, and a 1 for the bias."""
        if isinstance(self.module, nn.Conv2d):
            patches = functional.unfold(
                inputs,
                self.module.kernel_size,
                dilation=self.module.dilation,
                padding=self.module.padding,  # type: ignore[arg-type]
                stride=self.module.stride,
            )
            rows = patches.transpose(1, 2)
        else:
            rows = inputs.reshape(len(inputs), -1, inputs.shape[-1])
        if self.bias is None:
            return rows
        return torch.cat([rows, torch.ones_like(rows[..., :1])], dim=2)

    def signals(self, gradients: Tensor) -> Tensor:
        """Return gradients by the layer's outputs as (N, T, O)."""
        if isinstance(self.module, nn.Conv2d):
            return gradients.flatten(2).transpose(1, 2)
        return gradients.reshape(len(gradients), -1, gradients.shape[-1])

    def matrix(self, vectors: Tensor) -> Tensor:
        """Return the layer's part of (P, K) as (K, O, I)."""
        module = self.module.weight
        # Sizes are spelled out because -1 cannot be inferred when K = 0.
        weight = vectors[self.weight].T.reshape(vectors.shape[1], len(module), module[0].numel())
        if self.bias is None:
            return weight
        return torch.cat([weight, vectors[self.bias].T[:, :, None]], dim=2)

    def write(self, matrix: Tensor, vectors: Tensor) -> None:
        """Put (K, O, I) into the layer's part of (P, K)."""
        weight = matrix if self.bias is None else matrix[:, :, :-1]
        vectors[self.weight] = weight.flatten(1).T
        if self.bias is not None:
            vectors[self.bias] = matrix[:, :, -1].T


def find_layers(function: ModelFunction, *, max_size: int) -> list[Layer]:
    """Return the linear and convolutional layers whose weight is a parameter that no other module shares.

    Args:
        function: the model.
        max_size: layers with more inputs or more outputs than this are left out.
    """
    places = {
        id(parameter): place for parameter, place in zip(function.live_parameters, function.slices, strict=True)
    }
    owners = [id(weight) for module in function.model.modules() for weight in module.parameters(recurse=False)]
    layers = []
    for module in function.model.modules():
        if not isinstance(module, nn.Linear | nn.Conv2d):
            continue
        if isinstance(module, nn.Conv2d) and (module.groups != 1 or isinstance(module.padding, str)):
            continue
        weight, bias = places.get(id(module.weight)), places.get(id(module.bias))
        if weight is None or owners.count(id(module.weight)) > 1:
            continue
        layer = Layer(module, weight, bias if module.bias is not None else None)
        if max(layer.shape) <= max_size:
            layers.append(layer)
    return layers


def layer_factors(
    function: ModelFunction,
    loss: OutputLoss,
    batch: Batch,
    layers: list[Layer],
    *,
    generator: torch.Generator,
) -> list[tuple[Tensor, Tensor]]:
    """Return every layer's activations a, (N, T, I), and signals g, (N, T, O), on one batch. Cost: 3F.

    g is the gradient of -log p(y) by the layer's outputs, with one label y for each example (each token, for
    language models) drawn from the model. Example n's gradient by the layer's weight is sum_t g_nt a_ntᵀ, and the
    expected outer product of such gradients is the example's Gauss-Newton matrix.
    """
    inputs, targets = batch
    recorded: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {layer.module: [] for layer in layers}

    def record(module: nn.Module, arguments: tuple[Tensor, ...], outputs: Tensor) -> Tensor:
        # What follows works on a copy: an activation in place would change what the gradient is taken by.
        recorded[module].append((arguments[0].detach(), outputs))
        return outputs.clone()

    handles = [layer.module.register_forward_hook(record) for layer in layers]
    try:
        with torch.enable_grad():
            leaves = [parameter.requires_grad_() for parameter in function.parameters]
            outputs = function(leaves, inputs)
    finally:
        for handle in handles:
            handle.remove()
    uses = [recorded[layer.module] for layer in layers]
    if any(len(use) != 1 for use in uses):
        raise ValueError(
            "a layer is applied several times, or not at all, in one forward: its Kronecker factors are not "
            "defined here. Use Nystrom(rank), which needs products only."
        )
    drawn = loss.sample_targets(outputs.detach(), targets, generator)
    cotangents = loss.for_sampled_targets().sampled_gradient(outputs.detach(), drawn)
    gradients = torch.autograd.grad(outputs, [use[0][1] for use in uses], cotangents)
    return [
        (layer.activations(use[0][0]), layer.signals(gradient))
        for layer, use, gradient in zip(layers, uses, gradients, strict=True)
    ]
