"""Units of work on the spectrum of a task's Gauss-Newton matrix.

A unit's key holds the task and the settings, not the target: whichever target comes first computes it.
"""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from curvlab.curvature import GaussNewtonOperator, exact_traces, has_exact_traces
from curvlab.lab import unit
from curvlab.lab.runs.over_ranks import launched, operator_on_ranks
from curvlab.problem import stack
from curvlab.solvers import measure_constant
from curvlab.spectrum import frobenius_norm, hutchinson_trace, mean_eigenvalue, sketch_eigenvalues, top_eigenvalues
from experiments.shared.task import TrainedTask

SEQUENCES_AT_A_TIME = 16  # of a language model: logits of large vocabularies fill the memory
EXAMPLES_AT_A_TIME = 512
LARGE = 10_000_000  # parameters, from which on examples at a time are as many as fit into free memory
TRACE_CHUNK = 32  # columns
SKETCH_CHUNK = 250  # columns; the sketch's random numbers are drawn again for every chunk


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


@unit("lissa/trace_by_forms", version=1, about="trace by quadratic forms of {seed_name}")
def trace_by_forms(task: TrainedTask, /, *, num_probes: int, batch_size: int, **_: Any) -> dict[str, Any]:
    """Return tr(G)/P by forward passes alone, a new batch for each normal vector, as Table 1 has it."""
    estimate = mean_eigenvalue(
        gauss_newton(task),
        num_probes=num_probes,
        batch_size=batch_size,
        distribution="gaussian",
        generator=task.generator("forms"),
    )
    task.run.add_matvecs(estimate.num_matvecs)
    return {"value": estimate.value, "stderr": estimate.stderr}


def sketch(
    task: TrainedTask,
    *,
    size: int,
    per_tensor: bool = False,
    repetition: int = 0,
    chunk_size: int = SKETCH_CHUNK,
) -> dict[str, Any]:
    """Return λmax by a Gaussian sketch, d = size, dense or per tensor: value, stderr, bias taken off, rows."""
    chunk = {} if chunk_size == SKETCH_CHUNK else {"chunk_size": chunk_size}
    return _sketch(task, size=size, per_tensor=per_tensor, repetition=repetition, **chunk)


@unit("lissa/sketch", version=1, about="sketch of {seed_name}, d = {size}, per tensor: {per_tensor}, {repetition}")
def _sketch(
    task: TrainedTask,
    /,
    *,
    size: int,
    per_tensor: bool,
    repetition: int,
    chunk_size: int = SKETCH_CHUNK,
    **_: Any,
) -> dict[str, Any]:
    found = sketch_eigenvalues(
        gauss_newton(task),
        sketch_size=size,
        tensor_sizes=task.tensor_sizes if per_tensor else None,
        chunk_size=chunk_size,
        generator=task.run.generator("sketch", task.seed_name, size, str(per_tensor), repetition),
    )
    task.run.add_matvecs(found.num_matvecs)
    value, stderr, bias = (float(each[0]) for each in (found.values, found.stderr, found.bias))
    return {"value": value, "stderr": stderr, "bias": bias, "rows": found.num_matvecs}


def frobenius(
    task: TrainedTask, *, num_pairs: int, batch_size: int | None, chunk_size: int = TRACE_CHUNK
) -> dict[str, Any]:
    """Return ‖G‖_F from pairs of independent batches (App. C), or with batch_size=None from all the data."""
    chunk = {} if chunk_size == TRACE_CHUNK else {"chunk_size": chunk_size}
    return _frobenius(task, num_pairs=num_pairs, batch_size=batch_size, **chunk)


@unit("lissa/frobenius", version=1, about="Frobenius norm of {seed_name}")
def _frobenius(
    task: TrainedTask, /, *, num_pairs: int, batch_size: int | None, chunk_size: int = TRACE_CHUNK, **_: Any
) -> dict[str, Any]:
    norm = frobenius_norm(
        gauss_newton(task),
        num_matvecs=num_pairs if batch_size is None else 2 * num_pairs,
        batch_size=batch_size,
        chunk_size=chunk_size,
        distribution="gaussian",
        generator=task.run.generator("frobenius", task.seed_name),
    )
    task.run.add_matvecs(norm.num_matvecs)
    return {"value": norm.value, "stderr": norm.stderr}


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


def drawn_examples(task: TrainedTask, num: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return `num` training examples drawn at random, without repeats, as inputs and targets."""
    indices = torch.randperm(task.num_train, generator=generator)[:num]
    return stack(task.train, indices)
