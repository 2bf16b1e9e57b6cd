"""The store of a run on the processes of `torchrun`: rank 0 keeps the files, all have what is in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from curvlab.lab.runs.over_ranks import launched
from curvlab.lab.runs.store import Store

if TYPE_CHECKING:
    from curvlab.parallel import Ranks

_COMPUTE = "compute"


def store_of(cfg: DictConfig) -> Store:
    """Return the store that a config names, shared where several processes run."""
    if not launched():
        return Store(cfg.store.root, force=cfg.force)
    from curvlab.parallel import Ranks

    return SharedStore(cfg.store.root, force=cfg.force, ranks=Ranks.current())


class SharedStore(Store):
    """A store whose files rank 0 reads and writes; all ranks have its payloads, and compute what it has not.

    All ranks ask for the same units in the same order.

    Args:
        root: see Store.
        force: see Store.
        ranks: who works together.
    """

    def __init__(self, root: str | Path, *, force: bool = False, ranks: Ranks) -> None:
        super().__init__(root, force=force)
        self.ranks = ranks

    def get_or_compute(
        self, name: str, config: Mapping[str, Any], compute: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return rank 0's payload: from its disk, or as it is after all ranks have computed."""
        if self.ranks.is_first:

            def with_all() -> dict[str, Any]:
                self.ranks.object_from_first(_COMPUTE)
                return compute()

            return self.ranks.object_from_first(super().get_or_compute(name, config, with_all))
        told: Any = self.ranks.object_from_first(None)
        if told != _COMPUTE:
            self.hits += 1
            return told
        compute()
        self.misses += 1
        return self.ranks.object_from_first(told)

    def unfinished(self, name: str, config: Mapping[str, Any], made_by: Mapping[str, Any]) -> Path:
        """Return the same folder on all ranks; each has its own in it."""
        folder = super().unfinished(name, config, made_by) if self.ranks.is_first else None
        return Path(self.ranks.object_from_first(str(folder))) / f"rank-{self.ranks.rank}"
