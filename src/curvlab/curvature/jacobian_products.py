"""Products with JᵀSJ for one batch, where J is the Jacobian of the outputs by the parameters.

Cost in forwards F of the batch (a backward is 2F): one vector 4F, a forward that carries the tangent along
and one backward; K vectors together 2F + 3F each (`vmap`), or 4F each (loop).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import jvp, vjp, vmap

from curvlab.curvature.batch import Inputs, num_examples
from curvlab.curvature.model_function import ModelFunction, check_finite
from curvlab.linalg import unflatten, unflatten_columns

# (outputs, tangents) -> S tangents for one batch; linear in the tangents.
OutputProduct = Callable[[Tensor, Tensor], Tensor]
Columns = Literal["auto", "vmap", "loop"]
# Some of the columns of a product, and their values parameter by parameter, each (k, *shape).
Products = tuple[slice, Sequence[Tensor]]
FD_STEP = {torch.float64: 1e-6, torch.float32: 1e-3}


# On a CPU, vmapped convolutions are grouped ones: measured on a small net and on ResNet-20 with 25 vectors, they
# take 1/7 to 2/3 of a loop's time for up to 16 examples, and up to twice as long for 64 and more.
MAX_CONVOLVED_EXAMPLES = 24


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
    return num_examples(inputs) <= MAX_CONVOLVED_EXAMPLES


def forward_product(
    function: ModelFunction, inputs: Inputs, vector: Tensor, output_product: OutputProduct
) -> list[Tensor]:
    """Return JᵀSJ v parameter by parameter, for v (P,), with J v by forward mode. Cost: 4F.

    Dual numbers run through one forward whose primal part is recorded: the backward needs no second one.
    """
    leaves = [parameter.requires_grad_() for parameter in function.parameters]
    # Tensors of their own: make_dual would fill zeros first and then copy, where it is given pieces of a vector.
    tangents = [piece.clone() for piece in unflatten(vector, leaves)]
    with torch.enable_grad(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(leaf, tangent) for leaf, tangent in zip(leaves, tangents, strict=True)]
        outputs, output_tangents = forward_ad.unpack_dual(function(duals, inputs))
        if output_tangents is None:  # no parameter reaches the outputs
            return [torch.zeros_like(leaf) for leaf in tangents]
        output_tangents = output_tangents.detach()
    del duals, tangents  # P numbers that the backward does not need
    # Outside the dual level, where tangents are gone: inside it, the backward would differentiate itself too.
    check_finite(outputs)
    return _backward(outputs, leaves, output_product(outputs.detach(), output_tangents))


def forward_products(
    function: ModelFunction, inputs: Inputs, vectors: Tensor, output_product: OutputProduct
) -> Sequence[Tensor]:
    """Return JᵀSJ V parameter by parameter, each (K, *shape), through `vmap`. Cost: 2F + 3F a vector."""
    parameters = function.parameters

    def outputs_of(values: Sequence[Tensor]) -> Tensor:
        return function(values, inputs)

    outputs, pull_back = vjp(outputs_of, parameters)[:2]
    check_finite(outputs)

    def product(*tangent: Tensor) -> tuple[Tensor, ...]:
        output_tangent = jvp(outputs_of, (parameters,), (tangent,))[1]
        return pull_back(output_product(outputs, output_tangent))[0]

    pieces: tuple[Tensor, ...] = vmap(product)(*unflatten_columns(vectors, parameters))
    return pieces


def finite_difference_product(
    function: ModelFunction, inputs: Inputs, vector: Tensor, output_product: OutputProduct, *, step: float
) -> list[Tensor]:
    """Return JᵀSJ v parameter by parameter with J v ≈ [h(θ + δv) - h(θ - δv)] / 2δ and δ = step / ‖v‖. Cost: 5F.

    Klochkov & Liu (2024), Sec. 2, fix δ = 0.01 for vectors of any norm. The error depends on the norm of the
    perturbation, δ‖v‖, so that is what `step` fixes: far below the optimum of smooth functions
    (eps^(1/3)‖θ‖), because networks with ReLU have kinks.
    """
    norm = torch.linalg.vector_norm(vector)
    leaves = [parameter.requires_grad_() for parameter in function.parameters]
    if norm == 0:
        return [torch.zeros_like(leaf) for leaf in leaves]
    delta = step / norm
    tangents = unflatten(vector, leaves)
    with torch.no_grad():
        shifted = [
            function([leaf + sign * delta * t for leaf, t in zip(leaves, tangents, strict=True)], inputs)
            for sign in (1.0, -1.0)
        ]
        output_tangents = (shifted[0] - shifted[1]) / (2 * delta)
    with torch.enable_grad():
        outputs = function(leaves, inputs)
        check_finite(outputs)
        return _backward(outputs, leaves, output_product(outputs.detach(), output_tangents))


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


def one_column(index: int, pieces: Sequence[Tensor]) -> Products:
    """Return a product with one vector as the column `index` of several."""
    return slice(index, index + 1), [piece[None] for piece in pieces]


def _backward(
    outputs: Tensor, leaves: Sequence[Tensor], cotangents: Tensor, *, keep_graph: bool = False
) -> list[Tensor]:
    gradients = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True, retain_graph=keep_graph)
    return [
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves, gradients, strict=True)
    ]
