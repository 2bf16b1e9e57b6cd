"""Run chains to their end: in chunks, in threads, and from where an interrupted run left them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from curvlab.arguments import whole
from curvlab.files import check_place
from curvlab.iterate import Checkpoint, Key, SaveFile, iterate
from curvlab.problem.memory import with_halving
from curvlab.ranks import Ranks
from curvlab.sampling.sgld import SGLD, SGLDState

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
        scales: (C, P), diagonals of the preconditioners at the end; None without them.
    """

    losses: Tensor
    start_losses: Tensor
    positions: Tensor
    scales: Tensor | None = None

    def parts(self) -> list[Tensor]:
        """Return the tensors that there are, in this order; the chains are their first axis."""
        parts = [self.losses, self.start_losses, self.positions]
        return parts if self.scales is None else [*parts, self.scales]


@dataclass(frozen=True)
class ChainsState:
    """Chains that step together: what `callback` sees.

    Attributes:
        sampled: positions, generators, and what the sampler carries.
        traces: (2, C, steps), L_B(w) and L_B(w0); filled up to `num_steps`.
    """

    sampled: SGLDState
    traces: Tensor

    @property
    def num_steps(self) -> int:
        """Steps that each of these chains has taken."""
        return self.sampled.num_steps

    @property
    def num_chains(self) -> int:
        """How many chains these are."""
        return self.traces.shape[1]

    @property
    def done(self) -> bool:
        """Whether they have taken all."""
        return self.num_steps >= self.traces.shape[2]


def run_chains(
    sampler: SGLD,
    seeds: Sequence[int],
    num_steps: int,
    *,
    chunk_size: int | None = None,
    progress: bool = False,
    checkpoint: str | Path | Checkpoint | None = None,
    callback: Callable[[ChainsState], object] | None = None,
) -> ChainTraces:
    """Run one chain for each seed for `num_steps` steps from w0, or from where `checkpoint` has it.

    Args:
        sampler: what a step does.
        seeds: of the chains' generators. A chain's draws depend on its seed alone, not on chunks and threads;
            its positions do to rounding.
        num_steps: in all, those of an interrupted run included.
        chunk_size: chains that go through `vmap` together. None: all of them on a GPU and for small models; on a
            CPU the chains of one thread, or one at a time where vmap does not pay (convolutions). Half as many
            whenever memory runs out, with a MemoryWarning: the chains go on from `checkpoint`, or start again.
            The examples of a step are part of what is sampled, and are never fewer.
        progress: a bar for each chunk; one bar where chunks run side by side.
        checkpoint: folder with a file for each chunk: saved every minute, removed at the end. After a kill the
            same chains go on there and end at the same numbers; in chunks of another size, to rounding.
        callback: called with the state of a chunk after each step, from the chunk's thread.
    """
    num_chains = len(seeds)
    largest = max(map(len, _chunks(sampler, num_chains, chunk_size)), default=1)
    files = None if checkpoint is None else _Files(checkpoint, sampler, seeds, num_steps)

    def in_chunks(at_once: int) -> ChainTraces:
        chunks = _chunks(sampler, num_chains, at_once)
        return _run_in(chunks, sampler, seeds, num_steps, files, progress=progress, callback=callback)

    def told(at_once: int) -> str:
        return f"now {at_once} of {num_chains} chains go together. Pass chunk_size to begin with fewer."

    found = with_halving(in_chunks, largest, told)
    if files is not None:
        files.remove_all()
    return found


def run_chains_over_ranks(
    ranks: Ranks, sampler: SGLD, seeds: Sequence[int], num_steps: int, **settings: Any
) -> ChainTraces:
    """Run this rank's chains and return those of all ranks, in the order of `seeds`; see `run_chains`.

    A callback is called for this rank's chains alone.
    """
    given = torch.tensor([seed % 2**31 for seed in seeds])
    ranks.agree(given, "the seeds of the chains: pass generators with the same seed on every rank")
    mine = range(ranks.rank, len(seeds), ranks.size)
    own = run_chains(sampler, [seeds[chain] for chain in mine], num_steps, **settings).parts() if mine else []
    found = ranks.gather((list(mine), [part.cpu() for part in own]))
    order = torch.tensor([chain for chains, _ in found for chain in chains]).argsort()
    parts = zip(*(parts for _, parts in found if parts), strict=True)
    return ChainTraces(*(torch.cat(part)[order].to(sampler.losses.start) for part in parts))


