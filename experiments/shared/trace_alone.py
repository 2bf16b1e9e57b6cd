"""tr(G) without λmax, for settings that a config gives: a basis for Lanczos is dear for large networks."""

from __future__ import annotations

import math
from typing import Any

from omegaconf import DictConfig

from curvlab.lab import Run
from curvlab.spectrum import hutchinson_trace
from experiments.shared.spectrum import TRACE_CHUNK, gauss_newton
from experiments.shared.task import TrainedTask


def trace_alone(run: Run, task: TrainedTask, cfg: DictConfig) -> dict[str, Any]:
    """Return what `spectrum` does from the same probes, λmax and its error as nan."""
    chunk_size = cfg.spectrum.get("chunk_size", TRACE_CHUNK)

    def compute() -> dict[str, Any]:
        generator = run.generator("trace", task.seed_name)
        trace = hutchinson_trace(
            gauss_newton(task),
            num_matvecs=cfg.spectrum.trace_probes,
            chunk_size=chunk_size,
            generator=generator,
        )
        run.add_matvecs(trace.num_matvecs)
        return {"trace": trace.value, "trace_stderr": trace.stderr}

    key = task.key | {"trace_probes": cfg.spectrum.trace_probes, "chunk_size": chunk_size}
    found = run.unit("spectrum/trace", key, compute, version=1, about=f"trace of {task.label}")
    return found | {"largest_eigenvalue": math.nan, "largest_eigenvalue_error": math.nan}
