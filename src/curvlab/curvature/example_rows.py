"""Rows of single examples, S_i^½ J_i, kept layer by layer as activations and signals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard, cast

import torch
from torch import Tensor, nn

from curvlab.curvature.fisher import FisherOperator
from curvlab.curvature.gauss_newton import GaussNewtonOperator
from curvlab.curvature.layers import Layer
from curvlab.curvature.mean_over_ranks import MeanOverRanks
from curvlab.linalg import LinearOperator, SumOperator
from curvlab.problem.batch import Inputs
from curvlab.problem.data import Batches
from curvlab.problem.losses import BinaryCrossEntropy, CrossEntropy, OutputLoss, SquaredError
from curvlab.problem.model_function import check_finite
from curvlab.problem.output_hessians import dense_hessians, hessian_factors

_ANY_SIZE = 2**62


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


def checked_operator(operator: GaussNewtonOperator) -> Batches:
    """Return the data in one fixed order, or raise unless the operator is the Gauss-Newton matrix of all of it."""
    if not isinstance(operator, GaussNewtonOperator) or (
        isinstance(operator, FisherOperator) and operator.kind != "exact"
    ):
        raise TypeError(
            f"rows and traces of single examples are those of JᵀSJ: pass a GaussNewtonOperator, got "
            f"{type(operator).__name__}"
        )
    if not operator.problem.is_whole:
        raise ValueError(
            "traces and rows belong to the whole data, each example once: pass the operator itself, not a sample "
            "of it, nor one with weights"
        )
    return operator.problem.data.in_fixed_order()


def with_examples(operator: LinearOperator) -> GaussNewtonOperator | MeanOverRanks | None:
    """Return the matrix in `operator` whose single examples can be asked for traces and rows; None without one.

    That is a Gauss-Newton matrix of the whole data, by itself or with damping, on one process or on several.
    """
    terms = operator.terms if isinstance(operator, SumOperator) else (operator,)
    sources = [term for term in terms if term.num_examples is not None]
    if len(sources) != 1:
        return None
    source = sources[0]
    if isinstance(source, MeanOverRanks):
        return source if source.is_whole and _knows_examples(source.own()) else None
    return source if _knows_examples(source) else None


def _knows_examples(operator: LinearOperator) -> TypeGuard[GaussNewtonOperator]:
    of_fisher = isinstance(operator, FisherOperator) and operator.kind != "exact"
    return isinstance(operator, GaussNewtonOperator) and not of_fisher and operator.problem.is_whole


def own_gauss_newton(operator: GaussNewtonOperator | MeanOverRanks) -> GaussNewtonOperator:
    """Return the matrix of this process's examples, where they are spread over several; else the operator."""
    own = operator.own() if isinstance(operator, MeanOverRanks) else operator
    checked_operator(own)  # type: ignore[arg-type]  # says what it wants instead
    return cast("GaussNewtonOperator", own)


def covering_layers(operator: GaussNewtonOperator) -> list[Layer] | None:
    """Return the layers if they hold all parameters and each is used once (tried on one example); else None.

    Layers that are applied several times in a forward have rows that are sums over the uses.
    """
    layers = operator.layers(max_size=_ANY_SIZE)
    if sum(layer.shape[0] * layer.shape[1] for layer in layers) != operator.shape[0]:
        return None
    ((inputs, _),) = checked_operator(operator).select(torch.zeros(1, dtype=torch.long))
    uses, _ = _run(operator, layers, inputs)
    return layers if all(len(use) == 1 for use in uses) else None


def output_factors(loss: OutputLoss, outputs: Tensor, targets: Tensor, *, limit: int | None = None) -> Tensor:
    """Return columns l_r with S = sum_r l_r l_rᵀ, (R, *outputs.shape), R the outputs of an example.

    Cross-entropy: sqrt(p_c) (e_c - p) for each class c; squared errors and binary cross-entropy have a diagonal S,
    others are factored by their eigenvectors. With a limit below R each
    example keeps the columns of its largest p_c, or of its largest entries of S, so that the sum stays below S.
    """
    if isinstance(loss, CrossEntropy):
        if outputs.ndim != 2:
            raise ValueError(
                f"outputs of shape {tuple(outputs.shape)} are a row for each class of each token: draw labels "
                "instead (sampled_traces), and precondition by products (Nystrom)"
            )
        p = outputs.softmax(-1)
        chosen = _largest(p, limit)  # (N, R)
        one_hot = nn.functional.one_hot(chosen, p.shape[-1]).to(p)
        columns = p.gather(1, chosen).sqrt()[:, :, None] * (one_hot - p[:, None])
        columns = columns * (targets != loss.ignore_index).to(p)[:, None, None]
        return columns.transpose(0, 1)
    if not isinstance(loss, SquaredError | BinaryCrossEntropy):
        return hessian_factors(loss, outputs, targets)[:limit]
    root = loss.hessian_product(outputs, targets, torch.ones_like(outputs)).sqrt().flatten(1)  # diagonal S
    chosen = _largest(root, limit)
    columns = nn.functional.one_hot(chosen, root.shape[1]).to(root) * root[:, None]
    return columns.transpose(0, 1).reshape(chosen.shape[1], *outputs.shape)


def _largest(values: Tensor, limit: int | None) -> Tensor:
    """Return the places of the `limit` largest of each row, all in order without a limit, (N, R)."""
    if limit is not None and limit < values.shape[1]:
        return values.topk(limit, dim=1).indices
    return torch.arange(values.shape[1], device=values.device).expand(values.shape)


