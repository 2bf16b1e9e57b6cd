"""Products with JᵀSJ for one batch, where J is the Jacobian of the outputs by the parameters.

Cost in forwards F of the batch (a backward is 2F, a tangent beside its forward too): one vector 5F, a forward that
carries the tangent along and one backward; K vectors together 2F + 4F each (`vmap`), or 5F each (loop).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap

from curvlab.curvature.batch import Inputs, num_examples
from curvlab.curvature.column_sums import ColumnSums, tangents_of
from curvlab.curvature.model_function import ModelFunction, check_finite
from curvlab.curvature.recorded_forward import RecordedForward
from curvlab.linalg import unflatten

# (outputs, tangents) -> S tangents for one batch; linear in the tangents.
OutputProduct = Callable[[Tensor, Tensor], Tensor]
Columns = Literal["auto", "vmap", "loop"]
FD_STEP = {torch.float64: 1e-6, torch.float32: 1e-3}


# On a CPU, vmapped convolutions are grouped ones: measured on a small net and on ResNet-20 with 25 vectors, they
# take 1/7 to 2/3 of a loop's time for up to 16 examples, and up to twice as long for 64 and more.
MAX_CONVOLVED_EXAMPLES = 24
# From as many parameters on, gradients of K vectors on a CPU are taken one by one, each written where it belongs:
# measured on MLPs and an OPT, 2 to 10 % faster at half the memory; below, `vmap` saves up to 0.2 ms a vector.
MANY_PARAMETERS = 2**19
# Of so many parameters, this many tangents go through `vmap` at once: more gain nothing and hold activations each.
TANGENTS_AT_ONCE = 8


def maps_columns(function: ModelFunction, columns: Columns, inputs: Inputs) -> bool:
    """Return whether K vectors on this batch go through `vmap` (shared forward) or one after another.

    "auto" maps, except convolutions of large batches on a CPU, and Hugging Face models, whose construction of
    masks uses vmap itself.
    """
    if columns != "auto":
        return columns == "vmap"
    if hasattr(function.model, "config"):
        return False
    if function.device.type != "cpu" or not function.has_convolution:
        return True
    return num_examples(inputs) <= MAX_CONVOLVED_EXAMPLES and function.num_parameters < MANY_PARAMETERS


def add_forward_product(
    function: ModelFunction, inputs: Inputs, vector: Tensor, output_product: OutputProduct, sums: ColumnSums
) -> None:
    """Add JᵀSJ v, for v (P,), with J v by forward mode. Cost: 5F.

    Dual numbers run through one forward whose primal part is recorded: the backward needs no second one.
    """
    forward = RecordedForward(lambda values: [function(values, inputs)], function.parameters, vector)
    (outputs,), (tangents,) = forward.outputs, forward.tangents
    check_finite(outputs)
    if tangents is None:
        return sums.add_zero()
    forward.pull_back([output_product(outputs, tangents)], sums)


def add_forward_products(
    function: ModelFunction, inputs: Inputs, rows: Tensor, output_product: OutputProduct, sums: ColumnSums
) -> None:
    """Add JᵀSJ v for each row v of (K, P), with J v through `vmap`. Cost: 2F + 4F a vector."""
    if function.device.type != "cpu" or function.num_parameters < MANY_PARAMETERS:
        return _add_through_vmap(function, inputs, rows, output_product, sums)

    def outputs_of(values: Sequence[Tensor]) -> list[Tensor]:
        return [function(values, inputs)]

    forward = RecordedForward(outputs_of, function.parameters)
    (outputs,) = forward.outputs
    check_finite(outputs)
    for index, (tangents,) in enumerate(push_forward(outputs_of, function.parameters, rows)):
        cotangents = [output_product(outputs, tangents)]
        forward.pull_back(cotangents, sums[index], keep=index + 1 < len(rows))


def _add_through_vmap(
    function: ModelFunction, inputs: Inputs, rows: Tensor, output_product: OutputProduct, sums: ColumnSums
) -> None:
    parameters = function.parameters

    def outputs_of(*values: Tensor) -> Tensor:
        return function(values, inputs)

    outputs, pull_back = vjp(outputs_of, *parameters)[:2]
    check_finite(outputs)

    def product(*tangent: Tensor) -> tuple[Tensor, ...]:
        return pull_back(output_product(outputs, jvp(outputs_of, parameters, tangent)[1]))

    sums.add(vmap(product)(*tangents_of(rows, parameters)))


def push_forward(
    outputs_of: Callable[[Sequence[Tensor]], Sequence[Tensor]], parameters: Sequence[Tensor], rows: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the outputs' derivatives along each row of (K, P), some rows at a time through `vmap`."""

    def along(*tangent: Tensor) -> tuple[Tensor, ...]:
        return jvp(lambda *values: tuple(outputs_of(values)), tuple(parameters), tangent)[1]

    for block in rows.split(TANGENTS_AT_ONCE):
        with torch.no_grad():
            derivatives = vmap(along)(*tangents_of(block, parameters))
        yield from zip(*(derivative.unbind(0) for derivative in derivatives), strict=True)


def add_finite_difference_product(
    function: ModelFunction,
    inputs: Inputs,
    vector: Tensor,
    output_product: OutputProduct,
    sums: ColumnSums,
    *,
    step: float,
) -> None:
    """Add JᵀSJ v with J v ≈ [h(θ + δv) - h(θ - δv)] / 2δ and δ = step / ‖v‖. Cost: 5F.

    Klochkov & Liu (2024), Sec. 2, fix δ = 0.01 for vectors of any norm. The error depends on the norm of the
    perturbation, δ‖v‖, so that is what `step` fixes: far below the optimum of smooth functions
    (eps^(1/3)‖θ‖), because networks with ReLU have kinks.
    """
    norm = torch.linalg.vector_norm(vector)
    parameters = function.parameters
    if norm == 0:
        return sums.add_zero()
    delta = step / norm
    tangents = unflatten(vector, parameters)
    with torch.no_grad():
        shifted = [
            function([value + sign * delta * t for value, t in zip(parameters, tangents, strict=True)], inputs)
            for sign in (1.0, -1.0)
        ]
        output_tangents = (shifted[0] - shifted[1]) / (2 * delta)
    forward = RecordedForward(lambda values: [function(values, inputs)], parameters)
    (outputs,) = forward.outputs
    check_finite(outputs)
    forward.pull_back([output_product(outputs, output_tangents)], sums)


@contextmanager
def forward_mode(way_out: str) -> Iterator[None]:
    """Say what to do instead where a kernel of the model (EmbeddingBag, weight_norm) has no forward mode."""
    try:
        yield
    except NotImplementedError as error:
        if "forward AD" not in str(error):
            raise
        kernel = str(error).partition("forward AD with ")[2].partition(" ")[0]
        raise NotImplementedError(
            f"PyTorch's kernel {kernel} has no forward-mode derivative: {way_out}."
        ) from error
