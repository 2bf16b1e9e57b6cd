"""Conditions of a timing: the clock, the number of threads, the load of the machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def work_clock(device: torch.device) -> Callable[[], float]:
    """Return a clock of seconds: of this process's CPUs, which others do not lengthen; on a GPU `wall_clock`."""
    return wall_clock(device) if device.type == "cuda" else time.process_time


def wall_clock(device: torch.device) -> Callable[[], float]:
    """Return a clock of elapsed seconds; on a GPU it is read when all that was asked for is done."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


@contextmanager
def kernel_threads(count: int) -> Iterator[None]:
    """Let kernels have so many threads, those that are compiled inside too."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_average() -> float | None:
    """Return how many processes wanted a core in the last minute, on average; None where nobody counts them."""
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
