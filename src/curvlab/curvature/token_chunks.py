"""Products with JᵀSJ of causal language models that never hold all logits: the last layer token by token.

A batch of N sequences of T tokens has N·T·V logits, with V = 50,000 more numbers than all activations before
them. Here the network is differentiated up to its last layer, logits = hidden Wᵀ + b, and the layer is applied to
a few tokens at a time: logits, their tangents and S times them, then back; several vectors share the logits. Cost
as in jacobian_products, where the same products are taken. Memory of the last layer: about 5 · LOGITS_PER_CHUNK
numbers (84 MB in fp32) instead of 5 · N·T·V. Measured peak of one product for the paper's batch, 4 sequences of
512 tokens and V = 50,272, with one layer of width 16 before the last: 0.12 GB, and 2.08 GB from whole logits,
which take 0.41 GB once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from curvlab.curvature.batch import Inputs
from curvlab.curvature.column_sums import ColumnSums
from curvlab.curvature.jacobian_products import push_forward
from curvlab.curvature.model_function import ModelFunction, check_finite
from curvlab.curvature.recorded_forward import RecordedForward
from curvlab.linalg import unflatten

# Logits held at once; one token's at least.
LOGITS_PER_CHUNK = 2**22

# (targets, logits, tangents) -> S tangents for some tokens, (M,), (M, V), (M, V) -> (M, V).
TokenProduct = Callable[[Tensor, Tensor, Tensor], Tensor]
# (tokens, their logits) -> the logits' tangents.
Tangents = Callable[[slice, Tensor], Tensor]


def add_forward_products_by_tokens(  # noqa: PLR0917
    function: ModelFunction,
    inputs: Inputs,
    targets: Tensor,
    rows: Tensor,
    token_product: TokenProduct,
    sums: ColumnSums,
) -> None:
    """Add JᵀSJ v for each row v of (K, P), with J v by forward mode; several share the forward and the logits."""
    head_of, parameters = partial(_head, function, inputs), function.parameters
    alone = len(rows) == 1
    forward = RecordedForward(head_of, parameters, rows[0] if alone else None)
    moved = [forward.tangents] if alone else push_forward(head_of, parameters, rows)
    last = _Last.of(forward.outputs)

    def along(derivative: Sequence[Tensor | None]) -> Tangents:
        zeros = [
            torch.zeros_like(value) if d is None else d
            for value, d in zip(forward.outputs, derivative, strict=True)
        ]
        direction = _Last.of(zeros)

        def tangents(chosen: slice, logits: Tensor) -> Tensor:
            result = functional.linear(direction.hidden[chosen], last.weight, direction.bias)
            return result.addmm_(last.hidden[chosen], direction.weight.T)

        return tangents

    tangents = [along(derivative) for derivative in moved]
    _add_pulled_back(forward, targets, tangents, token_product, sums, to_weight=function.trains_head)


def add_finite_difference_product_by_tokens(  # noqa: PLR0917
    function: ModelFunction,
    inputs: Inputs,
    targets: Tensor,
    vector: Tensor,
    token_product: TokenProduct,
    sums: ColumnSums,
    *,
    step: float,
) -> None:
    """Add JᵀSJ v with J v by central differences; as `add_finite_difference_product`."""
    norm = torch.linalg.vector_norm(vector)
    if norm == 0:
        return sums.add_zero()
    parameters = function.parameters
    delta = step / norm
    direction = unflatten(vector, parameters)
    with torch.no_grad():
        plus, minus = (
            _Last.of(
                _head(function, inputs, [p + sign * delta * t for p, t in zip(parameters, direction, strict=True)])
            )
            for sign in (1.0, -1.0)
        )

    def tangents(chosen: slice, logits: Tensor) -> Tensor:
        return (plus.logits(chosen) - minus.logits(chosen)).div_(2 * delta)

    forward = RecordedForward(partial(_head, function, inputs), parameters)
    _add_pulled_back(forward, targets, [tangents], token_product, sums, to_weight=function.trains_head)


def _head(function: ModelFunction, inputs: Inputs, parameters: Sequence[Tensor]) -> list[Tensor]:
    head = function.head_input(parameters, inputs)
    return [value for value in (head.hidden, head.weight, head.bias) if value is not None]


@dataclass(frozen=True)
class _Last:
    """What the last layer computes from: hidden (M, D) one row a token, weight (V, D), bias (V,)."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, head: Sequence[Tensor]) -> _Last:
        hidden, weight, *bias = (value.detach() for value in head)
        return cls(hidden=hidden.flatten(0, -2), weight=weight, bias=bias[0] if bias else None)

    def logits(self, chosen: slice) -> Tensor:
        return functional.linear(self.hidden[chosen], self.weight, self.bias)


def _add_pulled_back(
    forward: RecordedForward,
    targets: Tensor,
    tangents: Sequence[Tangents],
    token_product: TokenProduct,
    sums: ColumnSums,
    *,
    to_weight: bool,
) -> None:
    """Add Jᵀ(S t) of each column: chunk by chunk through the last layer, then at once through what is before."""
    last, labels = _Last.of(forward.outputs), targets.flatten()
    check_finite(last.hidden)
    # Contiguous, so that the rows of `back.hidden` are views: the products below are written into them.
    cotangents = [
        [torch.zeros_like(value, memory_format=torch.contiguous_format) for value in forward.outputs]
        for _ in tangents
    ]
    size = max(1, LOGITS_PER_CHUNK // len(last.weight))
    with torch.no_grad():
        for start in range(0, len(labels), size):
            chosen = slice(start, start + size)
            logits = last.logits(chosen)
            check_finite(logits)
            for tangent, cotangent in zip(tangents, cotangents, strict=True):
                back = _Last.of(cotangent)
                product = token_product(labels[chosen], logits, tangent(chosen, logits))
                torch.mm(product, last.weight, out=back.hidden[chosen])
                if to_weight:
                    back.weight.addmm_(product.T, last.hidden[chosen])
                if back.bias is not None:
                    back.bias.add_(product.sum(0))
                del product
    for index, cotangent in enumerate(cotangents):
        forward.pull_back(cotangent, sums[index], keep=index + 1 < len(cotangents))
