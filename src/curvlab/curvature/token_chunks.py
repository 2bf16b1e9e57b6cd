"""Products with JᵀSJ of causal language models that never hold all logits: the last layer token by token.

A batch of N sequences of T tokens has N·T·V logits, with V = 50,000 more numbers than all activations before
them. Here the network is differentiated up to its last layer, logits = hidden Wᵀ + b, and the layer is applied to
a few tokens at a time: logits, their tangents and S times them, then back. Cost as in jacobian_products, where
the same products are taken. Memory of the last layer: about 5 · LOGITS_PER_CHUNK numbers (84 MB in fp32) instead
of 5 · N·T·V. Measured peak of one product for the paper's batch, 4 sequences of 512 tokens and V = 50,272, with
one layer of width 16 before the last: 0.12 GB, and 2.08 GB from whole logits, which take 0.41 GB once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from curvlab.curvature.batch import Inputs
from curvlab.curvature.model_function import HeadInput, ModelFunction, check_finite
from curvlab.linalg import flatten, unflatten

# Logits held at once; one token's at least.
LOGITS_PER_CHUNK = 2**22

# (targets, logits, tangents) -> S tangents for some tokens, (M,), (M, V), (M, V) -> (M, V).
TokenProduct = Callable[[Tensor, Tensor, Tensor], Tensor]


def forward_product_by_tokens(
    function: ModelFunction, inputs: Inputs, targets: Tensor, vector: Tensor, token_product: TokenProduct
) -> Tensor:
    """Return JᵀSJ v, (P,) -> (P,), with J v by forward mode; as `forward_product`."""
    leaves = [parameter.requires_grad_() for parameter in function.parameters]
    with torch.enable_grad(), forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(leaf, tangent)
            for leaf, tangent in zip(leaves, unflatten(vector, leaves), strict=True)
        ]
        head, moved = _unpacked(function.head_input(duals, inputs))
    rows = _Rows.of(head)
    tangent_rows = _Rows.of(moved)

    def tangents(chosen: slice, logits: Tensor) -> Tensor:
        result = functional.linear(tangent_rows.hidden[chosen], rows.weight, tangent_rows.bias)
        return result.addmm_(rows.hidden[chosen], tangent_rows.weight.T)

    return _pulled_back(head, rows, leaves, targets, tangents, token_product)


def finite_difference_product_by_tokens(
    function: ModelFunction,
    inputs: Inputs,
    targets: Tensor,
    vector: Tensor,
    token_product: TokenProduct,
    *,
    step: float,
) -> Tensor:
    """Return JᵀSJ v with J v by central differences; as `finite_difference_product`."""
    norm = torch.linalg.vector_norm(vector)
    if norm == 0:
        return torch.zeros_like(vector)
    leaves = [parameter.requires_grad_() for parameter in function.parameters]
    delta = step / norm
    tangents_of_leaves = unflatten(vector, leaves)
    with torch.no_grad():
        plus, minus = (
            _Rows.of(
                function.head_input(
                    [leaf + sign * delta * t for leaf, t in zip(leaves, tangents_of_leaves, strict=True)], inputs
                )
            )
            for sign in (1.0, -1.0)
        )

    def tangents(chosen: slice, logits: Tensor) -> Tensor:
        return (plus.logits(chosen) - minus.logits(chosen)).div_(2 * delta)

    with torch.enable_grad():
        head = function.head_input(leaves, inputs)
    return _pulled_back(head, _Rows.of(head), leaves, targets, tangents, token_product)


@dataclass(frozen=True)
class _Rows:
    """A HeadInput without graph: hidden (M, D) one row a token, weight (V, D), bias (V,)."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, head: HeadInput) -> _Rows:
        bias = None if head.bias is None else head.bias.detach()
        return cls(hidden=head.hidden.detach().flatten(0, -2), weight=head.weight.detach(), bias=bias)

    def logits(self, chosen: slice) -> Tensor:
        return functional.linear(self.hidden[chosen], self.weight, self.bias)


def _unpacked(dual: HeadInput) -> tuple[HeadInput, HeadInput]:
    """Return primals and tangents without graph; where there is none (frozen parameters) it is zero."""
    pairs = [
        (None, None) if tensor is None else forward_ad.unpack_dual(tensor)
        for tensor in (dual.hidden, dual.weight, dual.bias)
    ]
    primals = [pair[0] for pair in pairs]
    tangents = [p if p is None else torch.zeros_like(p) if t is None else t.detach() for p, t in pairs]
    return HeadInput(*primals), HeadInput(*tangents)  # type: ignore[arg-type]  # only bias is None


def _pulled_back(  # noqa: PLR0917
    head: HeadInput,
    rows: _Rows,
    leaves: Sequence[Tensor],
    targets: Tensor,
    tangents: Callable[[slice, Tensor], Tensor],
    token_product: TokenProduct,
) -> Tensor:
    """Return Jᵀ(S t), chunk by chunk through the last layer, then at once through what is before it."""
    check_finite(head.hidden)
    labels = targets.flatten()
    cotangent = torch.empty_like(rows.hidden)
    to_weight = torch.zeros_like(rows.weight) if head.weight.requires_grad else None
    to_bias = torch.zeros_like(rows.bias) if head.bias is not None and head.bias.requires_grad else None  # type: ignore[arg-type]
    size = max(1, LOGITS_PER_CHUNK // len(rows.weight))
    with torch.no_grad():
        for start in range(0, len(labels), size):
            chosen = slice(start, start + size)
            logits = rows.logits(chosen)
            check_finite(logits)
            product = token_product(labels[chosen], logits, tangents(chosen, logits))
            del logits
            torch.mm(product, rows.weight, out=cotangent[chosen])
            if to_weight is not None:
                to_weight.addmm_(product.T, rows.hidden[chosen])
            if to_bias is not None:
                to_bias += product.sum(0)
    ends = [(head.hidden, cotangent.view_as(head.hidden)), (head.weight, to_weight), (head.bias, to_bias)]
    reached = [(end, value) for end, value in ends if end is not None and end.requires_grad]
    if not reached:
        return torch.zeros_like(flatten(leaves))
    gradients = torch.autograd.grad(
        [end for end, _ in reached],
        leaves,
        [value for _, value in reached],
        allow_unused=True,
    )
    filled = [
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves, gradients, strict=True)
    ]
    return flatten(filled).detach()
