"""A network's linear and convolutional layers: places in the flat vector, activations, signals, and rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from curvlab.problem.batch import Batch, Inputs
from curvlab.problem.losses import OutputLoss
from curvlab.problem.model_function import ModelFunction


@dataclass(frozen=True)
class Layer:
    """A linear or convolutional layer whose weight is a parameter.

    Attributes:
        module: nn.Linear, nn.Conv2d without groups, or the linear layer of transformers' GPT-2, `Conv1D`.
        weight: place of its weight in the flat vector.
        bias: place of its bias; None without one, or when it is frozen.
    """

    module: nn.Module
    weight: slice
    bias: slice | None

    @property
    def _stored(self) -> tuple[int, int]:
        """Shape of the weight as a matrix: (outputs, inputs), of a `Conv1D` (inputs, outputs)."""
        weight = cast("Tensor", self.module.weight)
        return len(weight), weight[0].numel()

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs) of the weight as a matrix, the bias being one input more."""
        outputs, inputs = self._stored[::-1] if _is_conv1d(self.module) else self._stored
        return outputs, inputs + (self.bias is not None)

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
        # Sizes are spelled out because -1 cannot be inferred when K = 0.
        weight = vectors[self.weight].T.reshape(vectors.shape[1], *self._stored)
        if _is_conv1d(self.module):
            weight = weight.transpose(1, 2)
        if self.bias is None:
            return weight
        return torch.cat([weight, vectors[self.bias].T[:, :, None]], dim=2)

    def write(self, matrix: Tensor, vectors: Tensor) -> None:
        """Put (K, O, I) into the layer's part of (P, K)."""
        weight = matrix if self.bias is None else matrix[:, :, :-1]
        if _is_conv1d(self.module):
            weight = weight.transpose(1, 2)
        vectors[self.weight] = weight.flatten(1).T
        if self.bias is not None:
            vectors[self.bias] = matrix[:, :, -1].T


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether it is transformers' `Conv1D`, which is nn.Linear with a transposed weight."""
    return any(
        kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.") for kind in type(module).__mro__
    )


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
        if not isinstance(module, nn.Linear | nn.Conv2d) and not _is_conv1d(module):
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


@dataclass(frozen=True)
class LayerRows:
    """The part of R rows for each example that lies in one layer.

    Row (n, r) is sum_t signals[n, r, t] activations[n, t]ᵀ, as the layer's (O, I) matrix.

    Attributes:
        layer: whose weight and bias the part belongs to.
        activations: (N, T, I), inputs at the T places where the layer is applied, with a 1 for the bias.
        signals: (N, R, T, O), gradients by its outputs.
    """

    layer: Layer
    activations: Tensor
    signals: Tensor

    def squares(self) -> Tensor:
        """Return the squared norm of each row, (N, R). Cost: N R T min(I O, T (I + O))."""
        places, width, height = *self.activations.shape[1:], self.signals.shape[-1]
        if places * (width + height) <= width * height:
            inner = self.activations @ self.activations.transpose(1, 2)  # (N, T, T)
            return torch.stack([(g @ g.transpose(1, 2) * inner).sum((1, 2)) for g in self.signals.unbind(1)], 1)
        return torch.stack([rows.square().sum((1, 2)) for rows in self._matrices()], 1)

    def dense(self) -> Tensor:
        """Return the rows, (N, R, O, I)."""
        return torch.stack(self._matrices(), 1)

    def _matrices(self) -> list[Tensor]:
        return [g.transpose(1, 2) @ self.activations for g in self.signals.unbind(1)]


class RecordedLayers:
    """One forward of a batch, from which rows Jᵀl are taken layer by layer.

    Args:
        function: the model.
        layers: of it.
        inputs: of the batch.

    Attributes:
        outputs: without graph.
    """

    def __init__(self, function: ModelFunction, layers: Sequence[Layer], inputs: Inputs) -> None:
        recorded: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {layer.module: [] for layer in layers}

        def record(module: nn.Module, arguments: tuple[Tensor, ...], outputs: Tensor) -> Tensor:
            recorded[module].append((arguments[0].detach(), outputs))
            # A copy goes on: an activation that works in place would otherwise change what was recorded.
            return outputs.clone()

        handles = [layer.module.register_forward_hook(record) for layer in layers]
        try:
            with torch.enable_grad():
                self._graph = function([p.requires_grad_() for p in function.parameters], inputs)
        finally:
            for handle in handles:
                handle.remove()
        self.outputs = self._graph.detach()
        self._layers, self._uses = layers, [recorded[layer.module] for layer in layers]

    @property
    def each_once(self) -> bool:
        """Whether the forward uses each layer once: the rows of others are sums over their uses."""
        return all(len(use) == 1 for use in self._uses)

    def num_places(self) -> list[int]:
        """Return T of each layer, which is used once: how often it applies its weight to an example."""
        return [
            layer.activations(use[0][0][:1]).shape[1] for layer, use in zip(self._layers, self._uses, strict=True)
        ]

    def rows(self, columns: Tensor) -> list[LayerRows]:
        """Return the rows (Jᵀl)ᵀ for l in `columns`, (R, *outputs.shape). Cost: R F, backwards without weights."""
        places = [use[0][1] for use in self._uses]
        found = [torch.autograd.grad(self._graph, places, column, retain_graph=True) for column in columns]
        return [
            LayerRows(
                layer,
                layer.activations(use[0][0]),
                torch.stack([layer.signals(gradients[index]) for gradients in found], 1),
            )
            for index, (layer, use) in enumerate(zip(self._layers, self._uses, strict=True))
        ]


def layer_factors(
    function: ModelFunction, loss: OutputLoss, batch: Batch, layers: list[Layer], *, generator: torch.Generator
) -> list[tuple[Tensor, Tensor]]:
    """Return every layer's activations a, (N, T, I), and signals g, (N, T, O), on one batch. Cost: 3F.

    g is the gradient of -log p(y) by the layer's outputs, with one label y for each example (each token, for
    language models) drawn from the model. Example n's gradient by the layer's weight is sum_t g_nt a_ntᵀ, and the
    expected outer product of such gradients is the example's Gauss-Newton matrix.
    """
    inputs, targets = batch
    recorded = RecordedLayers(function, layers, inputs)
    if not recorded.each_once:
        raise ValueError(
            "a layer is applied several times, or not at all, in one forward: its Kronecker factors are not "
            "defined here. Use Nystrom(rank), which needs products only."
        )
    drawn = loss.sample_targets(recorded.outputs, targets, generator)
    cotangents = loss.for_sampled_targets().sampled_gradient(recorded.outputs, drawn)
    return [(rows.activations, rows.signals[:, 0]) for rows in recorded.rows(cotangents[None])]