@dataclass(frozen=True)
class _Chunk:
    """Chains that step together, for `iterate`."""

    sampler: SGLD
    seeds: Sequence[int]
    num_steps: int

    def depends_on(self) -> Mapping[str, Any]:
        return {}  # the files have a key of their own

    def init(self) -> ChainsState:
        start = self.sampler.losses.start
        generators = [torch.Generator(start.device).manual_seed(seed) for seed in self.seeds]
        traces = start.new_zeros(2, len(self.seeds), self.num_steps)
        return ChainsState(self.sampler.init(generators), traces)

    def step(self, state: ChainsState) -> ChainsState:
        place = state.num_steps
        sampled, info = self.sampler.step(state.sampled)
        state.traces[0, :, place], state.traces[1, :, place] = info.losses, info.start_losses
        return replace(state, sampled=sampled)

    def result(self, state: ChainsState) -> ChainTraces:
        losses, start_losses = state.traces
        return ChainTraces(losses, start_losses, state.sampled.positions, self.sampler.scales(state.sampled))


def _run_in(
    chunks: list[list[int]],
    sampler: SGLD,
    seeds: Sequence[int],
    num_steps: int,
    files: _Files | None,
    *,
    progress: bool,
    callback: Callable[[ChainsState], object] | None,
) -> ChainTraces:
    chunks = chunks if files is None else files.together(chunks)
    num_workers, stop = _num_workers(sampler, len(chunks)), threading.Event()

    def after_step(state: ChainsState) -> None:
        if stop.is_set():
            raise _StoppedError
        if callback is not None:
            callback(state)

    def run(number: int, own: SGLD) -> ChainTraces:
        chunk = chunks[number]
        return iterate(
            _Chunk(own, [seeds[chain] for chain in chunk], num_steps),
            name=f"chains {chunk[0] + 1} to {chunk[-1] + 1} of {len(seeds)}",
            total=num_steps,
            progress=progress and (num_workers == 1 or number == 0),
            callback=after_step,
            checkpoint=None if files is None else files.of_chunk(chunk),
        )

    if num_workers == 1:
        found = [run(number, sampler) for number in range(len(chunks))]
    else:
        found = _in_threads(run, [sampler.for_thread() for _ in chunks], num_workers, stop)
    order = torch.tensor([chain for chunk in chunks for chain in chunk]).argsort()
    parts = zip(*(traces.parts() for traces in found), strict=True)
    return ChainTraces(*(torch.cat(part)[order.to(part[0].device)] for part in parts))


def _in_threads(
    run: Callable[[int, SGLD], ChainTraces], samplers: Sequence[SGLD], num_workers: int, stop: threading.Event
) -> list[ChainTraces]:
    """Run each chunk in a thread; where one fails, the others stop after their step."""

    def stopping(number: int) -> ChainTraces:
        try:
            return run(number, samplers[number])
        except BaseException:
            stop.set()
            raise

    with _threads_each(num_workers), ThreadPoolExecutor(num_workers) as pool:
        futures = [pool.submit(stopping, number) for number in range(len(samplers))]
        try:
            errors = [future.exception() for future in futures]
        except BaseException:
            stop.set()
            raise
    for error in errors:
        if error is not None and not isinstance(error, _StoppedError):
            raise error
    return [future.result() for future in futures]


class _StoppedError(Exception):
    """Another thread's chains have failed."""


