"""The processes that work on one problem, and the few ways in which they exchange numbers.

Every layer may import this module; `curvlab.parallel` starts the processes and spreads work over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

SAME_SEEDS = "the numbers that they draw: pass generators with the same seed on every rank"

Value = TypeVar("Value")


@dataclass(frozen=True)
class Ranks:
    """All processes of the default process group (`curvlab.parallel.joined`), or this process alone.

    All methods but `interval` and `share` are collective: every rank calls them, in the same order.

    Attributes:
        rank: number of this process, from 0.
        size: R, how many there are.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> Ranks:
        """Return the ranks of the default process group; this process alone where there is none."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone writes files and talks."""
        return self.rank == 0

    # ------------------------------------------------------------------------------------- numbers
    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, the same bits on every rank; `tensor` may be overwritten.

        Half precision is summed in fp32.
        """
        if self.size == 1:
            return tensor
        wide = tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
        # Column by column, as products of operators lie in memory: on every rank, however its own tensor lies.
        by_column = wide.ndim == 2
        sent = (wide.T if by_column else wide).contiguous()
        dist.all_reduce(sent)
        return (sent.T if by_column else sent).to(tensor.dtype)

    def from_first(self, tensor: Tensor) -> Tensor:
        """Return rank 0's tensor, of the same shape: what decisions rest on, so that no rank decides alone."""
        if self.size == 1:
            return tensor
        sent = tensor.clone(memory_format=torch.contiguous_format)
        dist.broadcast(sent, 0)
        return sent

    def object_from_first(self, value: Value) -> Value:
        """Return rank 0's object (numbers, strings, tensors on the CPU; pickled)."""
        if self.size == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, 0)
        return box[0]

    def gather(self, value: Value) -> list[Value]:
        """Return the objects of all ranks in their order (pickled: for small ones)."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def agree(self, numbers: Tensor, what: str) -> None:
        """Raise a ValueError on every rank unless all hold the same numbers; `what` says what to change."""
        if self.size == 1:
            return
        own = numbers.detach().double().flatten().cpu()
        extremes = torch.stack([own, -own])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        if not bool(torch.equal(extremes[0], -extremes[1])):
            raise ValueError(f"the ranks differ in {what}")

    # ---------------------------------------------------------------------------------------- data
    def interval(self, length: int) -> range:
        """Return this rank's share of `length` things in a row: sizes differ by one at most."""
        return range(self.rank * length // self.size, (self.rank + 1) * length // self.size)

    def share(self, data: Any) -> Any:
        """Return this rank's share of tensors (a pair, a mapping), a map-style data set, or a list of batches.

        Shares lie one behind the other, so that together they are `data` in its order; examples of data sets are
        read when they are needed, by the rank whose they are.
        """
        if self.size == 1:
            return data
        whole = data.tensors if isinstance(data, TensorDataset) else data
        if isinstance(whole, DataLoader | IterableDataset) or not hasattr(whole, "__len__"):
            raise TypeError(
                f"a {type(whole).__name__} cannot be cut into shares: give every rank a loader of its own "
                "examples, or pass the data set"
            )
        pair = isinstance(whole, tuple | list) and len(whole) == 2 and isinstance(whole[1], Tensor)
        tensors = list(whole.values()) if isinstance(whole, Mapping) else [whole[1]] if pair else []
        length = len(tensors[0]) if tensors else len(whole)
        if length < self.size:
            raise ValueError(f"{length} examples or batches cannot be shared by {self.size} ranks: start fewer")
        mine = self.interval(length)
        if tensors:
            return _rows(whole, slice(mine.start, mine.stop))
        if isinstance(whole, list | tuple):
            return list(whole[mine.start : mine.stop])
        return Subset(whole, mine)


def _rows(tensors: Any, rows: slice) -> Any:
    """Return some rows of a tensor, or of each in a pair or a mapping."""
    if isinstance(tensors, Mapping):
        return {name: tensor[rows] for name, tensor in tensors.items()}
    return tensors[rows] if isinstance(tensors, Tensor) else tuple(_rows(part, rows) for part in tensors)
