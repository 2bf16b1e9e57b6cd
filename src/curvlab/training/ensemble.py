"""K copies of one model at once: their losses and gradients, and their training on shared batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from curvlab.arguments import not_negative, whole
from curvlab.iterate import Checkpoint
from curvlab.linalg import flatten, unflatten
from curvlab.problem import Data, Loss, ModelFunction, Problem
from curvlab.problem.batch import Batch, Inputs, num_examples
from curvlab.problem.model_function import (
    called,
    logits_of,
    plain_attention,
    plain_lookups,
    swapped,
    tensor_swaps,
)
from curvlab.problem.parameters import checked_model
from curvlab.problem.records import Records
from curvlab.training.descent import DescentState, Ensemble, EnsembleGradient, EnsembleOptimizer, descend
from curvlab.training.schedules import BatchOrder, Schedule, ScheduleName, shuffled_batches
from curvlab.training.steps import differs_in_training

MIN_COPIES = 4  # where one vmap over the copies is faster than a loop, see `vmap_pays`
MAX_CONVOLVED_INPUTS = 10_000
_BATCH_SIZE = 1024  # examples in the pass over the data; fewer whenever memory runs out


class EnsembleLosses:
    """L_k = 1/|B| sum_{i in B_k} w_ki l(h(x_i; θ_k), y_i), and its gradients, for copies k = 1..K.

    The batches are the same for all copies or one for each; the weights w_ki are 1 where none are given. The model
    is copied and put into eval mode; buffers and frozen parameters stay as they are. Positions θ are (K, P),
    parameters that require gradients in `named_parameters()` order.

    Attributes:
        start: (P,), the model's parameters w0.
        start_losses: (N,), l of each example at w0, so that their mean is the initial loss over the full data
            and L_B(w0) of any batch costs nothing. For language models an example's summed loss over the mean
            number of predicted tokens: L_B is unbiased for the mean over all tokens.
        num_examples: N.
        can_vmap: whether several copies go through `vmap`.
        given_loss: what the user passed.
        example_weights: w, (N,), on the model's device and in its dtype, or None. They are in `start_losses`, and
            in whatever is given `weights_of` a batch.

    Args:
        model: any module; if its outputs depend on chance or on the batch in eval mode, it is refused. Or a
            `Problem` in the place of model, loss, data and weights.
        loss: nn.CrossEntropyLoss(), nn.MSELoss(), nn.BCEWithLogitsLoss(), or a function of (outputs, targets) that
            is a mean over examples.
        data: as everywhere; examples must share one shape. Single examples are drawn at each step: tensors (or a
            TensorDataset) on the model's device make that cheap.
        weights: w of the mean loss 1/N Σ_i w_i l_i over the data, (N,), see `checked_weights`.
        as_trained: with the gradients that PyTorch's training has of embeddings (see `plain_lookups`).
    """

    def __init__(
        self,
        model: nn.Module | Problem,
        loss: Loss | None = None,
        data: Data | None = None,
        *,
        weights: Tensor | None = None,
        as_trained: bool = False,
    ) -> None:
        if isinstance(model, Problem):
            problem = Problem.of(model, loss, data, weights).copied()
        else:
            model = copy.deepcopy(checked_model(model)).eval()
            problem = Problem.of(model, loss, data, weights, batch_size=_BATCH_SIZE)
        self.model, self.function = problem.model, problem.function
        self.given_loss = problem.given_loss
        if self.function.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"copies need float32 or float64 parameters, got {self.function.dtype}: steps and differences of "
                "losses would be rounded away. Pass model.float()."
            )
        if torch.is_autocast_enabled(self.function.device.type):
            raise ValueError(
                "copies are not for torch.autocast: steps and differences of losses would be rounded away"
            )
        self._data = problem.data.in_fixed_order().on_device(_BATCH_SIZE)
        self._values = self.function.parameters
        self.start = flatten(self._values)
        self._as_trained = as_trained
        self._forward = _forward(self.model, self.function, as_trained)
        self._loss_of = problem.loss
        if self._loss_of.reduction != "mean":
            raise ValueError(
                f"reduction='{self._loss_of.reduction}': losses here are means over examples, reduction='mean'."
            )
        found = self._start_losses(replace(problem, data=self._data, weights=None))
        self.num_examples = len(found)
        self._count = problem.total_count / self.num_examples
        self.start_losses = found / self._count
        of_any = self._loss_of.by_vmap and not hasattr(self.model, "config")  # their masks are built by one
        self.can_vmap = of_any and self.function.maps(
            self._data.together(torch.tensor([0], device=self.start.device))[0]
        )
        self.example_weights = None if problem.weights is None else problem.weights.to(self.start)
        if self.example_weights is not None:
            self.start_losses = self.start_losses * self.example_weights
        self._full: Batch | None = None
        self._records = Records.of_network(self.function, self._loss_of, self._count, as_trained)

    def vmap_pays(self, num_copies: int, inputs_per_copy: int) -> bool:
        """Return whether one `vmap` over the copies is faster than a loop; inputs in numbers, not examples.

        On one core a loop is faster for two copies, vmap for `MIN_COPIES` and more; with convolutions it stops to
        pay above `MAX_CONVOLVED_INPUTS` numbers, where vmap holds all activations at once.
        """
        small = inputs_per_copy <= MAX_CONVOLVED_INPUTS or not self.function.has_convolution
        return self.can_vmap and num_copies >= MIN_COPIES and (small or self.start.device.type != "cpu")

    @torch.no_grad()
    def _start_losses(self, problem: Problem) -> Tensor:
        """Return each example's summed loss at w0, (N,), after checking model and loss on every batch."""

        def of_batch(inputs: Inputs, targets: Tensor, _: Tensor | None) -> Tensor:
            outputs = self.function(self._values, inputs)  # checks that it is a function of single examples
            self._loss_of.check(outputs, targets)
            return self._loss_of.per_example(outputs, targets)

        found = torch.cat(list(problem.map(of_batch)))
        if not bool(found.isfinite().all()):
            raise ValueError(
                "the loss at the model's parameters is not finite: check them, and the inputs, for NaN"
            )
        return found

    def depends_on(self) -> Mapping[str, Any]:
        """Return what the losses are of (see `described`). Cost: one reading of the data."""
        return {"data": self._data, "model": self.model, "example_weights": self.example_weights}

    def for_thread(self) -> EnsembleLosses:
        """Return the same with a model of its own: a call changes the module while it runs."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model)
        other._forward = _forward(other.model, self.function, self._as_trained)
        return other

    def draw(self, num_steps: int, batch_size: int, generators: Sequence[torch.Generator]) -> Tensor:
        """Return indices of examples drawn with replacement, (K, num_steps, batch_size), by K generators."""
        size, device = (num_steps, batch_size), self.start.device
        drawn = [torch.randint(self.num_examples, size, generator=g, device=g.device) for g in generators]
        return torch.stack(drawn).to(device)

    def start_loss(self, indices: Tensor) -> Tensor:
        """Return L_B(w0) for batches of indices, (..., B) -> (...)."""
        return self.start_losses[indices].mean(-1)

    def weights_of(self, indices: Tensor | None, num_copies: int) -> Tensor | None:
        """Return w of the examples of each copy's batch, (K, B); of None all data. None where there are none."""
        if self.example_weights is None:
            return None
        chosen = self.example_weights if indices is None else self.example_weights[indices]
        return chosen.expand(num_copies, chosen.shape[-1])

    def batch(self, indices: Tensor | None) -> Batch:
        """Return inputs and targets of indices, (K, B) -> (K, B, ...) or (B,) -> (B, ...); of None all data."""
        if indices is None:
            if self._full is None:
                self._full = self._data.together(torch.arange(self.num_examples, device=self.start.device))
            return self._full
        inputs, targets = self._data.together(indices.reshape(-1))

        def per_copy(rows: Tensor) -> Tensor:
            return rows.view(*indices.shape, *rows.shape[1:])

        if isinstance(inputs, Tensor):
            return per_copy(inputs), per_copy(targets)
        return {name: per_copy(value) for name, value in inputs.items()}, per_copy(targets)

    def losses_and_gradients(
        self,
        positions: Tensor,
        batch: Batch,
        *,
        shared: bool,
        weights: Tensor | None = None,
        by_vmap: bool | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return L_k(θ_k), (K,), and its gradients, one tensor (K, *shape) for each parameter.

        Args:
            positions: (K, P).
            batch: from `batch`: (K, B, ...), or (B, ...) where it is shared.
            shared: all copies use the same examples.
            weights: (K, B), of each copy's examples; a weight of 0 leaves an example out (see `MeanLoss`: the sum
                is divided by B in any case).
            by_vmap: all copies in one call, or in a loop; None: one call where the model allows it.

        Cost: a forward and a backward pass for each copy.
        """
        if weights is not None and weights.shape != (
            len(positions),
            len(batch[1]) if shared else batch[1].shape[1],
        ):
            raise ValueError(
                f"weights have shape {tuple(weights.shape)}: one row for each of the {len(positions)} copies and "
                "one column for each example of its batch are needed"
            )
        by_vmap = (len(positions) > 1 and self.can_vmap) if by_vmap is None else by_vmap
        return each_copy(
            self._loss,
            positions,
            self._values,
            batch,
            shared=shared,
            weights=weights,
            by_vmap=by_vmap,
            records=self._records,
        )

    def hessian_product(
        self, position: Tensor, batch: Batch, vector: Tensor, *, weights: Tensor | None = None
    ) -> Tensor:
        """Return the product of L_B's Hessian at one position (P,) with a vector (P,). Cost: two backwards.

        `weights` are those of the batch's examples, (B,).
        """
        leaves = [leaf.detach().requires_grad_() for leaf in unflatten(position, self._values)]
        with torch.enable_grad(), plain_attention():
            loss = self._loss(leaves, batch, weights)
            gradients = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
            along = flatten(gradients) @ vector
            if not along.requires_grad:  # a loss linear in the parameters
                return torch.zeros_like(vector)
            return flatten(torch.autograd.grad(along, leaves, materialize_grads=True)).detach()

    def views(self, positions: Tensor) -> list[Tensor]:
        """Return (K, P) as views (K, *shape), one for each parameter."""
        return unstack(positions, self._values)

    def _loss(self, values: Sequence[Tensor], batch: Batch, weights: Tensor | None) -> Tensor:
        inputs, targets = batch
        outputs = self._forward(values, inputs)
        if weights is None:
            total = self._loss_of.total(outputs, targets)
        else:
            own = self._loss_of.per_example(outputs, targets)
            total = own @ weights.to(own)
        return total / (num_examples(inputs) * self._count)


def each_copy(
    value: Callable[[Sequence[Tensor], Batch, Tensor | None], Tensor],
    positions: Tensor,
    like: Sequence[Tensor],
    batch: Batch,
    *,
    shared: bool,
    weights: Tensor | None,
    by_vmap: bool,
    records: Records,
) -> tuple[Tensor, list[Tensor]]:
    """Return value(θ_k, batch, weights_k), (K,), and its gradients, one tensor (K, *shape) for each parameter.

    Args:
        value: (parameters, batch, weights of its examples) -> ().
        positions: (K, P).
        like: tensors of the parameters' shapes.
        batch: (K, B, ...), or (B, ...) where it is shared.
        shared: all copies use the same examples.
        weights: (K, B), or None.
        by_vmap: all copies in one call, or in a loop.
        records: of the calls of `value` by vmap.
    """
    if by_vmap:
        axes = (0, None if shared else 0, None if weights is None else 0)

        def of_all(*given: Any) -> list[Tensor]:
            with plain_attention():
                gradients, values = vmap(grad_and_value(value), in_dims=axes)(*given)
            return [values, *gradients]

        name = (getattr(value, "__func__", value), shared)  # of a method: which object's says `records`
        first, *rest = records.call(name, of_all, tuple(unstack(positions, like)), batch, weights)
        return first, rest
    found = []
    for k, position in enumerate(positions):
        leaves = [leaf.detach().requires_grad_() for leaf in unflatten(position, like)]
        with torch.enable_grad():
            of_one = value(leaves, batch if shared else one_of(batch, k), None if weights is None else weights[k])
            found.append((of_one.detach(), torch.autograd.grad(of_one, leaves, materialize_grads=True)))
    values = torch.stack([of_one for of_one, _ in found])
    if len(found) == 1:  # views: stacking would copy
        return values, [gradient[None] for gradient in found[0][1]]
    return values, [torch.stack(of_all) for of_all in zip(*(own for _, own in found), strict=True)]


def unstack(positions: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split (K, P) into views (K, *shape of each parameter)."""
    pieces = positions.split([tensor.numel() for tensor in like], dim=1)
    return [piece.unflatten(1, t.shape) if t.ndim else piece[:, 0] for piece, t in zip(pieces, like, strict=True)]


