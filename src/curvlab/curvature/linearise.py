"""One batch linearised: outputs h, J v for given vectors v, and Jᵀu. J is the Jacobian of h by the parameters.

Cost of a product with JᵀSJ, in forwards F of the batch (a backward costs 2F, and so does a tangent beside its
forward): 5F for one vector, a forward that carries the tangent along and one backward; for K vectors 2F + 4F each
where they share the forward (`vmap`), 5F each in a loop.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import jvp, vjp, vmap

from curvlab.linalg import unflatten
from curvlab.problem.batch import Inputs, num_examples, take
from curvlab.problem.model_function import ModelFunction, check_finite

Columns = Literal["auto", "vmap", "loop"]
Value = TypeVar("Value")
# (parameters' values, inputs) -> tensors: the first has a row for each example, the others none.
OutputsOf = Callable[[Sequence[Tensor], Inputs], Sequence[Tensor]]

FD_STEP = {torch.float64: 1e-6, torch.float32: 1e-3}
# On a CPU, vmapped convolutions are grouped ones: measured on a small net and on ResNet-20 with 25 vectors, they
# take 1/7 to 2/3 of a loop's time for up to 16 examples, and up to twice as long for 64 and more.
MAX_CONVOLVED_EXAMPLES = 24
# From as many parameters on, gradients of K vectors on a CPU are taken one by one, each written where it belongs:
# measured on MLPs and an OPT, 2 to 10 % faster at half the memory; below, `vmap` saves up to 0.2 ms a vector.
MANY_PARAMETERS = 2**19
# Of so many parameters, this many tangents go through `vmap` at once: more gain nothing and hold activations each.
TANGENTS_AT_ONCE = 8
# In two passes forward mode takes the batch in so many parts: a dual number through plain attention holds several
# matrices of T × T where the recorded forward, fused, holds none. Measured on the ten models of bench-speed: 0.4
# to 1.17 times the memory of a gradient step with 4 parts, up to 1.3 with 2, up to 2 with one.
NUM_PARTS = 4


@dataclass(frozen=True)
class ColumnSums:
    """Sums over batches of K columns of P numbers, each times `scale`.

    Attributes:
        rows: (K, P), the sums, one row for each column of the product; the first batch overwrites them.
        first: whether this is the first batch, so that nothing has been written yet.
        scale: 1/n, where n is known before all batches are read; else 1.
    """

    rows: Tensor
    first: bool
    scale: float

    def __getitem__(self, columns: slice) -> ColumnSums:
        """Return the sums of some columns."""
        return ColumnSums(self.rows[columns], self.first, self.scale)

    def add(self, pieces: Sequence[Tensor]) -> None:
        """Add a batch's columns, given parameter by parameter, each (K, *shape)."""
        sizes = [piece.shape[1:].numel() for piece in pieces]
        for place, piece in zip(self.rows.split(sizes, dim=1), pieces, strict=True):
            self.put(place, piece.detach().reshape(place.shape))

    def add_zero(self) -> None:
        """Add a batch whose columns are zero."""
        if self.first:
            self.rows.zero_()

    def put(self, place: Tensor, values: Tensor) -> None:
        """Add values to a place in `rows`."""
        if self.first:
            torch.mul(values, self.scale, out=place)
        else:
            place.add_(values, alpha=self.scale)


@cache
def load_forward_mode() -> None:
    """Let torch load what forward mode needs, without its 18 warnings on how it was written."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=FutureWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")


def tangents_of(rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Cut (K, P) into tensors (K, *shape), or (P,) into (*shape), that forward mode uses without copying them.

    PyTorch copies a tangent that does not begin at the start of its storage, unlike its parameter. So each piece
    becomes a tensor with its own storage, on the same memory.
    """
    load_forward_mode()
    apart = torch.from_dlpack if rows.device.type in ("cpu", "cuda") else torch.clone
    pieces = zip(rows.split([tensor.numel() for tensor in like], dim=-1), like, strict=True)
    return [apart(piece.view((*rows.shape[:-1], *tensor.shape))) for piece, tensor in pieces]


