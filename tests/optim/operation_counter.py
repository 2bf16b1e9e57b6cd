"""What operations touch, counted: the cost of a step without a clock."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Counter(TorchDispatchMode):
    """Calls, entries of all tensors that they read and write, the largest among them, and single numbers read."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.entries = self.largest = self.host_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        self.calls += 1
        self.entries += sum(sizes)
        self.host_reads += func is torch.ops.aten._local_scalar_dense.default
        self.largest = max([self.largest, *sizes])
        return result
