"""One batch linearised: outputs h, J v for given vectors v, and Jᵀu. J is the Jacobian of h by the parameters.

Cost of a product with JᵀSJ, in forwards F of the batch (a backward costs 2F, and so does a tangent beside its
forward): 5F for one vector, a forward that carries the tangent along and one backward; for K vectors 2F + 4F each
where they share the forward (`vmap`), 5F each in a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap

from curvlab.curvature.column_sums import ColumnSums, tangents_of
from curvlab.curvature.recorded_forward import RecordedForward
from curvlab.linalg import unflatten
from curvlab.problem.batch import Inputs, num_examples
from curvlab.problem.model_function import ModelFunction, check_finite

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

Value = TypeVar("Value")


@dataclass(frozen=True)
class Linearised:
    """Predictions of a batch, their derivative along one vector or several, and the way back.

    Attributes:
        targets: of these predictions.
        outputs: h, without graph.
        tangents: J v, shaped as `outputs`; for K vectors at once (K, *outputs.shape).
        pull_back: takes u, shaped as `tangents`, and adds Jᵀu to the columns that belong to the vectors.
    """

    targets: Tensor
    outputs: Tensor
    tangents: Tensor
    pull_back: Callable[[Tensor], None]


def use_vmap(function: ModelFunction, columns: Columns, inputs: Inputs) -> bool:
    """Return whether K vectors on this batch go through `vmap`, sharing a forward, or one after another.

    "auto" takes `vmap`, except for convolutions of large batches on a CPU, and for Hugging Face models, whose
    construction of masks uses vmap itself. Where the memory of eight tangents is there, "vmap" is worth a trial
    for large convolutional networks, too (bench-speed, product_parts.csv: ResNet-18 with 25 vectors).
    """
    if columns != "auto":
        return columns == "vmap"
    if hasattr(function.model, "config"):
        return False
    if function.device.type != "cpu" or not function.has_convolution:
        return True
    return num_examples(inputs) <= MAX_CONVOLVED_EXAMPLES and function.num_parameters < MANY_PARAMETERS


def linearise(
    function: ModelFunction,
    inputs: Inputs,
    targets: Tensor,
    rows: Tensor,
    sums: ColumnSums,
    *,
    step: float | None = None,
) -> Iterator[Linearised]:
    """Yield the batch linearised along each row v of (K, P); nothing where J v is known to be zero.

    Args:
        function: the model.
        inputs: of the batch.
        targets: of the batch, passed on.
        rows: several share a forward.
        sums: one column for each row; `pull_back` adds to them.
        step: None for J v by forward mode; else the norm of a central difference's perturbation, for a single row.
    """
    if len(rows) == 1:
        return _linearise_along_one(function, inputs, targets, rows[0], sums, step=step)
    if function.device.type != "cpu" or function.num_parameters < MANY_PARAMETERS:
        return _linearise_through_vmap(function, inputs, targets, rows, sums)
    return _linearise_recorded(function, inputs, targets, rows, sums)


def _linearise_along_one(
    function: ModelFunction,
    inputs: Inputs,
    targets: Tensor,
    vector: Tensor,
    sums: ColumnSums,
    *,
    step: float | None,
) -> Iterator[Linearised]:
    """Dual numbers run through one forward whose primal part is recorded: the backward needs no second one."""

    def outputs_of(values: Sequence[Tensor]) -> list[Tensor]:
        return [function(values, inputs)]

    if step is None:
        forward = RecordedForward(outputs_of, function.parameters, vector)
        tangents = forward.tangents[0]
    else:
        (plus,), (minus,), width = shifted(outputs_of, function.parameters, vector, step=step)
        tangents = (plus - minus) / width
        forward = RecordedForward(outputs_of, function.parameters)
    (outputs,) = forward.outputs
    check_finite(outputs)
    if tangents is None:  # no parameter reaches the outputs
        return sums.add_zero()
    yield Linearised(targets, outputs, tangents, lambda u: forward.pull_back([u], sums))


def _linearise_recorded(
    function: ModelFunction, inputs: Inputs, targets: Tensor, rows: Tensor, sums: ColumnSums
) -> Iterator[Linearised]:
    """One forward is recorded, tangents go through `vmap`, gradients are taken one by one."""

    def outputs_of(values: Sequence[Tensor]) -> list[Tensor]:
        return [function(values, inputs)]

    forward = RecordedForward(outputs_of, function.parameters)
    (outputs,) = forward.outputs
    check_finite(outputs)
    for index, (tangents,) in enumerate(push_forward(outputs_of, function.parameters, rows)):
        keep, column = index + 1 < len(rows), sums[index]
        yield Linearised(targets, outputs, tangents, partial(_pull_back_one, forward, column, keep))


def _pull_back_one(forward: RecordedForward, column: ColumnSums, keep: bool, cotangent: Tensor) -> None:
    forward.pull_back([cotangent], column, keep=keep)


def _linearise_through_vmap(
    function: ModelFunction, inputs: Inputs, targets: Tensor, rows: Tensor, sums: ColumnSums
) -> Iterator[Linearised]:
    """All rows at once, tangents and gradients through `vmap`."""
    parameters = function.parameters

    def outputs_of(*values: Tensor) -> Tensor:
        return function(values, inputs)

    def derivative(*tangent: Tensor) -> Tensor:
        return jvp(outputs_of, parameters, tangent)[1]

    outputs, gradient = vjp(outputs_of, *parameters)[:2]
    check_finite(outputs)
    tangents = vmap(derivative)(*tangents_of(rows, parameters))
    yield Linearised(targets, outputs, tangents, lambda u: sums.add(vmap(gradient)(u)))


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


def shifted(
    outputs_of: Callable[[Sequence[Tensor]], Value], parameters: Sequence[Tensor], vector: Tensor, *, step: float
) -> tuple[Value, Value, Tensor]:
    """Return h(θ + δv), h(θ - δv) and 2δ, with δ = step / ‖v‖: J v ≈ [h(θ + δv) - h(θ - δv)] / 2δ. Cost: 2F.

    Klochkov & Liu (2024), Sec. 2, fix δ = 0.01 for vectors of any norm. The error depends on the norm of the
    perturbation, δ‖v‖, so that is what `step` fixes: far below the optimum of smooth functions
    (eps^(1/3)‖θ‖), because networks with ReLU have kinks.
    """
    # A zero vector moves nothing, whatever δ is: the clamp only keeps it finite.
    delta = step / torch.linalg.vector_norm(vector).clamp(min=torch.finfo(vector.dtype).tiny)
    direction = unflatten(vector, parameters)
    with torch.no_grad():
        plus, minus = (
            outputs_of([value + sign * delta * t for value, t in zip(parameters, direction, strict=True)])
            for sign in (1.0, -1.0)
        )
    return plus, minus, 2 * delta


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
