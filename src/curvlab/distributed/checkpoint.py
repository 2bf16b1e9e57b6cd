"""Unfinished work of several processes on disk: what all resume is the state after one and the same step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from curvlab.checkpoint import Checkpoint
from curvlab.distributed.ranks import Ranks


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
