"""The longest principal rows of chosen examples: G = Σ rᵀr over rows r of S_i^½ J_i / sqrt(n)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vjp, vmap

from curvlab.curvature.examples import covering_layers, own_gauss_newton, recorded, with_examples
from curvlab.curvature.gauss_newton import GaussNewtonOperator
from curvlab.curvature.layers import Layer, LayerRows, RecordedLayers
from curvlab.curvature.operator import MeanOverRanks
from curvlab.linalg import LinearOperator
from curvlab.problem.batch import Inputs, num_examples, take

_EXAMPLES_AT_ONCE = 256
_NUMBERS_AT_ONCE = 2**24  # of rows that `dense_matrix` holds, and of copies in fp64
# Outputs of an example that rows are made of: those of its largest probabilities, where it has more.
MAX_OUTPUTS = 32


@dataclass(frozen=True)
class OuterRows:
    """Rows g_m ⊗ a_e(m) in a layer with one place: kept are a for each example and g for each row."""

    layer: Layer
    activations: Tensor  # (E, I)
    signals: Tensor  # (M, O)
    examples: Tensor  # (M,)

    def gram(self) -> Tensor:
        """Return R Rᵀ, (M, M) in fp64: a product of two small kernels."""
        activations, signals = self.activations.double(), self.signals.double()
        inner = (activations @ activations.T)[self.examples][:, self.examples]
        return inner.mul_(signals @ signals.T)

    def project(self, vectors: Tensor) -> Tensor:
        """Return R V, (P, K) -> (M, K)."""
        columns = [
            ((self.activations @ matrix.T)[self.examples] * self.signals).sum(1)
            for matrix in self.layer.matrix(vectors).unbind(0)
        ]
        return torch.stack(columns, 1)

    def lift(self, coefficients: Tensor, result: Tensor) -> None:
        """Write Rᵀ C, (M, K), into the layer's part of (P, K)."""
        matrices = []
        for column in coefficients.unbind(1):
            sums = self.signals.new_zeros(len(self.activations), self.signals.shape[1])
            sums.index_add_(0, self.examples, column[:, None] * self.signals)
            matrices.append(sums.T @ self.activations)
        self.layer.write(torch.stack(matrices), result)

    @property
    def num_kept(self) -> int:
        """Numbers in memory."""
        return self.activations.numel() + self.signals.numel()

    @property
    def squares(self) -> Tensor:
        """Squared norms of the rows' parts in this layer, (M,), fp64."""
        return self.activations.double().square().sum(1)[self.examples] * self.signals.double().square().sum(1)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is kept beside the layer."""
        return self.activations, self.signals, self.examples

    @classmethod
    def joined(cls, layer: Layer, found: Sequence[Sequence[Tensor]], places: Tensor) -> OuterRows:
        """Return the rows `places` of several sets of `tensors`, counted through them."""
        starts = itertools.accumulate((len(activations) for activations, _, _ in found), initial=0)
        examples = torch.cat([numbers + start for (_, _, numbers), start in zip(found, starts, strict=False)])
        kept, renumbered = examples[places].unique(return_inverse=True)
        activations, signals = (torch.cat([tensors[i] for tensors in found]) for i in (0, 1))
        return cls(layer, activations[kept], signals[places], renumbered)


@dataclass(frozen=True)
class DenseRows:
    """Rows as they are: of a layer with several places (convolutions), or of all parameters."""

    layer: Layer | None
    rows: Tensor  # (M, O I), or (M, P)

    def gram(self) -> Tensor:
        """Return R Rᵀ, (M, M) in fp64."""
        gram = self.rows.new_zeros(len(self.rows), len(self.rows), dtype=torch.float64)
        for some in self.rows.split(max(1, _NUMBERS_AT_ONCE // max(1, len(gram))), dim=1):
            columns = some.double()  # a copy of all would take twice what the rows take
            gram.addmm_(columns, columns.T)
        return gram

    def project(self, vectors: Tensor) -> Tensor:
        """Return R V, (P, K) -> (M, K)."""
        return self.rows @ (vectors if self.layer is None else self.layer.matrix(vectors).flatten(1).T)

    def lift(self, coefficients: Tensor, result: Tensor) -> None:
        """Write Rᵀ C, (M, K), into its part of (P, K)."""
        columns = self.rows.T @ coefficients
        if self.layer is None:
            result.copy_(columns)
        else:
            self.layer.write(columns.T.unflatten(1, self.layer.shape), result)

    @property
    def num_kept(self) -> int:
        """Numbers in memory."""
        return self.rows.numel()

    @property
    def squares(self) -> Tensor:
        """Squared norms of the rows or their parts, (M,), fp64."""
        return self.rows.double().square().sum(1)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is kept beside the layer."""
        return (self.rows,)

    @classmethod
    def joined(cls, layer: Layer | None, found: Sequence[Sequence[Tensor]], places: Tensor) -> DenseRows:
        """Return the rows `places` of several sets of `tensors`, counted through them."""
        return cls(layer, torch.cat([rows for (rows,) in found])[places])