class _Files:
    """A folder with a file for each chunk: its chains are saved together, and so go on together after a kill."""

    def __init__(
        self, checkpoint: str | Path | Checkpoint, sampler: SGLD, seeds: Sequence[int], num_steps: int
    ) -> None:
        self.place = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
        self.key, self.device = Key("chains", sampler.depends_on()), sampler.losses.start.device
        self.seeds, self.num_steps, self.found = seeds, num_steps, dict[int, dict[str, Any]]()
        check_place(Path(self.place.path) / "chains.pt")

    def of_chunk(self, chunk: Sequence[int]) -> _FileOfChunk:
        return _FileOfChunk(self, [self.seeds[chain] for chain in chunk])

    def at(self, path: Path) -> SaveFile:
        return SaveFile(replace(self.place, path=path), self.key)

    def together(self, chunks: Sequence[Sequence[int]]) -> list[list[int]]:
        """Read what there is; split chunks that were others then: all chains of one have taken as many steps."""
        for path in self._paths(".pt"):
            saved = self.at(path).load(self.device) or {"seeds": []}
            for row, seed in enumerate(saved.pop("seeds")):
                if self.steps(seed) < saved["sampled"]["num_steps"]:
                    self.found[seed] = _row(saved, row)

        def steps(chain: int) -> int:
            return self.steps(self.seeds[chain])

        return [list(group) for chunk in chunks for _, group in groupby(sorted(chunk, key=steps), key=steps)]

    def steps(self, seed: int) -> int:
        return self.found[seed]["sampled"]["num_steps"] if seed in self.found else 0

    def remove_all(self) -> None:
        for path in (*self._paths(".pt"), *self._paths(".tmp", hidden=".")):
            self.at(path).remove()

    def _paths(self, ending: str, hidden: str = "") -> list[Path]:
        folder = Path(self.place.path)
        return [path for seed in self.seeds for path in folder.glob(f"{hidden}chains_{seed}_*{ending}")]


class _FileOfChunk(SaveFile):
    """The file of a chunk, named after its first chain's seed and how many there are."""

    def __init__(self, files: _Files, seeds: list[int]) -> None:
        path = Path(files.place.path) / f"chains_{seeds[0]}_{len(seeds)}.pt"
        super().__init__(replace(files.place, path=path), files.key)
        self._files, self._seeds = files, seeds

    def load(self, device: torch.device | None = None) -> dict[str, Any] | None:
        found = [own for seed in self._seeds if (own := self._files.found.pop(seed, None)) is not None]
        if not found:
            return None
        state, num_steps = _joined(found), self._files.num_steps
        taken = state["traces"][:, :, :num_steps]
        state["traces"] = torch.nn.functional.pad(taken, (0, num_steps - taken.shape[2]))
        return cast("dict[str, Any]", state)

    def due(self, num_steps: int) -> bool:
        # Before the last step, too: a chunk that is done waits for the others, and is there after a kill.
        return super().due(num_steps) or num_steps == self._files.num_steps - 1

    def save(self, state: Mapping[str, Any]) -> None:
        taken = state["traces"][:, :, : state["sampled"]["num_steps"]].clone()
        super().save({**state, "traces": taken, "seeds": self._seeds})

    def remove(self) -> None:
        """Keep the file until all chunks are done, see `remove_all`."""


def _row(part: Any, row: int, *, axis: int = 0) -> Any:
    """Return one chain's part of a saved state."""
    if isinstance(part, Tensor):
        return part.narrow(axis, row, 1).clone()
    if isinstance(part, tuple):
        return part[row : row + 1]
    if not isinstance(part, dict):
        return part
    return {name: _row(own, row, axis=1 if name == "traces" else 0) for name, own in part.items()}


def _joined(parts: Sequence[Any], *, axis: int = 0) -> Any:
    """Return the saved states of several chains as one; numbers are those of the first."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts), axis)
    if isinstance(first, tuple):
        return tuple(own for part in parts for own in part)
    if not isinstance(first, dict):
        return first
    return {name: _joined([own[name] for own in parts], axis=1 if name == "traces" else 0) for name in first}


def _chunks(sampler: SGLD, num_chains: int, chunk_size: int | None) -> list[list[int]]:
    losses = sampler.losses
    if chunk_size is not None:
        whole("chunk_size", chunk_size, why="chains at once")
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
