"""How much memory a computation holds at once."""

from __future__ import annotations

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class Memory(TorchDispatchMode):
    """Watches what every kernel returns, autograd's and forward mode's included.

    `largest`: elements of the largest tensor; `peak`: bytes of all tensors made inside that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.peak = 0
        self.alive = WeakIdKeyDictionary()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.numel())
                self.alive[leaf.untyped_storage()] = leaf.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(self.alive.values()))
        return result
