"""Conditions of a timing: clocks, memory, threads, the load of the machine, and the products of a step alone."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Compute = Callable[[], Any]


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


class LayerProducts:
    """The matrix products of a training step of K copies of an MLP, without anything around them.

    Of one layer and batch (B, I) x (I, O) after the other: outputs, weight gradient, and, but for the first layer,
    input gradient; (K, B, I) x (K, I, O) for all copies. The first layer's inputs are shared by all of them.
    """

    def __init__(self, model: nn.Module, batch_size: int, num_copies: int = 1) -> None:
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        sizes = [linear[0].in_features, *(layer.out_features for layer in linear)]
        like = linear[0].weight
        generator = torch.Generator(like.device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)

        self.inputs = draw(batch_size, sizes[0])
        self.values = [draw(num_copies, batch_size, size) for size in sizes[1:]]
        self.weights = [draw(num_copies, a, b) for a, b in pairwise(sizes)]

    def in_a_loop(self) -> None:
        """Copy by copy."""
        for k in range(len(self.weights[0])):
            self._of([value[k] for value in self.values], [weight[k] for weight in self.weights])

    def batched(self) -> None:
        """All copies in one product."""
        self._of(self.values, self.weights)

    def _of(self, values: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        for index, (before, weight, after) in enumerate(
            zip((self.inputs, *values), weights, values, strict=False)
        ):
            before @ weight
            before.mT @ after
            if index > 0:
                after @ weight.mT


def load_average() -> float | None:
    """Return how many processes wanted a core in the last minute, on average; None where nobody counts them."""
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None


def measure_times(
    methods: Mapping[str, Compute], *, num_rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Return seconds of every round by method; they take turns, so that a busy machine slows all of them."""
    times: dict[str, list[float]] = {method: [] for method in methods}
    now = work_clock(device)
    for _ in range(num_rounds):
        for method, compute in methods.items():
            start = now()
            compute()
            times[method].append(now() - start)
    return times


@contextmanager
def searched_once() -> Iterator[None]:
    """Leave what there is out of the garbage collections of `measure_peak`: each would search all of it."""
    gc.collect()
    frozen_before = gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen_before:
            gc.unfreeze()


def measure_peak(compute: Compute, device: torch.device) -> float:
    """Return by how many MiB memory rises in a call, its result included; nan where the system does not tell."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        compute()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    return_freed_memory()  # what the allocator keeps from earlier calls would hide the rise
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM (Linux, proc(5))
        before = _status("VmRSS")
        compute()
        return (_status("VmHWM") - before) / 2**10
    except OSError:
        return float("nan")


def return_freed_memory() -> None:
    """Give back what glibc keeps of freed memory: megabytes that are freed and asked for again pile up."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _status(field: str) -> int:
    """Return a field of /proc/self/status in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))
