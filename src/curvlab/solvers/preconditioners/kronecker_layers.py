"""What Kronecker factorisations read off a network: layers' inputs, and gradients by their outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from curvlab.curvature.data_operator import DataOperator
from curvlab.curvature.model_function import ModelFunction
from curvlab.linalg import LinearOperator, SumOperator


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

    def inputs(self, inputs: Tensor) -> Tensor:
        """Return the inputs as (N, T, I), T places at which the weight is applied, a one appended for the bias."""
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

    def output_gradients(self, gradients: Tensor) -> Tensor:
        """Return gradients by the layer's outputs as (N, T, O)."""
        if isinstance(self.module, nn.Conv2d):
            return gradients.flatten(2).transpose(1, 2)
        return gradients.reshape(len(gradients), -1, gradients.shape[-1])

    def matrix(self, vectors: Tensor) -> Tensor:
        """Return the layer's part of (P, K) as (K, O, I)."""
        outputs, _ = self.shape
        weight = vectors[self.weight].T.reshape(vectors.shape[1], outputs, -1)
        if self.bias is None:
            return weight
        return torch.cat([weight, vectors[self.bias].T[:, :, None]], dim=2)

    def write(self, matrix: Tensor, vectors: Tensor) -> None:
        """Put (K, O, I) into the layer's part of (P, K)."""
        weight = matrix if self.bias is None else matrix[:, :, :-1]
        vectors[self.weight] = weight.reshape(len(matrix), -1).T
        if self.bias is not None:
            vectors[self.bias] = matrix[:, :, -1].T


def data_operator(operator: LinearOperator) -> DataOperator:
    """Return the curvature matrix of a model that stands alone or in a sum with damping."""
    terms = operator.terms if isinstance(operator, SumOperator) else (operator,)
    found = [term for term in terms if isinstance(term, DataOperator)]
    if len(found) != 1:
        raise TypeError(
            "a Kronecker-factored preconditioner reads a model's layers, so it needs GaussNewtonOperator(...) + "
            f"damping * identity; got {', '.join(type(term).__name__ for term in terms)}. Nystrom(rank) needs "
            "products only."
        )
    return found[0]


def mean_divisor(operator: DataOperator) -> float:
    """Return by how much G divides the sum over its data: what the loss's mean divides by."""
    if operator._divisor is not None:  # a sample's
        return operator._divisor
    return operator._full_divisor(operator._total_count)


def find_layers(function: ModelFunction, *, max_size: int) -> list[Layer]:
    """Return the layers that can be factored: weight trainable and of one module alone, sides up to max_size."""
    places, start = {}, 0
    for parameter in function.live_parameters:
        places[id(parameter)] = slice(start, start + parameter.numel())
        start += parameter.numel()
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


def layer_statistics(
    operator: DataOperator, layers: list[Layer], *, generator: torch.Generator | None
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield for each batch every layer's (N, T, I) inputs and (N, T, O) gradients of -log p of a drawn label.

    The labels are drawn from the model, one an example (a token for language models): the mean outer product of
    such gradients is the Gauss-Newton matrix. Cost: 3F of the data.
    """
    function, loss = operator.function, operator.loss
    source = generator if generator is not None else torch.Generator().manual_seed(0)
    for inputs, targets in operator._batches:
        recorded: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {layer.module: [] for layer in layers}

        def record(
            module: nn.Module,
            arguments: tuple[Tensor, ...],
            outputs: Tensor,
            recorded: dict[nn.Module, list[tuple[Tensor, Tensor]]] = recorded,
        ) -> None:
            recorded[module].append((arguments[0].detach(), outputs))

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
        drawn = loss.sample_targets(outputs.detach(), targets, source)
        cotangents = loss.for_sampled_targets().sampled_gradient(outputs.detach(), drawn)
        gradients = torch.autograd.grad(outputs, [use[0][1] for use in uses], cotangents)
        yield [
            (layer.inputs(use[0][0]), layer.output_gradients(gradient))
            for layer, use, gradient in zip(layers, uses, gradients, strict=True)
        ]
