"""One run on the processes of `torchrun`: all compute, rank 0 keeps the store, writes and talks."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    import torch
    from torch import nn


def launched() -> bool:
    """Return whether `torchrun` started this process as one of several.

    As curvlab.parallel.launched, which comes with torch: a target asks before it loads anything.
    """
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def is_first() -> bool:
    """Return whether this process is rank 0, or the only one."""
    return not launched() or os.environ["RANK"] == "0"


def together() -> AbstractContextManager[Any]:
    """Join the other processes, if there are any: an error of one ends all with its message."""
    if not launched():
        return nullcontext()
    from curvlab.parallel import joined

    return joined(timeout_seconds=3600.0)  # rank 0 may draw figures, or write to a slow disk, meanwhile


def quiet(cfg: DictConfig) -> DictConfig:
    """Return the config of this process: other ranks than 0 report no progress and record nothing."""
    return cfg if is_first() else silenced(cfg)


def silenced(cfg: DictConfig) -> DictConfig:
    """Return the config of a run that reports no progress and records nothing."""
    own = cfg.copy()
    OmegaConf.set_struct(own, False)
    own.progress, own.tracker = False, {"name": "none"}
    return own


def operator_on_ranks(
    build: Callable[..., Any],
    model: nn.Module,
    loss: nn.Module,
    data: Any,
    *,
    spread: bool = True,
    **settings: Any,
) -> Any:
    """Return the operator build(model, loss, data, ...); under torchrun of data that the ranks share.

    A model that `shard` has cut up gives a ShardedGaussNewtonOperator, others a DataParallelOperator. Without
    `spread` every rank holds the same data: the same operator on all, of a sharded model their mean.
    """
    if launched():
        from curvlab import parallel

        own = parallel.Ranks.current().share(data) if spread else data
        if parallel.is_sharded(model):
            return parallel.ShardedGaussNewtonOperator(model, loss, own, **settings)
        if spread:
            return parallel.DataParallelOperator(build(model, loss, own, **settings))
    return build(model, loss, data, **settings)


def shard(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to the device; under torchrun each rank is left with its part of every parameter."""
    if not launched():
        return model.to(device)
    from curvlab.parallel import shard_parameters

    return shard_parameters(model, device=device)