class RecordedForward:
    """Outputs of a function of the parameters, their derivative along a vector, and the way back.

    Each gradient is added to the sums as soon as the backward has computed it. Gradients that are kept until the
    backward ends take P numbers of fresh memory, written once and read again: 15 % of the time of a product,
    measured on a ResNet-18 with 16 images.

    Only the outputs are recorded for the backward, not the tangents computed beside them: `vjp` records on a level
    above the dual numbers. Plain autograd would record both, at 15 % of the time of a product on a small OPT.

    Args:
        outputs_of: takes the parameters' values, returns tensors.
        parameters: without graph.
        vector: (P,), along which to differentiate; None for outputs alone.

    Attributes:
        outputs: without graph.
        tangents: J v, one for each output; None for an output that no parameter reaches, or without a vector.
    """

    def __init__(
        self,
        outputs_of: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        parameters: Sequence[Tensor],
        vector: Tensor | None = None,
    ) -> None:
        self._sizes = [parameter.numel() for parameter in parameters]
        self._into = into = _Column()

        def recorded(*values: Tensor) -> tuple[Tensor, ...]:
            for index, value in enumerate(values):
                value.register_hook(partial(into.put, index))
            return tuple(outputs_of(values))

        with forward_ad.dual_level():
            duals = parameters
            if vector is not None:
                duals = list(map(forward_ad.make_dual, parameters, tangents_of(vector, parameters)))
            outputs, self._vjp = vjp(recorded, *duals)[:2]
            # Outside the dual level the tangents are gone: inside it, the backward would differentiate itself too.
            self.outputs, self.tangents = map(list, zip(*map(forward_ad.unpack_dual, outputs), strict=True))

    def pull_back(self, cotangents: Sequence[Tensor], sums: ColumnSums, *, keep: bool = False) -> None:
        """Add Jᵀu to the only column of `sums`; u has one tensor for each output. Cost: one backward.

        Args:
            cotangents: u.
            sums: of one column.
            keep: whether the recorded forward is kept for another call.
        """
        into = self._into
        into.sums, into.left = sums, dict(enumerate(sums.rows[0].split(self._sizes)))
        with torch.no_grad():
            self._vjp(tuple(cotangents), retain_graph=keep)
        for unreached in into.left.values() if sums.first else ():
            unreached.zero_()


