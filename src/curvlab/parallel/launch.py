"""Join the processes that `torchrun` has started, and end together when one of them fails."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from curvlab.ranks import Ranks

_FAILED = "curvlab/failed"
_EXIT_FAILED = 1


def launched() -> bool:
    """Return whether `torchrun` (or another launcher that sets its variables) started this as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@contextmanager
def joined(*, timeout_seconds: float = 600.0) -> Iterator[Ranks]:
    """Enter the process group of `torchrun`, and leave it at the end; alone, where there is no launcher.

        with joined() as ranks:
            operator = DataParallelOperator(GaussNewtonOperator(model, loss, ranks.share(train_set)))

    gloo on CPUs, NCCL on GPUs (each process takes the GPU of its LOCAL_RANK). Outside `joined` on a group that
    exists already, this one is used and left alone.

    A rank that fails leaves its message with the others and exits with status 1. torchrun then ends them; without
    it they end when they next exchange numbers, after `timeout_seconds` at the latest, which must be longer than
    any rank computes alone. Ranks that end because of another one name it and its message, not their broken
    connection.

    Args:
        timeout_seconds: how long a rank waits for the others.
    """
    if dist.is_initialized() or not launched():
        yield Ranks.current()
        return
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    wait = timedelta(seconds=timeout_seconds)
    store, rank, size = next(dist.rendezvous("env://", timeout=wait))
    dist.init_process_group(
        backend, store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=wait
    )
    try:
        yield Ranks.current()
    except Exception as error:
        _leave_message(store, error)
        # At once: the clean-up of a group whose other members wait in an exchange would wait with them.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_EXIT_FAILED)
    dist.barrier()
    dist.destroy_process_group()


def _leave_message(store: dist.Store, error: Exception) -> None:
    """Print what happened to this rank, or, where another one failed before, what happened to that."""
    own = f"rank {dist.get_rank()} of {dist.get_world_size()}: {type(error).__name__}: {error}"
    try:
        first = store.compare_set(_FAILED, "", own).decode()
    except RuntimeError:  # who kept the store is gone
        first = own
    if first != own:
        print(f"rank {dist.get_rank()} ends because of {first}", file=sys.stderr)
        return
    traceback.print_exception(error)
    get_error_handler().record_exception(error)  # for torchrun's own summary
    print(f"{own}; all ranks end.", file=sys.stderr)
