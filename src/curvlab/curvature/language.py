"""Products with JᵀSJ of causal language models that never hold all logits: the last layer token by token.

A batch of N sequences of T tokens has N·T·V logits, with V = 50,000 more numbers than all activations before
them. Here the network is differentiated up to its last layer, logits = hidden Wᵀ + b, and the layer is applied to
a few tokens at a time: logits, their tangents and S times them, then back; several vectors share the logits. Cost
as in linearise.py, where the same products are taken. Memory of the last layer: about 5 · LOGITS_PER_CHUNK
numbers (84 MB in fp32) instead of 5 · N·T·V. Measured peak of one product for the paper's batch, 4 sequences of
512 tokens and V = 50,272, with one layer of width 16 before the last: 0.12 GB, and 2.08 GB from whole logits,
which take 0.41 GB once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.nn import functional

from curvlab.curvature.linearise import (
    TANGENTS_AT_ONCE,
    ColumnSums,
    Linearised,
    RecordedForward,
    derivative_in_parts,
    derivatives,
    shifted,
)
from curvlab.problem.batch import Inputs
from curvlab.problem.model_function import HeadInput, ModelFunction, check_finite

# Logits held at once; one token's at least.
LOGITS_PER_CHUNK = 2**22
FEWER_LOGITS = 2**19  # in two passes: a batch of small models has as many logits as activations

# Elsewhere the backwards of several vectors go through `vmap`: in turns, each as long as its launches, 25 of them
# took six times as long as curvlinops' on an H200 (an OPT of three layers). On a CPU they would only hold more.
LAUNCHES_ARE_FREE = "cpu"

# (which of M tokens) -> their logits' tangents, (M, V).
Tangents = Callable[[slice], Tensor]


def linearise_by_tokens(
    function: ModelFunction,
    inputs: Inputs,
    targets: Tensor,
    rows: Tensor,
    sums: ColumnSums,
    *,
    step: float | None = None,
    two_passes: bool = False,
) -> Iterator[Linearised]:
    """Yield some tokens of the batch after others, linearised along each row v of (K, P).

    As `linearise`, with logits (M, V) and targets (M,) of M tokens. What is pulled back through the last layer is
    gathered, and goes through the layers before it after the last tokens. With `two_passes`, for a single row,
    these layers are recorded only then (as in `linearise`).
    """
    head_of, parameters = partial(_head, function, inputs), function.parameters
    forward: RecordedForward | None = None
    if two_passes:
        head, derivative = derivative_in_parts(
            lambda values, part: _head(function, part, values), parameters, inputs, rows[0]
        )
        tangents = [_derivative(head, derivative)]
        del derivative
    elif step is None:
        forward, moved = derivatives(head_of, parameters, rows)
        head, tangents = forward.outputs, [_derivative(forward.outputs, derivative) for derivative in moved]
    else:
        plus, minus, width = shifted(head_of, parameters, rows[0], step=step)
        forward = RecordedForward(head_of, parameters)
        head, tangents = forward.outputs, [_difference(_flat(plus), _flat(minus), width)]
    # Contiguous, so that the rows of their hidden states are views: products are written into them.
    cotangents = [
        [torch.zeros_like(value, memory_format=torch.contiguous_format) for value in head] for _ in tangents
    ]
    last, labels = _flat(head), targets.flatten()
    check_finite(last.hidden)
    size = max(1, (FEWER_LOGITS if two_passes else LOGITS_PER_CHUNK) // len(last.weight))
    for start in range(0, len(labels), size):
        tokens = slice(start, start + size)
        logits = last.logits(tokens)
        check_finite(logits)
        for tangents_of_tokens, cotangent in zip(tangents, cotangents, strict=True):
            add = partial(_pull_back, last, tokens, _flat(cotangent), to_weight=function.trains_head)
            yield Linearised(labels[tokens], logits, tangents_of_tokens(tokens), add)
        del logits
    if len(cotangents) > 1 and function.device.type != LAUNCHES_ARE_FREE:
        forward = None
        gradient = vjp(lambda *values: tuple(head_of(values)), *parameters)[1]
        for start in range(0, len(cotangents), TANGENTS_AT_ONCE):
            block = cotangents[start : start + TANGENTS_AT_ONCE]
            together = tuple(torch.stack(parts) for parts in zip(*block, strict=True))
            sums[start : start + len(block)].add(vmap(gradient)(together))
        return
    if forward is None:
        del last, head, tangents, tangents_of_tokens  # none of it is needed while the layers before are recorded
        forward = RecordedForward(partial(_head, function, inputs, fused=True), parameters)
    for index, cotangent in enumerate(cotangents):
        forward.pull_back(cotangent, sums[index : index + 1], keep=index + 1 < len(cotangents))


def _derivative(head: Sequence[Tensor], derivative: Sequence[Tensor | None]) -> Tangents:
    """Return the logits' derivative, token by token, from that of what the last layer computes from."""
    zeros = [torch.zeros_like(value) if d is None else d for value, d in zip(head, derivative, strict=True)]
    last, direction = _flat(head), _flat(zeros)

    def tangents(tokens: slice) -> Tensor:
        result = functional.linear(direction.hidden[tokens], last.weight, direction.bias)
        return result.addmm_(last.hidden[tokens], direction.weight.T)

    return tangents


def _difference(plus: HeadInput, minus: HeadInput, width: Tensor) -> Tangents:
    """Return the logits' derivative, token by token, as a central difference."""
    return lambda tokens: (plus.logits(tokens) - minus.logits(tokens)).div_(width)


def _head(
    function: ModelFunction, inputs: Inputs, parameters: Sequence[Tensor], *, fused: bool = False
) -> list[Tensor]:
    head = function.head_input(parameters, inputs, fused=fused)
    return [value for value in (head.hidden, head.weight, head.bias) if value is not None]


def _flat(head: Sequence[Tensor]) -> HeadInput:
    """Return hidden states with one row for each token, (M, D), weight (V, D), and bias (V,)."""
    hidden, weight, *bias = (value.detach() for value in head)
    return HeadInput(hidden.flatten(0, -2), weight, bias[0] if bias else None)


def _pull_back(last: HeadInput, chosen: slice, into: HeadInput, product: Tensor, *, to_weight: bool) -> None:
    """Add the gradients of productᵀ logits by hidden states, weight and bias to `into`."""
    torch.mm(product, last.weight, out=into.hidden[chosen])
    if to_weight:
        into.weight.addmm_(product.T, last.hidden[chosen])
    if into.bias is not None:
        into.bias.add_(product.sum(0))
