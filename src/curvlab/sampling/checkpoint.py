"""Chains on disk, so that a killed run goes on where it was."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from curvlab.checkpoint import Checkpoint
from curvlab.sampling.sgld import Draws, SGLDState


@dataclass(frozen=True)
class StoredChain:
    """One chain after `num_steps` steps.

    Attributes:
        position: (P,).
        generator_state: of its generator.
        draws: drawn from it ahead, for this one chain.
        traces: (2, num_steps), losses and start losses of its batches.
        num_steps: how far it is.
        second_moments: (P,), of a preconditioner; None without one.
    """

    position: Tensor
    generator_state: Tensor
    draws: Draws
    traces: Tensor
    num_steps: int
    second_moments: Tensor | None


class ChainCheckpoints:
    """A folder with one `Checkpoint` for each chain.

    Args:
        folder: created when needed; for one estimate only.
        settings: all that the chains depend on; a folder of other settings is refused.
        num_chains: how many.
        every: steps between two saves; a save is due after a minute, too.
    """

    def __init__(
        self, folder: str | Path, settings: Mapping[str, Any], *, num_chains: int, every: int | None = None
    ) -> None:
        paths = [Path(folder) / f"chain_{chain:04d}.pt" for chain in range(num_chains)]
        self._files = [Checkpoint(path, settings, every=every) for path in paths]

    def of(self, chains: Sequence[int]) -> ChainCheckpoints:
        """Return the checkpoints of some chains alone, numbered from 0: for a process that runs no others."""
        own = copy.copy(self)
        own._files = [self._files[chain] for chain in chains]
        return own

    def load(self, chain: int) -> StoredChain | None:
        """Return a chain as it was saved, or None."""
        state = self._files[chain].load()
        if state is None:
            return None
        return StoredChain(
            position=state["position"],
            generator_state=state["generator_state"],
            draws=Draws(state["noise"], state["indices"]),
            traces=state["traces"],
            num_steps=state["traces"].shape[1],
            second_moments=state.get("second_moments"),
        )

    def due(self, chains: Sequence[int], num_steps: int) -> bool:
        """Return whether these chains, which move together, are saved after this step."""
        return self._files[chains[0]].due(num_steps)

    def save(self, chains: Sequence[int], state: SGLDState, traces: Tensor) -> None:
        """Write the chains with these numbers, the rows of `state`; `traces` (2, C, steps taken)."""
        ahead, moments = state.draws.left(), state.second_moments
        for row, chain in enumerate(chains):
            mine = slice(row, row + 1)
            self._files[chain].save(
                {
                    "position": state.positions[row].clone().cpu(),
                    "generator_state": state.generators[row].get_state(),
                    "noise": ahead.noise[mine].clone().cpu(),
                    "indices": None if ahead.indices is None else ahead.indices[mine].clone().cpu(),
                    "traces": traces[:, row].clone().cpu(),
                    "second_moments": None if moments is None else moments[row].clone().cpu(),
                }
            )