@torch.inference_mode(False)
def principal_rows(
    operator: GaussNewtonOperator | MeanOverRanks, chosen: Tensor, num_rows: int
) -> tuple[list[OuterRows | DenseRows], int]:
    """Return the longest principal rows of the examples `chosen`, and the number C of outputs they were made of.

    Each example's rows S_i^½ J_i / sqrt(n), (C, P), are rotated into the eigenvectors of their kernel (C, C): that
    changes neither their sum Σ rᵀr nor their form in a layer. Then the `num_rows` longest of all are kept, as one
    part for each layer where layers hold all parameters; else as rows of P.

    Of examples that are spread over processes each takes the longest rows of its own, and all get the longest of
    those.

    Cost: (1 + C) F of the chosen examples by layers; without them C gradients of each example, one by one.
    """
    if isinstance(operator, MeanOverRanks):
        return _rows_of_all(operator, chosen, num_rows)
    layers = covering_layers(own_gauss_newton(operator))
    if layers is None:
        return _flat_rows(operator, chosen, num_rows)
    return _layered_rows(operator, layers, chosen, num_rows)


@torch.inference_mode(False)
def dense_matrix(operator: LinearOperator) -> Tensor:
    """Return the matrix, (P, P): RᵀR of all examples' rows where layers hold all parameters, else by products.

    Rows are taken of a Gauss-Newton matrix, alone and on one process, of a loss with closed forms and at most
    `MAX_OUTPUTS` outputs. Cost then: (1 + 2 C) F and N C P² multiplications in one product of matrices; for 128
    examples of 10 classes and P = 500 a quarter of the seconds of P products. Values that are not finite stay.
    """
    matrix = with_examples(operator)
    if not isinstance(matrix, GaussNewtonOperator) or matrix is not operator or matrix.loss.is_psd is not True:
        return operator.to_dense()
    layers = covering_layers(matrix)
    if layers is None:
        return operator.to_dense()
    total = torch.zeros(matrix.shape, dtype=matrix.dtype, device=matrix.device)
    for inputs, targets in matrix.problem.batches:
        size = max(1, _NUMBERS_AT_ONCE // (MAX_OUTPUTS * matrix.shape[0]))
        for places in torch.arange(num_examples(inputs), device=matrix.device).split(size):
            own = targets[places]
            batch = RecordedLayers(matrix.function, layers, take(inputs, places))
            if batch.outputs.ndim != 2 or batch.outputs.shape[1] > MAX_OUTPUTS:
                return operator.to_dense()
            matrix.loss.check(batch.outputs, own)
            columns = matrix.loss.hessian_factors(batch.outputs, own)
            rows = total.new_empty(len(columns) * len(own), len(total))
            for part in batch.rows(columns):
                part.layer.write(part.dense().flatten(0, 1), rows.T)
            total.addmm_(rows.T, rows)
    return total / matrix.divisor


def numbers_of_row(operator: GaussNewtonOperator | MeanOverRanks) -> int:
    """Return how many numbers a row of `principal_rows` takes at most."""
    operator = own_gauss_newton(operator)
    layers = covering_layers(operator)
    if layers is None:
        return operator.shape[0]
    places = zip(layers, _num_places(operator, layers), strict=True)
    return sum(sum(layer.shape) if num == 1 else layer.shape[0] * layer.shape[1] for layer, num in places)


def _num_places(operator: GaussNewtonOperator, layers: list[Layer]) -> list[int]:
    ((inputs, _),) = operator.problem.data.in_fixed_order().select(torch.zeros(1, dtype=torch.long))
    return RecordedLayers(operator.function, layers, inputs).num_places()


def _rows_of_all(
    operator: MeanOverRanks, chosen: Tensor, num_rows: int
) -> tuple[list[OuterRows | DenseRows], int]:
    """Return the longest principal rows of examples that several processes hold, the same on each."""
    matrix, places = own_gauss_newton(operator), operator.own_places(chosen)
    parts, num_outputs = principal_rows(matrix, places, num_rows) if len(places) else ([], 0)
    own = [tuple(tensor.cpu() for tensor in part.tensors) for part in parts]
    squares = torch.stack([part.squares.cpu() for part in parts]).sum(0) if parts else torch.zeros(0)
    found = [share for share in operator.ranks.gather((own, squares, num_outputs)) if share[0]]
    # Which of them are longest, as the first process has it: no two may differ by their last digit.
    longest = operator.ranks.gather(torch.cat([share[1] for share in found]))[0]
    kept = longest.topk(min(num_rows, max(1, int((longest > 0).sum())))).indices
    layers = covering_layers(matrix)
    joined: list[OuterRows | DenseRows] = []
    for index, layer in enumerate([None] if layers is None else layers):
        tensors = [[tensor.to(matrix.device) for tensor in share[0][index]] for share in found]
        at = kept.to(matrix.device)
        if layer is None or len(tensors[0]) == 1:
            joined.append(DenseRows.joined(layer, tensors, at))
        else:
            joined.append(OuterRows.joined(layer, tensors, at))
    return joined, max(share[2] for share in found)


def _layered_rows(
    operator: GaussNewtonOperator, layers: list[Layer], chosen: Tensor, num_rows: int
) -> tuple[list[OuterRows | DenseRows], int]:
    """Return the longest principal rows of the chosen examples, layer by layer, and the number of outputs used."""
    problem, root = operator.problem.of_every_example(), operator.divisor**0.5
    is_short = max(_num_places(operator, layers)) == 1
    at_once = _EXAMPLES_AT_ONCE if is_short else max(1, min(_EXAMPLES_AT_ONCE, num_rows // MAX_OUTPUTS))
    activations: list[list[Tensor]] = [[] for _ in layers]
    held: list[Tensor] = []  # of each layer (M, O), or rows (M, O I) where there are many places
    squares, examples, num_read, num_outputs = torch.empty(0), torch.empty(0, dtype=torch.long), 0, 0

    def of_batch(inputs: Inputs, targets: Tensor, _: Tensor | None) -> list[LayerRows]:
        batch = recorded(operator, layers, inputs, targets)
        return batch.rows(operator.loss.hessian_factors(batch.outputs, targets, limit=MAX_OUTPUTS) / root)

    for block in chosen.split(at_once):
        for found in problem.part(block).map(of_batch):
            single = [part.activations.shape[1] == 1 for part in found]
            own = [
                part.signals[:, :, 0] if one else part.dense().flatten(2)
                for part, one in zip(found, single, strict=True)
            ]
            kernels = [
                (g @ g.transpose(1, 2)).double()
                * (part.activations.double().square().sum((1, 2))[:, None, None] if one else 1.0)
                for part, g, one in zip(found, own, single, strict=True)
            ]
            values, rotation = torch.linalg.eigh(torch.stack(kernels).sum(0))  # (E, C), (E, C, C)
            for index, part in enumerate(found):
                activations[index].append(part.activations[:, 0] if single[index] else part.activations[:, :0, 0])
            new = [(rotation.transpose(1, 2).to(g) @ g).flatten(0, 1) for g in own]
            numbers = num_read + torch.arange(len(values), device=values.device)
            num_read, num_outputs = num_read + len(values), values.shape[1]
            squares = torch.cat([squares.to(values), values.flatten()])
            examples = torch.cat([examples.to(numbers), numbers.repeat_interleave(num_outputs)])
            held = [torch.cat(pair) for pair in zip(held, new, strict=True)] if held else new
            if len(squares) > num_rows:  # no more than the longest are held
                places = _longest(squares, num_rows)
                squares, examples, held = squares[places], examples[places], [rows[places] for rows in held]
    places = _longest(squares, num_rows)
    kept, renumbered = examples[places].unique(return_inverse=True)
    parts: list[OuterRows | DenseRows] = []
    for index, layer in enumerate(layers):
        rows = held[index][places]
        if single[index]:
            parts.append(OuterRows(layer, torch.cat(activations[index])[kept], rows, renumbered))
        else:
            parts.append(DenseRows(layer, rows))
    return parts, num_outputs


def _flat_rows(
    operator: GaussNewtonOperator, chosen: Tensor, num_rows: int
) -> tuple[list[OuterRows | DenseRows], int]:
    """Return the same as rows of P numbers, by the gradients of each output of each example."""
    data, root = operator.problem.data.in_fixed_order(), operator.divisor**0.5
    rows, squares, num_outputs = torch.empty(0), torch.empty(0), 0
    for index in range(len(chosen)):
        ((inputs, targets),) = data.select(chosen[index : index + 1])
        own = _rows_of_one(operator, inputs, targets) / root  # (C, P)
        values, rotation = torch.linalg.eigh((own @ own.T).double())
        if index == 0:
            num_outputs = len(own)
            count = min(num_rows, len(chosen) * num_outputs)
            rows, squares = own.new_empty(count, own.shape[1]), values.new_full((count,), -torch.inf)
        # A row that is longer takes the place of one that is held: no more than the longest ever are.
        longest = torch.cat([squares, values]).topk(len(squares)).indices
        new = longest[longest >= len(squares)] - len(squares)
        held = torch.zeros(len(squares), dtype=torch.bool, device=squares.device)
        held[longest[longest < len(squares)]] = True
        freed = (~held).nonzero()[:, 0]
        rows[freed], squares[freed] = rotation.T[new].to(own) @ own, values[new]
    return [DenseRows(None, rows)], num_outputs


def _rows_of_one(operator: GaussNewtonOperator, inputs: Inputs, targets: Tensor) -> Tensor:
    """Return S^½ J of one example, (C, P)."""
    outputs, gradient = vjp(lambda *values: operator.function(values, inputs), *operator.function.parameters)[:2]
    columns = operator.loss.hessian_factors(outputs.detach(), targets, limit=MAX_OUTPUTS)
    return torch.cat([piece.flatten(1) for piece in vmap(gradient)(columns)], 1)


def _longest(squares: Tensor, num_rows: int) -> Tensor:
    """Return the places of the largest, at most `num_rows` and only positive ones, (M,)."""
    return squares.topk(max(1, min(num_rows, int((squares > 0).sum())))).indices
