"""CPU seconds of one step against n: the preconditioned step beside a dense solve of the same system."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from curvlab.lab import Run
from curvlab.linalg import LinearOperator
from curvlab.optim import UniformDirection

NUM_REPEATS = 5


class _Diagonal(LinearOperator):
    """diag(1, ..., 2): its product costs next to nothing, so that the step itself is timed."""

    def __init__(self, size: int) -> None:
        super().__init__(size, dtype=torch.float64, device="cpu")
        self.scale = torch.linspace(1, 2, size, dtype=torch.float64)

    def matmat(self, vectors: Tensor) -> Tensor:
        return self.scale[:, None] * vectors


def cost_rows(run: Run, cfg: DictConfig) -> list[dict[str, Any]]:
    """Return the shortest of a few steps for each n and number of directions, and of dense solves where they fit.

    Timings: no repetition gives the same numbers, so they are in a file of their own.
    """
    rows = []
    for size in run.progress(list(cfg.cost_sizes), "seconds per step"):
        for count in (1, 4):
            x = nn.Parameter(torch.ones(size, dtype=torch.float64))
            optimizer = UniformDirection(
                [x], _Diagonal(size), alpha=1.0, num_directions=count, generator=run.generator("cost", size)
            )
            x.grad = torch.ones_like(x)
            rows.append({"n": size, "method": f"step, m = {count}", "seconds": _shortest(optimizer.step)})
        if size <= cfg.largest_dense:
            generator = run.generator("dense", size)
            matrix = torch.randn(size, size, dtype=torch.float64, generator=generator) + size * torch.eye(size)
            ones = torch.ones(size, dtype=torch.float64)
            seconds = _shortest(partial(torch.linalg.solve, matrix, ones))
            rows.append({"n": size, "method": "dense solve", "seconds": seconds})
    return rows


def _shortest(action: Callable[[], object]) -> float:
    times = []
    for _ in range(NUM_REPEATS):
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return min(times)
