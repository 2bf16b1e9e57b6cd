"""Units of work of Tables 1 and 3: traces by forward passes, sketched eigenvalues, Frobenius norms."""

from __future__ import annotations

from typing import Any

from curvlab.lab import unit
from curvlab.spectrum import frobenius_norm, mean_eigenvalue, sketch_eigenvalues
from experiments.shared.spectrum import TRACE_CHUNK, gauss_newton
from experiments.shared.task import TrainedTask

SKETCH_CHUNK = 250  # columns; the sketch's random numbers are drawn again for every chunk


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
