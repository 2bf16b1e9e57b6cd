"""One run on the processes of `torchrun`: all compute, rank 0 keeps the store, writes and talks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from curvlab.runs.store import Store

if TYPE_CHECKING:
    from curvlab.distributed import Ranks

_COMPUTE = "compute"


def launched() -> bool:
    """Return whether `torchrun` started this process as one of several.

    As curvlab.distributed.launched, which comes with torch: a target asks before it loads anything.
    """
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def is_first() -> bool:
    """Return whether this process is rank 0, or the only one."""
    return not launched() or os.environ["RANK"] == "0"


@contextmanager
def together() -> Iterator[None]:
    """Join the other processes, if there are any: an error of one ends all with its message."""
    with nullcontext() if not launched() else _joined():
        yield


def _joined() -> Any:
    from curvlab.distributed import joined

    return joined(timeout_seconds=3600.0)  # rank 0 may draw figures, or write to a slow disk, meanwhile


def quiet(cfg: DictConfig) -> DictConfig:
    """Return the config of this process: other ranks than 0 report no progress and record nothing."""
    if is_first():
        return cfg
    own = cfg.copy()
    OmegaConf.set_struct(own, False)
    own.progress, own.tracker = False, {"name": "none"}
    return own


def spread_operator(
    build: Callable[..., Any], model: nn.Module, loss: nn.Module, data: Any, **settings: Any
) -> Any:
    """Return the operator build(model, loss, data, ...); under torchrun each rank has its share of the data.

    A model that `shard` has cut up gives a ShardedGaussNewtonOperator, others a DataParallelOperator.
    """
    if not launched():
        return build(model, loss, data, **settings)
    from curvlab import distributed

    share = distributed.Ranks.current().share(data)
    if distributed.is_sharded(model):
        return distributed.ShardedGaussNewtonOperator(model, loss, share, **settings)
    return distributed.DataParallelOperator(build(model, loss, share, **settings))


def replicated_operator(
    build: Callable[..., Any], model: nn.Module, loss: nn.Module, data: Any, **settings: Any
) -> Any:
    """Return the operator build(model, loss, data, ...) of data that every rank holds: the same on all of them."""
    if launched():
        from curvlab import distributed

        if distributed.is_sharded(model):  # the mean over the ranks' equal examples
            return distributed.ShardedGaussNewtonOperator(model, loss, data, **settings)
    return build(model, loss, data, **settings)


def shard(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to the device; under torchrun each rank is left with its part of every parameter."""
    if not launched():
        return model.to(device)
    from curvlab.distributed import shard_parameters

    return shard_parameters(model, device=device)


def store_of(cfg: DictConfig) -> Store:
    """Return the store that a config names, shared where several processes run."""
    if not launched():
        return Store(cfg.store.root, force=cfg.force)
    from curvlab.distributed import Ranks

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
