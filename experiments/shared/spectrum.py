"""Units of work on the spectrum of a task's Gauss-Newton matrix.

A unit's key holds the task and the settings, not the target: whichever target comes first computes it.
"""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig

from curvlab.curvature import GaussNewtonOperator, exact_traces, has_exact_traces
from curvlab.lab import unit
from curvlab.lab.runs.over_ranks import launched, operator_on_ranks
from curvlab.solvers import measure_constant
from curvlab.spectrum import hutchinson_trace, top_eigenvalues
from experiments.shared.task import TrainedTask

SEQUENCES_AT_A_TIME = 16  # of a language model: logits of large vocabularies fill the memory
EXAMPLES_AT_A_TIME = 512
LARGE = 10_000_000  # parameters, from which on examples at a time are as many as fit into free memory
TRACE_CHUNK = 32  # columns


def gauss_newton(task: TrainedTask, *, spread: bool = True) -> GaussNewtonOperator:
    """Return the mean Gauss-Newton matrix over the task's training examples, or their tokens.

    Its examples are spread over the processes of torchrun, where there are several; or each has all of them.
    """
    size = examples_at_a_time(task)
    operator: GaussNewtonOperator = operator_on_ranks(
        GaussNewtonOperator, task.model, task.loss, task.train, spread=spread, batch_size=size
    )
    return operator


def examples_at_a_time(task: TrainedTask) -> int | None:
    """Return it for whole products; None, of a large network: as many as fit into free memory."""
    if task.num_parameters >= LARGE and not launched():
        return None
    return SEQUENCES_AT_A_TIME if task.is_language else EXAMPLES_AT_A_TIME


def trace(task: TrainedTask, cfg: DictConfig) -> dict[str, Any]:
    """Return `trace`, tr(G), and `trace_stderr`: exact, from all examples one by one, where that costs no more.

    Else by Hutchinson's probes. Exact traces take 1 + C forwards of the data, a probe five, and are to be had for
    networks of linear and convolutional layers.
    """
    chunk_size = cfg.spectrum.get("chunk_size", TRACE_CHUNK)
    return _trace(task, trace_probes=cfg.spectrum.trace_probes, chunk_size=chunk_size)


@unit("spectrum/trace", version=2, about="trace of {seed_name}")
def _trace(task: TrainedTask, /, *, trace_probes: int, chunk_size: int, **_: Any) -> dict[str, Any]:
    operator = gauss_newton(task)
    cheap = not task.is_language and 1 + task.splits.num_outputs <= 5 * trace_probes
    if cheap and has_exact_traces(operator):
        return {"trace": float(exact_traces(operator).mean()), "trace_stderr": 0.0}
    generator = task.generator("trace")
    found = hutchinson_trace(operator, num_matvecs=trace_probes, chunk_size=chunk_size, generator=generator)
    task.run.add_matvecs(found.num_matvecs)
    return {"trace": found.value, "trace_stderr": found.stderr}


def spectrum(task: TrainedTask, cfg: DictConfig) -> dict[str, Any]:
    """Return `trace` and `largest_eigenvalue`, λmax by Lanczos, with their errors."""
    return trace(task, cfg) | _largest(task, rtol=cfg.spectrum.rtol)


@unit("spectrum/largest", version=1, about="largest eigenvalue of {seed_name}")
def _largest(task: TrainedTask, /, *, rtol: float, **_: Any) -> dict[str, Any]:
    largest = top_eigenvalues(gauss_newton(task), 1, rtol=rtol, generator=task.generator("lanczos"))
    task.run.add_matvecs(largest.num_matvecs)
    return {
        "largest_eigenvalue": float(largest.values[0]),
        "largest_eigenvalue_error": float(largest.error_bounds[0]),
    }


@unit("lissa/constant", version=1, about="constant of condition C.1 of {seed_name}")
def constants(
    task: TrainedTask,
    /,
    *,
    trace: float,
    num_leading: int,
    num_random: int,
    num_examples: int,
    num_batches: int,
    batch_size: int,
    **_: Any,
) -> dict[str, Any]:
    """Return C of condition C.1 by direction: leading eigenvectors, normal vectors, where an example points.

    In units of |B| in predictions: for language models a batch of b sequences has b times their length. All are
    lower bounds of the constant that the condition needs, which is the supremum over all directions.
    """
    operator, generator = gauss_newton(task), task.generator("constant")
    leading = top_eigenvalues(operator, num_leading, rtol=0.03, generator=generator)
    random = operator.randn(num_random, generator)
    # An iterator, of which max() holds two: a product may have gigabytes.
    pointed = (operator.sample(1, generator) @ random[:, :1] for _ in range(num_examples))
    longest = max(pointed, key=lambda product: float(operator.norm(product)))
    directions = torch.cat([leading.vectors, random, longest], dim=1)
    # Of large networks one direction after the other, on the same batches.
    width, state = 1 if task.num_parameters >= LARGE else directions.shape[1], generator.get_state()
    sizes: dict[str, Any] = {"trace": trace, "num_batches": num_batches, "batch_size": batch_size}
    measured = [
        measure_constant(operator, part, **sizes, generator=generator.set_state(state))
        for part in directions.split(width, dim=1)
    ]
    found = torch.cat(measured) * task.predictions_per_example
    task.run.add_matvecs(leading.num_matvecs + num_examples + num_batches * len(found))
    return {
        "leading": found[:num_leading].tolist(),
        "random": found[num_leading:-1].tolist(),
        "example": float(found[-1]),
        "largest": float(found.max()),
    }
