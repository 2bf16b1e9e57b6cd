"""Bytes that the units of work of a task hold at their peak, and on which machine they fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.target.plan.sizes import Sizes, in_bytes

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
        vectors["lambda_max"] = LANCZOS_BLOCKS
    if sketch := settings.get("sketch"):
        chunk = min(sketch.get("chunk_size", SKETCH_CHUNK), sketch.get("size", SKETCH_CHUNK))
        vectors["sketch"] = SKETCH_ROWS if chunk == 1 else SKETCH_CHUNK_COPIES * chunk
    if constant := settings.get("constant"):
        leading = constant["num_leading"]
        vectors["C"] = max(LANCZOS_BLOCKS * leading, leading + constant["num_random"] + 1 + 5)
    if (norm := settings.get("frobenius")) and "num_probes" in norm:
        vectors["Frobenius norm"] = 3 * min(norm.get("chunk_size", TRACE_CHUNK), norm["num_probes"])
    if (pairs := settings.get("gradients")) and "num_pairs" in pairs:
        vectors["gradients"] = 6 * pairs["num_pairs"]  # of both examples, scaled, and stacked
    vector = sizes.num_parameters * sizes.itemsize
    return {unit: sizes.peak_bytes(1) + number * vector for unit, number in vectors.items()}


def drawn_numbers(settings: Mapping[str, Any], sizes: Sizes, *, memory: float) -> float:
    """Return how many normals a dense sketch draws: its rows, and all once more for every group of products held.

    Args:
        settings: of the task.
        sizes: of its network.
        memory: bytes of a device, of which 80 % of what parameters leave hold vectors.
    """
    sketch = settings["sketch"]
    size, chunk = sketch["size"], min(sketch.get("chunk_size", SKETCH_CHUNK), sketch["size"])
    free = 0.8 * (memory - sizes.total_parameters * sizes.itemsize)
    fitting = free / (sizes.num_parameters * sizes.itemsize)
    group = min(size, max(1, int((fitting - 3) / 2))) if chunk == 1 else chunk
    again = size / group / 2 if chunk == 1 else size / group
    return size * (1 + max(1.0, again)) * sizes.num_parameters


def fits(peak: float) -> str:
    """Return the smallest of the usual machines; over several GPUs parameters and vectors are cut up."""
    for count in (1, 4, 8):
        if peak <= count * GPU:
            return f"{count} x 80 GB" if count > 1 else "one GPU of 80 GB"
    return "more than 8 x 80 GB"


def in_words(peaks: Mapping[str, float]) -> str:
    """Return the peaks in one line, with the machine that the largest asks for."""
    parts = ", ".join(f"{unit} {in_bytes(peak)}" for unit, peak in peaks.items())
    return f"at least: {parts}; fits {fits(max(peaks.values()))}"
