"""Unfinished work of several processes on disk: what all resume is the state after one and the same step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from curvlab.checkpoint import Checkpoint
from curvlab.ranks import Ranks


class FirstRankCheckpoint(Checkpoint):
    """The file of work whose state is the same on every rank: rank 0 writes and reads it, the others are told.

    Any number of ranks can go on with it.

    Args:
        path: see Checkpoint; only rank 0 needs to see it.
        settings: see Checkpoint.
        every: see Checkpoint.
        ranks: who works together.
    """

    def __init__(
        self, path: str | Path, settings: Mapping[str, Any], *, every: int | None = None, ranks: Ranks
    ) -> None:
        super().__init__(path, settings, every=every)
        self.ranks = ranks

    def load(self) -> dict[str, Any] | None:
        """Return rank 0's file on every rank; None when there is none."""
        return self.ranks.object_from_first(super().load() if self.ranks.is_first else None)

    def due(self, num_steps: int) -> bool:
        """Return whether rank 0 saves after this step."""
        return bool(self.ranks.from_first(torch.tensor(super().due(num_steps), dtype=torch.int32)))

    def save(self, state: Mapping[str, Any]) -> None:
        """Write the file, on rank 0; there all ranks have taken the step."""
        if self.ranks.is_first:
            super().save(state)


class EveryRankCheckpoint(Checkpoint):
    """Files of work whose vectors are cut up: each rank writes its part, <path>.<rank>-of-<ranks>.<0 or 1>.

    Two saves are kept in turns, so that a kill between two ranks' writes leaves one that all of them have. The
    same number of ranks goes on with it, each from a disk that it sees again.

    Args:
        path: see Checkpoint.
        settings: see Checkpoint; of this rank's part.
        every: see Checkpoint.
        ranks: who works together.
    """

    def __init__(
        self, path: str | Path, settings: Mapping[str, Any], *, every: int | None = None, ranks: Ranks
    ) -> None:
        super().__init__(path, settings, every=every)
        self.ranks, self._num_saved = ranks, 0
        names = [f"{Path(path).name}.{ranks.rank}-of-{ranks.size}.{turn}" for turn in (0, 1)]
        self._turns = [Checkpoint(Path(path).with_name(name), settings) for name in names]

    def load(self) -> dict[str, Any] | None:
        """Return this rank's part of the last save that all ranks have finished; None when there is none."""
        found = [turn.load() for turn in self._turns]
        mine = {state["save"]: state["state"] for state in found if state is not None}
        common = set.intersection(*map(set, self.ranks.gather(sorted(mine))))
        if not common:
            return None
        self._num_saved = max(common)
        state: dict[str, Any] = mine[self._num_saved]
        return state

    def due(self, num_steps: int) -> bool:
        """Return whether all ranks save after this step, as rank 0 decides."""
        return bool(self.ranks.from_first(torch.tensor(super().due(num_steps), dtype=torch.int32)))

    def save(self, state: Mapping[str, Any]) -> None:
        """Write this rank's part."""
        began = time.monotonic()
        self._num_saved += 1
        self._turns[self._num_saved % 2].save({"save": self._num_saved, "state": dict(state)})
        self._saved_at = time.monotonic()
        self._seconds_to_save = self._saved_at - began