def output_traces(loss: OutputLoss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return tr(S) of each example, summed over its predictions, (N,): 1 - sum_c p_c² for a class."""
    if isinstance(loss, CrossEntropy):
        # As sum p (1 - p), which is never negative: 1 - sum p² may be, to rounding.
        p = outputs.softmax(-1)
        diagonal = p * (1 - p) * (targets != loss.ignore_index).unsqueeze(-1).to(p)
    elif isinstance(loss, SquaredError | BinaryCrossEntropy):
        diagonal = loss.hessian_product(outputs, targets, torch.ones_like(outputs))
    else:
        diagonal = dense_hessians(loss, outputs, targets).diagonal(dim1=1, dim2=2)
    return diagonal.flatten(1).sum(1)


def random_factor(loss: OutputLoss, outputs: Tensor, targets: Tensor, generator: torch.Generator) -> Tensor:
    """Return random r with E r = 0 and E r rᵀ = S, shaped as the outputs, independent for each prediction.

    Labels drawn from the model, r = e_y - p, would do; but where p_c is near 1, r is nearly 0 for almost every
    draw and the rest is left to rare ones. So the class c is drawn with probability π_c = p_c ‖e_c - p‖² / tr(S),
    and r = ± sqrt(tr(S)) (e_c - p) / ‖e_c - p‖ always has the length sqrt(tr(S)): sum_c π_c r rᵀ =
    sum_c p_c (e_c - p) (e_c - p)ᵀ = S. Where S is diagonal, r = ± sqrt(S) with a sign for each output.
    """
    source = generator.device
    if not isinstance(loss, CrossEntropy | SquaredError | BinaryCrossEntropy):
        columns = hessian_factors(loss, outputs, targets)
        signs = 2 * torch.randint(2, columns.shape[:2], generator=generator, device=source) - 1
        return (columns * signs.to(outputs).reshape(*signs.shape, *[1] * (outputs.ndim - 1))).sum(0)
    if not isinstance(loss, CrossEntropy):
        signs = 2 * torch.randint(2, outputs.shape, generator=generator, device=source) - 1
        return loss.hessian_product(outputs, targets, torch.ones_like(outputs)).sqrt() * signs.to(outputs)
    p = outputs.softmax(-1).flatten(0, -2)
    squares = p.square()
    lengths = (1 - p).square() + squares.sum(-1, keepdim=True) - squares  # ‖e_c - p‖²
    weights = (p * lengths).clamp(min=0)
    total = weights.sum(-1, keepdim=True)  # tr(S)
    drawn = torch.multinomial(torch.where(total > 0, weights, p).to(source), 1, generator=generator).to(p.device)
    signs = 2 * torch.randint(2, drawn.shape, generator=generator, device=source) - 1
    direction = torch.zeros_like(p).scatter(-1, drawn, 1.0) - p
    direction = direction / direction.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
    kept = (targets != loss.ignore_index).reshape(-1, 1).to(p)
    return (kept * total.sqrt() * signs.to(p) * direction).reshape(outputs.shape)


def run_recorded(
    operator: GaussNewtonOperator, layers: Sequence[Layer], inputs: Inputs, targets: Tensor
) -> RecordedLayers:
    """Return the batch's outputs with the inputs and outputs of layers that are used once. Cost: one forward."""
    uses, outputs = _run(operator, layers, inputs)
    check_finite(outputs)
    operator.loss.check(outputs, targets)
    return RecordedLayers(tuple(layers), outputs, [use[0] for use in uses])


def _run(
    operator: GaussNewtonOperator, layers: Sequence[Layer], inputs: Inputs
) -> tuple[list[list[tuple[Tensor, Tensor]]], Tensor]:
    """Return each layer's inputs and outputs, use by use, and the model's outputs."""
    recorded: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {layer.module: [] for layer in layers}

    def record(module: nn.Module, arguments: tuple[Tensor, ...], outputs: Tensor) -> Tensor:
        recorded[module].append((arguments[0].detach(), outputs))
        # A copy goes on: an activation that works in place would otherwise change what was recorded.
        return outputs.clone()

    handles = [layer.module.register_forward_hook(record) for layer in layers]
    try:
        with torch.enable_grad():
            outputs = operator.function([p.requires_grad_() for p in operator.function.parameters], inputs)
    finally:
        for handle in handles:
            handle.remove()
    return [recorded[layer.module] for layer in layers], outputs


class RecordedLayers:
    """One forward of a batch, from which rows Jᵀl are taken layer by layer.

    Attributes:
        outputs: without graph.
    """

    def __init__(self, layers: tuple[Layer, ...], outputs: Tensor, uses: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.outputs = outputs.detach()
        self._layers, self._graph, self._uses = layers, outputs, uses

    def rows(self, columns: Tensor) -> list[LayerRows]:
        """Return the rows (Jᵀl)ᵀ for l in `columns`, (R, *outputs.shape). Cost: R F, backwards without weights."""
        places = [use[1] for use in self._uses]
        found = [torch.autograd.grad(self._graph, places, column, retain_graph=True) for column in columns]
        return [
            LayerRows(
                layer,
                layer.activations(use[0]),
                torch.stack([layer.signals(gradients[index]) for gradients in found], 1),
            )
            for index, (layer, use) in enumerate(zip(self._layers, self._uses, strict=True))
        ]
