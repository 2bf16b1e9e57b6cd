"""Products with JᵀSJ in two passes over a batch, whose memory is that of a gradient.

First forward mode, which saves nothing for a backward, then S, then an ordinary forward and backward. A product
in one pass (see jacobian_products) records a forward that carries tangents along: about twice the activations, and
those of plain attention, since fused kernels have no forward mode; here the recorded forward may use them.

Cost of a product in forwards F of the batch: 6F for each vector, one after another (one pass: 5F). Peak beside
parameters and vectors: what one forward records, as long as what forward mode holds for a part of the batch, a
layer at a time, is less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from curvlab.curvature.column_sums import ColumnSums, tangents_of
from curvlab.curvature.jacobian_products import Linearised
from curvlab.curvature.recorded_forward import RecordedForward
from curvlab.problem.batch import Inputs, num_examples, take
from curvlab.problem.model_function import ModelFunction, check_finite

# Forward mode takes the batch in so many parts: a dual number through plain attention holds several matrices of
# T × T where the recorded forward, fused, holds none. Measured on the ten models of bench-speed: 0.4 to 1.17
# times the memory of a gradient step with 4 parts, up to 1.3 with 2, up to 2 with one.
NUM_PARTS = 4

# (parameters' values, inputs) -> tensors: the first has a row for each example, the others none.
OutputsOf = Callable[[Sequence[Tensor], Inputs], Sequence[Tensor]]


def linearise_in_two_passes(
    function: ModelFunction, inputs: Inputs, targets: Tensor, rows: Tensor, sums: ColumnSums
) -> Iterator[Linearised]:
    """Yield the batch linearised along the only row of (1, P); nothing where J v is zero. As `linearise`."""
    (outputs,), (tangents,) = derivative_in_parts(
        lambda values, part: [function(values, part)], function.parameters, inputs, rows[0]
    )
    check_finite(outputs)
    if tangents is None:  # no parameter reaches the outputs
        return sums.add_zero()

    def pull_back(cotangent: Tensor) -> None:
        forward = RecordedForward(lambda values: [function(values, inputs, fused=True)], function.parameters)
        forward.pull_back([cotangent], sums)

    yield Linearised(targets, outputs, tangents, pull_back)


def derivative_in_parts(
    outputs_of: OutputsOf, parameters: Sequence[Tensor], inputs: Inputs, vector: Tensor
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return a batch's outputs and their derivatives along v (P,); None where no parameter reaches. Cost: 3F."""
    count = num_examples(inputs)
    size = -(-count // NUM_PARTS)
    found = [
        _derivative(outputs_of, parameters, take(inputs, slice(start, start + size)), vector)
        for start in range(0, count, size)
    ]
    outputs, tangents = found[0]
    outputs[0] = torch.cat([part[0] for part, _ in found])
    moved = [part[0] for _, part in found]
    tangents[0] = None if moved[0] is None else torch.cat([part for part in moved if part is not None])
    return outputs, tangents


def _derivative(
    outputs_of: OutputsOf, parameters: Sequence[Tensor], inputs: Inputs, vector: Tensor
) -> tuple[list[Tensor], list[Tensor | None]]:
    with torch.no_grad(), forward_ad.dual_level():
        tangents = tangents_of(vector, parameters)
        duals = [forward_ad.make_dual(p, t) for p, t in zip(parameters, tangents, strict=True)]
        pairs = [forward_ad.unpack_dual(output) for output in outputs_of(duals, inputs)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]
