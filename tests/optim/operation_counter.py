"""What operations touch, counted: the cost of a step without a clock."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Counter(TorchDispatchMode):
    """Entries of all tensors that operations read and write, and the largest tensor among them."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        self.entries += sum(sizes)
        self.largest = max([self.largest, *sizes])
        return result
