"""A part of a model whose parameters are gathered while it is at work, and only then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from curvlab.parallel.sharded.layout import Piece
from curvlab.ranks import Ranks


@dataclass(frozen=True)
class Unit:
    """A module with the parameters that it gathers together: a layer, or the whole model but for its layers.

    Attributes:
        module: whose forward is run.
        names: of its parameters, as `functional_call` on it knows them.
        pieces: of the same parameters.
        places: of those in the rank's part of the vector; None for parameters that are frozen.
        ranks: who exchanges the pieces.
    """

    module: nn.Module
    names: tuple[str, ...]
    pieces: tuple[Piece, ...]
    places: tuple[slice | None, ...]
    ranks: Ranks

    @property
    def trained(self) -> list[int]:
        """Numbers of the parameters that are trained."""
        return [index for index, place in enumerate(self.places) if place is not None]

    def parameters(self) -> list[Tensor]:
        """Return the whole parameters, gathered from all ranks, without graph."""
        local = []
        for name in self.names:
            held = self.module.get_parameter(name).detach()
            local.append((held.to_local() if isinstance(held, DTensor) else held).reshape(-1))
        return self._gather(local, self.pieces)

    def tangents(self, vector: Tensor) -> list[Tensor]:
        """Return what a vector (P_r,) has for the trained parameters, gathered, shaped as they are."""
        return self._gather(
            [vector[place] for place in self.places if place is not None], [self.pieces[i] for i in self.trained]
        )

    def add_gradients(self, gradients: Sequence[Tensor | None], row: Tensor) -> None:
        """Add the sum over ranks of the trained parameters' gradients to this rank's part of a vector, (P_r,)."""
        pieces = [self.pieces[i] for i in self.trained]
        padded = [
            torch.zeros(self.ranks.size * piece.rows_each * piece.row_size, dtype=row.dtype, device=row.device)
            for piece in pieces
        ]
        for whole, gradient in zip(padded, gradients, strict=True):
            if gradient is not None:
                whole[: gradient.numel()] = gradient.reshape(-1)
        sent = torch.cat([whole.view(self.ranks.size, -1) for whole in padded], dim=1)
        if sent.dtype in (torch.float16, torch.bfloat16):  # summed in fp32
            sent = sent.float()
        received = torch.empty_like(sent[0])
        dist.reduce_scatter(received, list(sent.contiguous().unbind()))
        sizes = [piece.rows_each * piece.row_size for piece in pieces]
        trained = [place for place in self.places if place is not None]
        for place, piece, part in zip(trained, pieces, received.split(sizes), strict=True):
            row[place] += part[: piece.size]

    def run(self, parameters: Sequence[Tensor], arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """Return what the module's own forward gives with these parameters."""
        # While a model is at work the forward of its layers is replaced by one that comes here.
        replaced = vars(self.module).pop("forward", None)
        try:
            values = dict(zip(self.names, parameters, strict=True))
            return functional_call(self.module, values, tuple(arguments), keywords)
        finally:
            if replaced is not None:
                vars(self.module)["forward"] = replaced

    def _gather(self, local: Sequence[Tensor], pieces: Sequence[Piece]) -> list[Tensor]:
        if not pieces:
            return []
        sizes = [piece.rows_each * piece.row_size for piece in pieces]
        sent = torch.zeros(sum(sizes), dtype=local[0].dtype, device=local[0].device)
        for place, part in zip(sent.split(sizes), local, strict=True):
            place[: part.numel()] = part
        received = sent.new_empty(self.ranks.size, len(sent))
        dist.all_gather(list(received.unbind()), sent)
        columns = received.split(sizes, dim=1)
        # Only the last rows of the last pieces are padding: what lies before is the parameter, in its order.
        return [
            part.reshape(-1)[: piece.shape.numel()].view(piece.shape)
            for piece, part in zip(pieces, columns, strict=True)
        ]