class _Column:
    """The column that a backward adds its gradients to.

    Hooks inside the graph hold it, and it holds no graph: if they held the RecordedForward, which does, the two
    would never be freed, because Python's garbage collector does not see references inside the graph.

    Attributes:
        sums: the column's.
        left: the places of those parameters whose gradients have not been added, by the parameters' numbers.
    """

    sums: ColumnSums
    left: dict[int, Tensor]

    def put(self, index: int, gradient: Tensor) -> Tensor:
        """Add a gradient; return its place instead of the gradient, whose memory is then free."""
        place = self.left.pop(index).view_as(gradient)
        self.sums.put(place, gradient)
        return place


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

    "auto" takes `vmap`, except for convolutions of large batches on a CPU, for LSTM and GRU, whose decomposed form
    adds in place, for Hugging Face models, whose construction of masks uses vmap itself, and for models that it
    does not go through. Where the memory of eight tangents is there, "vmap" is worth a trial for large
    convolutional networks, too (bench-speed, product_parts.csv: ResNet-18 with 25 vectors).
    """
    if columns != "auto":
        return columns == "vmap"
    if function.has_recurrence or hasattr(function.model, "config") or not function.maps(inputs):
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
    two_passes: bool = False,
) -> Iterator[Linearised]:
    """Yield the batch linearised along each row v of (K, P); nothing where J v is known to be zero.

    Args:
        function: the model.
        inputs: of the batch.
        targets: of the batch, passed on.
        rows: several share a forward.
        sums: one column for each row; `pull_back` adds to them.
        step: None for J v by forward mode; else the norm of a central difference's perturbation, for a single row.
        two_passes: for a single row, with the memory of a gradient: first forward mode, which saves nothing for a
            backward, then S, then an ordinary forward and backward. One pass records a forward that carries
            tangents along: about twice the activations, and those of plain attention, since fused kernels have no
            forward mode; here the recorded forward may use them. Cost: 6F instead of 5F. Peak beside parameters
            and vectors: what one forward records, as long as what forward mode holds for a part of the batch, a
            layer at a time, is less.
    """
    parameters = function.parameters

    def outputs_of(values: Sequence[Tensor]) -> list[Tensor]:
        return [function(values, inputs)]

    forward: RecordedForward | None = None
    tangents: Iterable[Sequence[Tensor | None]]
    if len(rows) > 1 and (function.device.type != "cpu" or function.num_parameters < MANY_PARAMETERS):
        yield _linearise_through_vmap(function, inputs, targets, rows, sums)
        return
    if two_passes:
        found = derivative_in_parts(lambda values, part: [function(values, part)], parameters, inputs, rows[0])
        outputs, tangents = found[0], [found[1]]
    elif step is not None:
        (plus,), (minus,), width = shifted(outputs_of, parameters, rows[0], step=step)
        forward, tangents = RecordedForward(outputs_of, parameters), [[(plus - minus) / width]]
        outputs = forward.outputs
    else:
        forward, tangents = derivatives(outputs_of, parameters, rows)
        outputs = forward.outputs
    check_finite(outputs[0])

    def pull_back(index: int, cotangent: Tensor) -> None:
        recorded = forward or RecordedForward(lambda values: [function(values, inputs, fused=True)], parameters)
        recorded.pull_back([cotangent], sums[index : index + 1], keep=index + 1 < len(rows))

    for index, (derivative,) in enumerate(tangents):
        if derivative is None:  # no parameter reaches the outputs
            return sums.add_zero()
        yield Linearised(targets, outputs[0], derivative, partial(pull_back, index))


def _linearise_through_vmap(
    function: ModelFunction, inputs: Inputs, targets: Tensor, rows: Tensor, sums: ColumnSums
) -> Linearised:
    """All rows at once, tangents and gradients through `vmap`."""
    given = tangents_of(rows, function.parameters)
    outputs, tangents, gradients = linearise_together(function, function.parameters, inputs, given)
    check_finite(outputs)
    return Linearised(targets, outputs, tangents, lambda u: sums.add(gradients(u)))


def linearise_together(
    function: ModelFunction, parameters: Sequence[Tensor], inputs: Inputs, tangents: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Callable[[Tensor], Sequence[Tensor]]]:
    """Return outputs h, J v of K vectors, (K, *outputs.shape), and the function u -> Jᵀu, pieces (K, *shape)."""

    def outputs_of(*values: Tensor) -> Tensor:
        return function(values, inputs)

    def derivative(*tangent: Tensor) -> Tensor:
        return jvp(outputs_of, tuple(parameters), tangent)[1]

    outputs, gradient = vjp(outputs_of, *parameters)[:2]
    return outputs, vmap(derivative)(*tangents), vmap(gradient)


def derivatives(
    outputs_of: Callable[[Sequence[Tensor]], Sequence[Tensor]], parameters: Sequence[Tensor], rows: Tensor
) -> tuple[RecordedForward, Iterable[Sequence[Tensor | None]]]:
    """Return a recorded forward, and its outputs' derivatives along each row of (K, P).

    For one row by the same forward: dual numbers run through it whose primal part is recorded, so that the
    backward needs no second one. For several by `push_forward`.
    """
    if len(rows) == 1:
        forward = RecordedForward(outputs_of, parameters, rows[0])
        return forward, [forward.tangents]
    return RecordedForward(outputs_of, parameters), push_forward(outputs_of, parameters, rows)


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
