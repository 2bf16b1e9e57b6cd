"""Bytes that the units of work of a task hold at their peak, and on which machine they fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from curvlab.lab.target.plan.sizes import Sizes, in_bytes

# As experiments.shared.spectrum takes them where a config says nothing.
TRACE_CHUNK, SKETCH_CHUNK = 32, 250
# Vectors that are held beside a product with one: see the docstrings of the functions that compute them.
SKETCH_CHUNK_COPIES, SKETCH_ROWS, LANCZOS_BLOCKS = 6, 5, 9
GPU = 80e9


def unit_peaks(settings: Mapping[str, Any], sizes: Sizes) -> dict[str, float]:
    """Return bytes of the trace, λmax, the sketch and C, with the least of vectors that each can do with.

    More memory, and Lanczos restarts less often, a sketch draws its rows less often: what is free is used.
    """
    vectors: dict[str, float] = {}
    if spectrum := settings.get("spectrum"):
        if "trace_probes" in spectrum:
            vectors["trace"] = 3 * min(spectrum.get("chunk_size", TRACE_CHUNK), spectrum["trace_probes"])
        if _asks_for_largest(settings):
            vectors["lambda_max"] = LANCZOS_BLOCKS
    if sketch := settings.get("sketch"):
        chunk = min(sketch.get("chunk_size", SKETCH_CHUNK), sketch.get("size", SKETCH_CHUNK))
        vectors["sketch"] = SKETCH_ROWS if chunk == 1 else SKETCH_CHUNK_COPIES * chunk
    # lissa-tab3 inherits the tasks of lissa-tab1, and with them settings of C, which it does not measure.
    if (constant := settings.get("constant")) and "frobenius" not in settings:
        leading = constant["num_leading"]
        vectors["C"] = max(LANCZOS_BLOCKS * leading, leading + constant["num_random"] + 1 + 5)
    if (norm := settings.get("frobenius")) and "num_probes" in norm:
        vectors["Frobenius norm"] = 3 * min(norm.get("chunk_size", TRACE_CHUNK), norm["num_probes"])
    if (pairs := settings.get("gradients")) and "num_pairs" in pairs:
        vectors["gradients"] = 6 * pairs["num_pairs"]  # of both examples, scaled, and stacked
    vector = sizes.num_parameters * sizes.itemsize
    return {unit: sizes.peak_bytes(1) + number * vector for unit, number in vectors.items()}


def _asks_for_largest(settings: Mapping[str, Any]) -> bool:
    """Return whether λmax is measured: to be shown, or since a config leaves settings open that follow from it."""
    lissa, check = settings.get("lissa"), settings.get("lissa_check")
    if lissa is None and "lissa_check" not in settings:
        return True
    steps = [] if lissa is None else [lissa["step_size"], lissa["batch_size"], lissa["num_steps"]]
    return check is not None or None in (settings.get("damping"), *steps)


def drawn_numbers(settings: Mapping[str, Any], sizes: Sizes, *, memory: float) -> float:
    """Return how many normals sketches draw: their rows, and all once more for every group of products held.

    Of a table that has both forms (`frobenius`) those of the per-tensor sketch too, and those of gradients. Where
    vectors are cut up over processes, each draws all of them.

    Args:
        settings: of the task.
        sizes: of its network.
        memory: bytes of all devices, of which 80 % of what parameters leave hold vectors.
    """
    sketch = settings["sketch"]
    chunk = sketch.get("chunk_size", SKETCH_CHUNK)
    free = 0.8 * (memory - sizes.total_parameters * sizes.itemsize)
    held = max(1, int((free / (sizes.num_parameters * sizes.itemsize) - 3) / 2))
    rows = _drawn_rows(sketch["size"], 1, chunk, held)
    if "frobenius" in settings:
        rows += _drawn_rows(math.ceil(sketch["size"] / sizes.num_tensors), sizes.num_tensors, chunk, held)
    if (pairs := settings.get("gradients")) and "num_sketches" in pairs:
        rows += pairs["num_sketches"] * pairs["sketch_size"]
    return rows * sizes.num_parameters


def _drawn_rows(size: int, num_tensors: int, chunk: int, held: int) -> float:
    """Return how many rows of Φ, of P numbers each, a sketch of `size` rows for each tensor draws in all."""
    if chunk > 1:
        return size * (1 + size / min(chunk, size))
    groups = size * num_tensors / min(size * num_tensors, held)
    return size * (num_tensors + (max(1.0, groups / 2) if num_tensors == 1 else groups))


def machines(peak: float) -> int:
    """Return the fewest GPUs of the usual numbers that hold a peak; 0 where 8 do not."""
    return next((count for count in (1, 4, 8) if peak <= count * GPU), 0)


def fits(peak: float) -> str:
    """Return the smallest of the usual machines; over several GPUs parameters and vectors are cut up."""
    count = machines(peak)
    if count == 0:
        return "more than 8 x 80 GB"
    return f"{count} x 80 GB" if count > 1 else "one GPU of 80 GB"


def in_words(peaks: Mapping[str, float]) -> str:
    """Return the peaks in one line, with the machine that the largest asks for."""
    parts = ", ".join(f"{unit} {in_bytes(peak)}" for unit, peak in peaks.items())
    return f"at least: {parts}; fits {fits(max(peaks.values()))}"