def _forward(
    model: nn.Module, function: ModelFunction, as_trained: bool
) -> Callable[[Sequence[Tensor], Inputs], Tensor]:
    originals = [model.get_parameter(name) for name in function.names]
    lookups = [] if as_trained else plain_lookups(model)

    # ModelFunction checks at every call that the model is deterministic; it did so in the pass over the data.
    def forward(values: Sequence[Tensor], inputs: Inputs) -> Tensor:
        with swapped(tensor_swaps(model, dict(zip(map(id, originals), values, strict=True))) + lookups):
            return logits_of(called(model, inputs))

    return forward


def one_of(batch: Batch, k: int) -> Batch:
    """Return the k-th copy's batch, from batches stacked along the first axis."""
    inputs, targets = batch
    return (inputs[k] if isinstance(inputs, Tensor) else {n: v[k] for n, v in inputs.items()}), targets[k]


# ------------------------------------------------------------------------------- their training
def train_ensemble(
    model: nn.Module | Problem,
    loss: Loss | None = None,
    train_data: Data | None = None,
    *,
    example_weights: Tensor,
    num_epochs: int,
    batch_size: int,
    lr: float,
    optimizer: EnsembleOptimizer = "sgd",
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    schedule: ScheduleName | Schedule = "constant",
    start: Tensor | None = None,
    batches: Iterable[Tensor] | None = None,
    by_vmap: bool | None = None,
    progress: bool | str = True,
    callback: Callable[[DescentState], object] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    generator: torch.Generator | int,
) -> Ensemble:
    """Train K copies by SGD or Adam; copy k has the loss sum_i w_ki l_i / |B| on every batch.

    The copies see the same batches, so that they differ by their weights alone: K retrainings that leave other
    examples out (weight 0). Equal, to rounding, to K calls of `train` with `example_weights[k]` and the same
    `batches`; a data set of sequences is the exception, where `train` divides by the tokens of each batch and
    this by |B| times the mean number of tokens of an example. `model` is not changed.

    Args:
        model: without dropout and BatchNorm, which differ in training; or a `Problem` without weights in the place
            of model, loss and train_data.
        loss: mean over examples.
        train_data: as for `train`.
        example_weights: (K, N).
        num_epochs: passes over the data.
        batch_size: in examples.
        lr: learning rate.
        optimizer: "sgd" or "adam".
        momentum: of SGD.
        weight_decay: L2, loss + weight_decay / 2 ||w||².
        schedule: as for `train`.
        start: (K, P), where each copy starts; None: all at the model's parameters.
        batches: as for `train`.
        by_vmap: all copies in one call, or one after the other; None: what is faster, see
            `EnsembleLosses.vmap_pays`.
        progress: as for `train`.
        callback: called with the `DescentState` after each step.
        checkpoint: as for `train`.
        generator: source of the order of examples; or a seed.

    Raises:
        TrainingDivergedError: the loss of a copy was not finite.

    Cost: K forward and K backward passes of a batch for each step; memory as of `descend`.
    """
    num_epochs, batch_size = whole("num_epochs", num_epochs), whole("batch_size", batch_size)
    momentum, weight_decay = not_negative("momentum", momentum), not_negative("weight_decay", weight_decay)
    if (different := differs_in_training(model.model if isinstance(model, Problem) else model)) is not None:
        raise ValueError(
            f"{different} differs in training and in evaluation: copies are trained at once only without it. Use "
            "`train` with example_weights, once for each."
        )
    losses = EnsembleLosses(model, loss, train_data, as_trained=True)
    if losses.example_weights is not None:
        raise TypeError("example_weights holds the weights of every copy: pass a problem without weights")
    size, num_copies = losses.num_examples, len(example_weights)
    if example_weights.ndim != 2 or example_weights.shape[1] != size:
        raise ValueError(
            f"example_weights have shape {tuple(example_weights.shape)}: one row for each copy and one column for "
            f"each of the {size} examples are needed"
        )
    if start is None:
        start = losses.start.repeat(num_copies, 1)
    elif start.shape != (num_copies, len(losses.start)):
        raise ValueError(f"start has shape {tuple(start.shape)}, not ({num_copies}, {len(losses.start)})")
    if batches is None:
        batches = shuffled_batches(size, batch_size=batch_size, num_epochs=num_epochs, generator=generator)
    return descend(
        start.to(losses.start),
        weighted_gradient(losses, example_weights, by_vmap=by_vmap),
        BatchOrder(size, batch_size=batch_size, num_epochs=num_epochs, given=batches),
        lr=lr,
        optimizer=optimizer,
        momentum=momentum,
        weight_decay=weight_decay,
        schedule=schedule,
        progress=progress,
        callback=callback,
        checkpoint=checkpoint,
        depends_on={
            "loss": losses.given_loss,
            "data": losses,
            "example_weights": example_weights,
            "by_vmap": by_vmap,
        },
    )


def weighted_gradient(
    losses: EnsembleLosses, example_weights: Tensor, *, by_vmap: bool | None = None
) -> EnsembleGradient:
    """Return the function that gives sum_i w_ki l_i / |B| on a batch, (K,), and its gradients, (K, P).

    Args:
        losses: of one example each.
        example_weights: w, (K, N).
        by_vmap: as for `train_ensemble`.
    """
    weights = example_weights.to(losses.start)

    def gradient(positions: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        batch = losses.batch(indices)
        together = by_vmap
        if together is None and isinstance(batch[0], Tensor):
            together = losses.vmap_pays(len(positions), batch[0].numel())
        found, gradients = losses.losses_and_gradients(
            positions, batch, shared=True, weights=weights[:, indices], by_vmap=together
        )
        return found, torch.cat([piece.flatten(1) for piece in gradients], dim=1)

    return gradient
