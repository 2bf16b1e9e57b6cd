"""Parameters that share one low-rank matrix, and the rows of its basis that belong to each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_CHUNK = 2**18  # numbers that are held in double precision at a time

Pieces = dict[Tensor, Tensor]  # parameter -> its part of a vector, (numel,), in the block's dtype


class ParameterBlock:
    """P parameters, and B, (num_rows, P): vectors of all of them, one in each row.

    B is kept in pieces, `states[parameter]["rows"]`, (num_rows, numel). A parameter without a piece, because it
    never had a gradient, counts as zeros; so do parameters that are left out of a vector.

    Attributes:
        parameters: in the order of the optimizer's groups.
        states: state of each parameter; what belongs to the whole block is kept by the first.
        settings: rank, decay and the like, of the first parameter's group.
        num_rows: of B.
    """

    def __init__(
        self, parameters: Sequence[Tensor], states: Mapping[Tensor, dict[str, Any]], settings: dict[str, Any]
    ) -> None:
        self.parameters = list(parameters)
        self.states = states
        self.settings = settings
        self.num_rows: int = settings["rank"]
        wide = any(parameter.dtype == torch.float64 for parameter in parameters)
        self.dtype = torch.float64 if wide else torch.float32
        if len({parameter.device for parameter in parameters}) > 1:
            raise ValueError(
                "parameters that share a curvature matrix must be on one device: use scope='tensor', or one group "
                "for each device and scope='group'"
            )

    @property
    def size(self) -> int:
        """P."""
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def state(self) -> dict[str, Any]:
        """What belongs to the whole block; created by writing to it."""
        return self.states[self.parameters[0]]

    def gradients(self) -> Pieces:
        """Return the gradients that there are, flat and in the block's dtype; often they are p.grad's memory."""
        pieces = {}
        for parameter in self.parameters:
            if parameter.grad is not None:
                if parameter.grad.layout != torch.strided:
                    raise TypeError("gradients must be dense, got sparse ones: use nn.Embedding(sparse=False)")
                pieces[parameter] = parameter.grad.reshape(-1).to(self.dtype)
        return pieces

    def add_missing_rows(self, pieces: Pieces) -> None:
        """Create rows of zeros for parameters that have none yet."""
        for parameter, piece in pieces.items():
            if "rows" not in self.states[parameter]:
                self.states[parameter]["rows"] = piece.new_zeros(self.num_rows, len(piece))

    def rows(self, parameter: Tensor) -> Tensor | None:
        """Return the parameter's columns of B, (num_rows, numel); None stands for zeros."""
        return self.states[parameter].get("rows") if parameter in self.states else None

    def product(self, pieces: Pieces) -> Tensor:
        """Return B x, (num_rows,). Cost: one pass over B."""
        total = self.parameters[0].new_zeros(self.num_rows, dtype=self.dtype)
        for parameter, piece in pieces.items():
            rows = self.rows(parameter)
            if rows is not None:
                total = torch.addmv(total, rows, piece)
        return total

    def minus_combination(self, pieces: Pieces, weights: Tensor, *, scale: float = 1.0) -> Pieces:
        """Return scale (x - Bᵀ weights). Cost: one pass over B, one new vector."""
        result = {}
        for parameter, piece in pieces.items():
            rows = self.rows(parameter)
            if rows is None:
                result[parameter] = scale * piece
            else:
                result[parameter] = torch.addmv(piece, rows.mT, weights, beta=scale, alpha=-scale)
        return result

    def set_row(self, index: int, pieces: Pieces) -> None:
        """Replace a row of B."""
        for parameter in self.parameters:
            rows = self.rows(parameter)
            if rows is not None:
                if parameter in pieces:
                    rows[index].copy_(pieces[parameter])
                else:
                    rows[index].zero_()

    def reflect_(self, unit: Tensor, extra: Pieces, extra_scale: float) -> None:
        """Reflect [B; y], y = extra_scale · extra, by I - 2uuᵀ, and keep all rows but the last, in place.

        `unit`: u, (num_rows + 1,), of norm 1, on the block's device. Cost: two passes over B, a vector for each
        parameter in turn.
        """
        head, last = unit[:-1], unit[-1]
        for parameter in self.parameters:
            rows = self.rows(parameter)
            if rows is None:
                continue
            mixed = rows.mT @ head
            if parameter in extra:
                mixed += (extra_scale * last) * extra[parameter]
            rows.addr_(head, mixed, alpha=-2)

    def gram(self) -> Tensor:
        """Return BBᵀ, (num_rows, num_rows), in double precision. Cost: 2 P num_rows² flops."""
        total = self.parameters[0].new_zeros(self.num_rows, self.num_rows, dtype=torch.float64)
        for chunk in self._chunks():
            wide = chunk.double()
            total += wide @ wide.mT
        return total

    def transform_(self, matrix: Tensor) -> None:
        """Replace B by `matrix` B, in place. Cost: 2 P num_rows² flops, a chunk of B as temporary."""
        wide = matrix.to(self.parameters[0].device, torch.float64)
        for chunk in self._chunks():
            chunk.copy_(wide @ chunk.double())

    def _chunks(self) -> list[Tensor]:
        found = [self.rows(parameter) for parameter in self.parameters]
        columns = max(1, _CHUNK // self.num_rows)
        return [chunk for rows in found if rows is not None for chunk in rows.split(columns, dim=1)]


def norm(pieces: Pieces) -> Tensor:
    """Return ‖x‖, (), in double precision."""
    norms = torch.stack([torch.linalg.vector_norm(piece) for piece in pieces.values()])
    return torch.linalg.vector_norm(norms.double())
