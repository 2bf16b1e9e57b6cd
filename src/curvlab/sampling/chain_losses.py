"""Losses and gradients of many chains at once: one model, one set of examples, parameters of each chain."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils.data import TensorDataset

from curvlab.curvature import Batches, Data, ModelFunction, OutputLoss, output_loss
from curvlab.curvature.batch import Batch, Inputs, is_pair, num_examples
from curvlab.curvature.model_function import plain_attention
from curvlab.linalg import flatten, unflatten

Loss: TypeAlias = nn.Module | Callable[[Tensor, Tensor], Tensor]


class ChainLosses:
    """L_B(w_c) = mean over the examples B_c of l(h(x; w_c), y), and its gradients, for chains c = 1..C.

    The model is copied and put into eval mode; buffers and frozen parameters stay as they are. Positions are
    (C, P), parameters that require gradients in `named_parameters()` order.

    Attributes:
        start: (P,), the model's parameters w0.
        start_losses: (N,), l of each example at w0, so that their mean is the initial loss over the full data
            and L_B(w0) of any batch costs nothing. For language models an example's summed loss over the mean
            number of predicted tokens: L_B is unbiased for the mean over all tokens.
        num_examples: N.

    Args:
        model: any module; if its outputs depend on chance or on the batch in eval mode, it is refused.
        loss: nn.CrossEntropyLoss(), nn.MSELoss(), nn.BCEWithLogitsLoss(), or a function of (outputs, targets) that
            is a mean over examples.
        data: as everywhere; examples must share one shape. Single examples are drawn at each step: tensors (or a
            TensorDataset) on the model's device make that cheap.
        batch_size: examples in a pass over the data.
    """

    def __init__(self, model: nn.Module, loss: Loss, data: Data, *, batch_size: int = 1024) -> None:
        self.model = copy.deepcopy(model).eval()
        self.function = ModelFunction(self.model)
        if self.function.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"chains need float32 or float64 parameters, got {self.function.dtype}: steps and differences of "
                "losses would be rounded away. Pass model.float()."
            )
        self._batches = Batches(
            data, batch_size=batch_size, device=self.function.device, dtype=self.function.dtype
        ).in_fixed_order()
        self._values = self.function.parameters
        self.start = flatten(self._values)
        self._forward = _forward(self.model, self.function)
        self._summed = _summed_loss(loss)
        self.start_losses, self._count = self._pass_over_data(loss)
        self.num_examples = len(self.start_losses)
        self._tensors = self._as_tensors(data)
        self._full: Batch | None = None

    @property
    def can_vmap(self) -> bool:
        """Whether several chains go through `vmap`: transformers build their masks with one of their own."""
        return not hasattr(self.model, "config")

    def fixed_tensors(self) -> Iterator[Tensor]:
        """Yield what the losses are of beside the parameters: inputs and targets of all batches, and buffers."""
        for inputs, targets in self._batches:
            yield from [inputs] if isinstance(inputs, Tensor) else inputs.values()
            yield targets
        yield from self.model.buffers()

    def for_thread(self) -> ChainLosses:
        """Return the same with a model of its own: `functional_call` changes the module while it runs."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model)
        other._forward = _forward(other.model, self.function)
        return other

    def _as_tensors(self, data: Data) -> tuple[Tensor, Tensor] | None:
        """Return inputs and targets whole where they are two tensors: `index_select` takes a third of indexing."""
        pair: Any = data.tensors if isinstance(data, TensorDataset) else data
        if not is_pair(pair) or not isinstance(pair[0], Tensor):
            return None
        inputs, targets = pair
        return self._moved(inputs), self._moved(targets if targets.is_floating_point() else targets.long())

    def _moved(self, tensor: Tensor) -> Tensor:
        dtype = self.function.dtype if tensor.is_floating_point() else None
        return tensor.detach().to(self.function.device, dtype).contiguous()

    def _pass_over_data(self, loss: Loss) -> tuple[Tensor, float]:
        known = output_loss(loss) if isinstance(loss, nn.Module) and _is_known(loss) else None
        losses, count, size = [], 0.0, 0
        with torch.no_grad():
            for inputs, targets in self._batches:
                outputs = self.function(self._values, inputs)  # checks that it is a function of single examples
                if known is None:
                    own = vmap(lambda h, y: loss(h[None], y[None]))(outputs, targets)
                    _check_mean(loss, outputs, targets, own)
                    count += len(targets)
                else:
                    known.check(outputs, targets)
                    own = known.per_example(outputs, targets)
                    count += known.count(targets)
                losses.append(own)
                size += len(targets)
        mean_count = count / size
        start_losses = torch.cat(losses) / mean_count
        if not bool(torch.isfinite(start_losses).all()):
            raise ValueError(
                "the loss at the model's parameters is not finite: check them, and the inputs, for NaN"
            )
        return start_losses, mean_count

    def draw(self, num_steps: int, batch_size: int, generators: Sequence[torch.Generator]) -> Tensor:
        """Return examples' indices, drawn with replacement, (C, num_steps, batch_size): one generator a chain."""
        size, device = (num_steps, batch_size), self.start.device
        drawn = [torch.randint(self.num_examples, size, generator=g, device=g.device) for g in generators]
        return torch.stack(drawn).to(device)

    def start_loss(self, indices: Tensor) -> Tensor:
        """Return L_B(w0) for batches of indices, (..., B) -> (...)."""
        return self.start_losses[indices].mean(-1)

    def batch(self, indices: Tensor | None) -> Batch:
        """Return the batches of indices (C, B) as inputs and targets (C, B, ...); for None all data (N, ...)."""
        if indices is None:
            if self._full is None:
                self._full = self._select(torch.arange(self.num_examples, device=self.start.device))
            return self._full
        inputs, targets = self._select(indices.reshape(-1))

        def per_chain(rows: Tensor) -> Tensor:
            return rows.view(*indices.shape, *rows.shape[1:])

        if isinstance(inputs, Tensor):
            return per_chain(inputs), per_chain(targets)
        return {name: per_chain(value) for name, value in inputs.items()}, per_chain(targets)

    def _select(self, indices: Tensor) -> Batch:
        if self._tensors is not None:
            return self._tensors[0].index_select(0, indices), self._tensors[1].index_select(0, indices)
        groups = self._batches.select(indices)
        if len(groups) > 1:
            raise ValueError(
                "examples differ in shape: pad them to one length, with ignored targets (ignore_index) and an "
                "attention_mask."
            )
        return groups[0]

    def losses_and_gradients(
        self, positions: Tensor, batch: Batch, *, shared: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Return L_B(w_c), (C,), and its gradients, one tensor (C, *shape) a parameter.

        Args:
            positions: (C, P).
            batch: from `batch`.
            shared: all chains use the same examples.

        Cost: a forward and a backward a chain; one call for all chains through `vmap`, unless there is one only.
        """
        inputs, targets = batch
        if len(positions) > 1:
            stacked = tuple(unstack(positions, self._values))
            axis = None if shared else 0
            gradients, losses = vmap(grad_and_value(self._loss), in_dims=(0, axis, axis))(stacked, inputs, targets)
            return losses, list(gradients)
        if not shared:
            inputs, targets = _first(inputs), targets[0]
        leaves = [leaf.detach().requires_grad_() for leaf in unflatten(positions[0], self._values)]
        with torch.enable_grad():
            loss = self._loss(leaves, inputs, targets)
            found = torch.autograd.grad(loss, leaves, materialize_grads=True)
        return loss.detach()[None], [gradient[None] for gradient in found]

    def hessian_product(self, position: Tensor, batch: Batch, vector: Tensor) -> Tensor:
        """Return the product of L_B's Hessian at one position (P,) with a vector (P,). Cost: two backwards."""
        inputs, targets = batch
        leaves = [leaf.detach().requires_grad_() for leaf in unflatten(position, self._values)]
        with torch.enable_grad(), plain_attention():
            loss = self._loss(leaves, inputs, targets)
            gradients = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
            along = flatten(gradients) @ vector
            if not along.requires_grad:  # a loss linear in the parameters
                return torch.zeros_like(vector)
            return flatten(torch.autograd.grad(along, leaves, materialize_grads=True)).detach()

    def views(self, positions: Tensor) -> list[Tensor]:
        """Return (C, P) as views (C, *shape), one a parameter."""
        return unstack(positions, self._values)

    def _loss(self, values: Sequence[Tensor], inputs: Inputs, targets: Tensor) -> Tensor:
        outputs = self._forward(values, inputs)
        return self._summed(outputs, targets) / (num_examples(inputs) * self._count)


def unstack(positions: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split (C, P) into views (C, *shape of each parameter)."""
    pieces = positions.split([tensor.numel() for tensor in like], dim=1)
    return [piece.unflatten(1, t.shape) if t.ndim else piece[:, 0] for piece, t in zip(pieces, like, strict=True)]


def _forward(model: nn.Module, function: ModelFunction) -> Callable[[Sequence[Tensor], Inputs], Tensor]:
    names = function.names

    # ModelFunction checks at every call that the model is deterministic; it did so in the pass over the data.
    def forward(values: Sequence[Tensor], inputs: Inputs) -> Tensor:
        replaced = dict(zip(names, values, strict=True))
        if isinstance(inputs, Tensor):
            outputs: Any = functional_call(model, replaced, (inputs,))
        else:
            outputs = functional_call(model, replaced, (), dict(inputs))
        return outputs if isinstance(outputs, Tensor) else outputs.logits

    return forward


def _is_known(loss: nn.Module) -> bool:
    if getattr(loss, "reduction", "mean") != "mean":
        raise ValueError(
            f"reduction='{loss.reduction}': a learning coefficient is of the mean over examples, reduction='mean'."
        )
    return isinstance(loss, nn.CrossEntropyLoss | nn.MSELoss | nn.BCEWithLogitsLoss)


def _summed_loss(loss: Loss) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss as a sum over predictions, to be divided by a count that is the same for all batches."""
    if isinstance(loss, nn.Module) and _is_known(loss):
        known: OutputLoss = output_loss(loss)
        return lambda outputs, targets: known.per_example(outputs, targets).sum()
    return lambda outputs, targets: loss(outputs, targets) * len(targets)


def _check_mean(loss: Loss, outputs: Tensor, targets: Tensor, own: Tensor) -> None:
    whole, mean = float(loss(outputs, targets)), float(own.double().mean())
    if own.ndim != 1 or abs(whole - mean) > 1e-3 * (abs(mean) + float(own.abs().double().mean())) + 1e-6:
        raise ValueError(
            f"the loss of a batch ({whole:.6g}) is not the mean of its examples' losses ({mean:.6g}): pass a "
            "function of (outputs, targets) that is a mean over examples, e.g. a sum over outputs, then .mean()."
        )


def _first(inputs: Inputs) -> Inputs:
    return inputs[0] if isinstance(inputs, Tensor) else {name: value[0] for name, value in inputs.items()}
