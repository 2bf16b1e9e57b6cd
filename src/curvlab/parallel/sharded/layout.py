"""Which numbers of a flat vector a rank holds, when every parameter is cut along its first axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from curvlab.ranks import Ranks

# Random numbers drawn at once; a multiple of 16, see `randn`.
_DRAWN_AT_ONCE = 2**20


@dataclass(frozen=True)
class Piece:
    """One parameter, cut along axis 0 as FSDP2 and `torch.chunk` do: ceil(d / R) rows each, the last ones fewer.

    Attributes:
        shape: of the whole parameter, at least one axis.
        ranks: R and the number of this rank.
    """

    shape: torch.Size
    ranks: Ranks

    @property
    def rows(self) -> int:
        """D."""
        return self.shape[0]

    @property
    def row_size(self) -> int:
        """Numbers in one row."""
        return self.shape[1:].numel()

    @property
    def rows_each(self) -> int:
        """Rows of a full piece, which the others are padded to where they are exchanged."""
        return -(-self.rows // self.ranks.size)

    @property
    def own(self) -> slice:
        """This rank's numbers of the flattened parameter."""
        start, stop = (min(self.rows, (self.ranks.rank + i) * self.rows_each) * self.row_size for i in (0, 1))
        return slice(start, stop)

    @property
    def size(self) -> int:
        """How many this rank holds."""
        return self.own.stop - self.own.start


class ShardLayout:
    """The flat vector of all trainable parameters, of which rank r holds the r-th piece of each parameter.

    Attributes:
        pieces: one for each parameter, in named_parameters() order.
        num_parameters: P.
        num_rows: how many of them this rank holds.
    """

    def __init__(self, shapes: Sequence[torch.Size], ranks: Ranks) -> None:
        self.ranks = ranks
        self.pieces = tuple(Piece(shape, ranks) for shape in shapes)
        self.num_parameters = sum(shape.numel() for shape in shapes)
        self.num_rows = sum(piece.size for piece in self.pieces)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Each piece's place in this rank's part of the vector."""
        ends = tuple(accumulate(piece.size for piece in self.pieces))
        return tuple(slice(end - piece.size, end) for end, piece in zip(ends, self.pieces, strict=True))

    def own_part(self, vectors: Tensor) -> Tensor:
        """Return this rank's part of whole vectors, (P,) or (P, K)."""
        return torch.cat([vectors[place] for place in self._places()])

    def whole(self, vectors: Tensor) -> Tensor:
        """Return vectors of which every rank gives its part, (P_r,) or (P_r, K), whole on every rank."""
        parts = self.ranks.gather(vectors.cpu())
        whole = vectors.new_empty(self.num_parameters, *vectors.shape[1:])
        for rank, part in enumerate(parts):
            other = ShardLayout([piece.shape for piece in self.pieces], Ranks(rank, self.ranks.size))
            for place, target in zip(other._places(), other.slices, strict=True):
                whole[place] = part[target].to(whole)
        return whole

    def _places(self) -> Iterator[slice]:
        start = 0
        for piece in self.pieces:
            yield slice(start + piece.own.start, start + piece.own.stop)
            start += piece.shape.numel()

    def randn(self, num_columns: int, generator: torch.Generator | None, like: Tensor) -> Tensor:
        """Return this rank's part of the normals that `LinearOperator.randn` draws for one process, (P_r, K).

        All ranks draw all of them, some at a time. On a CPU torch.randn fills blocks of 16 numbers in their order,
        the last block anew where it is not whole, so that drawing in multiples of 16 gives the numbers of one
        call.
        """
        source = generator.device if generator is not None else torch.device("cpu")
        total, places = num_columns * self.num_parameters, list(self._places())
        own = torch.empty(num_columns, self.num_rows, dtype=like.dtype, device=like.device)
        start = 0
        while start < total:
            # The last call takes what is left with it: alone it could be too short to be filled in the same way.
            stop = total if total - start < 2 * _DRAWN_AT_ONCE else start + _DRAWN_AT_ONCE
            drawn = torch.randn(stop - start, generator=generator, dtype=like.dtype, device=source)
            for column in range(start // self.num_parameters, -(-stop // self.num_parameters)):
                origin = column * self.num_parameters
                for place, target in zip(places, self.slices, strict=True):
                    low, high = max(place.start, start - origin), min(place.stop, stop - origin)
                    if low < high:
                        at = target.start + low - place.start
                        own[column, at : at + high - low] = drawn[low + origin - start : high + origin - start]
            start = stop
        return own.T
