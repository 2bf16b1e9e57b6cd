"""Run chains to their end: in chunks, in threads, and from where an interrupted run left them."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from curvlab.problem.memory import MemoryWarning, is_out_of_memory
from curvlab.sampling.checkpoint import ChainCheckpoints, StoredChain
from curvlab.sampling.sgld import SGLD, Draws, SGLDState

# On a CPU: below, a step is so short that threads wait for the interpreter, and one vmap over all chains is
# fastest; above, a thread for each core with its chains in one vmap: noise, gathers, updates go in parallel, too.
MIN_PARAMETERS_FOR_THREADS = 20_000


@dataclass(frozen=True)
class ChainTraces:
    """What chains went through.

    Attributes:
        losses: (C, steps), L_B(w) of each step's batch.
        start_losses: (C, steps), L_B(w0) of the same batches.
        positions: (C, P), at the end.
    """

    losses: Tensor
    start_losses: Tensor
    positions: Tensor


def run_chains(
    sampler: SGLD,
    seeds: Sequence[int],
    num_steps: int,
    *,
    chunk_size: int | None = None,
    checkpoints: ChainCheckpoints | None = None,
    on_step: Callable[[int], None] | None = None,
) -> ChainTraces:
    """Run one chain for each seed for `num_steps` steps from w0, or from where `checkpoints` has it.

    Args:
        sampler: what a step does.
        seeds: of the chains' generators. A chain's draws depend on its seed alone, not on chunks and threads;
            its positions do to rounding.
        num_steps: in all, those of an interrupted run included.
        chunk_size: chains that go through `vmap` together. None: all of them on a GPU and for small models; on a
            CPU the chains of one thread, or one at a time where vmap does not pay (convolutions). Half as many
            whenever memory runs out, with a MemoryWarning: the chains go on from `checkpoints`, or start again.
            The examples of a step are part of what is sampled, and are never fewer.
        checkpoints: where chains are kept meanwhile.
        on_step: called with the number of chains after each step of a chunk, from the chunk's thread; for steps
            that are taken again, too.
    """
    chunks = _chunks(sampler, len(seeds), chunk_size)
    while True:
        largest = max(map(len, chunks), default=1)
        try:
            return _run_in(chunks, sampler, seeds, num_steps, checkpoints=checkpoints, on_step=on_step)
        except (RuntimeError, MemoryError) as error:
            if largest == 1 or not is_out_of_memory(error):
                raise
        # Here the error is gone, and with it the frames that held the failed step.
        chunks = _chunks(sampler, len(seeds), -(-largest // 2))
        warnings.warn(
            f"memory ran out: now {max(map(len, chunks))} of {len(seeds)} chains go together. Pass chunk_size to "
            "begin with fewer.",
            MemoryWarning,
            stacklevel=2,
        )


def _run_in(
    chunks: list[list[int]],
    sampler: SGLD,
    seeds: Sequence[int],
    num_steps: int,
    *,
    checkpoints: ChainCheckpoints | None,
    on_step: Callable[[int], None] | None,
) -> ChainTraces:
    stored = [None if checkpoints is None else checkpoints.load(chain) for chain in range(len(seeds))]
    chunks = _together(chunks, stored)
    traces = sampler.losses.start.new_zeros(2, len(seeds), num_steps)
    positions = sampler.losses.start.repeat(len(seeds), 1)
    stop = threading.Event()

    def run(chunk: list[int], own: SGLD) -> None:
        state = _begin(own, [seeds[c] for c in chunk], [stored[c] for c in chunk])
        rows = traces.new_zeros(2, len(chunk), num_steps)
        for row, chain in enumerate(chunk):
            if (known := stored[chain]) is not None:
                taken = min(known.num_steps, num_steps)
                rows[:, row, :taken] = known.traces[:, :taken].to(rows)
        while state.num_steps < num_steps and not stop.is_set():
            step = state.num_steps
            state, info = own.step(state)
            rows[0, :, step], rows[1, :, step] = info.losses, info.start_losses
            if checkpoints is not None and checkpoints.due(chunk, state.num_steps):
                checkpoints.save(chunk, state, rows[:, :, : state.num_steps])
            if on_step is not None:
                on_step(len(chunk))
        traces[:, chunk] = rows
        positions[chunk] = state.positions

    _run_all(run, chunks, sampler, stop)
    return ChainTraces(traces[0], traces[1], positions)


def _run_all(
    run: Callable[[list[int], SGLD], None], chunks: list[list[int]], sampler: SGLD, stop: threading.Event
) -> None:
    num_workers = _num_workers(sampler, len(chunks))
    if num_workers == 1:
        for chunk in chunks:
            run(chunk, sampler)
        return
    with _threads_each(num_workers), ThreadPoolExecutor(num_workers) as pool:
        futures = [pool.submit(run, chunk, sampler.for_thread()) for chunk in chunks]
        try:
            for future in futures:
                future.result()
        except BaseException:
            stop.set()
            raise


def _together(chunks: list[list[int]], stored: Sequence[StoredChain | None]) -> list[list[int]]:
    """Split chunks so that the chains of one have taken as many steps: an earlier run may have had others."""

    def steps(chain: int) -> int:
        known = stored[chain]
        return 0 if known is None else known.num_steps

    return [list(group) for chunk in chunks for _, group in groupby(sorted(chunk, key=steps), key=steps)]


def _begin(sampler: SGLD, seeds: Sequence[int], stored: Sequence[StoredChain | None]) -> SGLDState:
    device = sampler.losses.start.device
    generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
    state = sampler.init(generators)
    if stored[0] is None:
        return state
    known = [chain for chain in stored if chain is not None]  # all of them: see `_together`
    for row, chain in enumerate(known):
        state.positions[row] = chain.position.to(state.positions)
        if state.second_moments is not None and chain.second_moments is not None:
            state.second_moments[row] = chain.second_moments.to(state.positions)
        generators[row].set_state(chain.generator_state)
    noise = torch.cat([chain.draws.noise for chain in known]).to(state.positions)
    ahead = [chain.draws.indices for chain in known if chain.draws.indices is not None]
    indices = torch.cat(ahead).to(device) if ahead else None
    return replace(state, draws=Draws(noise, indices), num_steps=known[0].num_steps)


def _chunks(sampler: SGLD, num_chains: int, chunk_size: int | None) -> list[list[int]]:
    losses = sampler.losses
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1 chain, got {chunk_size}")
    if chunk_size is None:
        on_cpu = losses.start.device.type == "cpu"
        chunk_size = num_chains
        if on_cpu and len(losses.start) >= MIN_PARAMETERS_FOR_THREADS:
            chunk_size = math.ceil(num_chains / _num_threads())
        if on_cpu and losses.function.has_convolution:
            chunk_size = 1
    if not losses.can_vmap:
        chunk_size = 1
    chains = list(range(num_chains))
    return [chains[start : start + chunk_size] for start in range(0, num_chains, chunk_size)]


def _num_workers(sampler: SGLD, num_chunks: int) -> int:
    losses = sampler.losses
    if losses.start.device.type != "cpu" or len(losses.start) < MIN_PARAMETERS_FOR_THREADS:
        return 1
    return min(_num_threads(), num_chunks)


def _num_threads() -> int:
    return torch.get_num_threads()


@contextmanager
def _threads_each(num_workers: int) -> Iterator[None]:
    """Share the kernels' threads out among workers, and put their number back at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // num_workers))
    try:
        yield
    finally:
        torch.set_num_threads(before)
