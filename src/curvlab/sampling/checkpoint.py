"""Chains on disk, so that a killed run goes on where it was."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvlab.sampling.sgld import Draws, SGLDState

_CONTENT = {"settings", "position", "generator_state", "noise", "indices", "traces"}


@dataclass(frozen=True)
class StoredChain:
    """One chain after `num_steps` steps.

    Attributes:
        position: (P,).
        generator_state: of its generator.
        draws: drawn from it ahead, for this one chain.
        traces: (2, num_steps), losses and start losses of its batches.
        num_steps: how far it is.
    """

    position: Tensor
    generator_state: Tensor
    draws: Draws
    traces: Tensor
    num_steps: int


class ChainCheckpoints:
    """One file a chain in a folder, each replaced atomically.

    Args:
        folder: created when needed; for one estimate only.
        settings: all that the chains depend on, numbers and strings; a folder of other settings is refused.
        every: steps between two saves.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any], *, every: int = 200) -> None:
        if every < 1:
            raise ValueError(f"checkpoint_every must be at least 1 step, got {every}")
        self.folder, self.every = Path(folder), every
        self._settings = {name: str(value) for name, value in settings.items()}

    def load(self, chain: int) -> StoredChain | None:
        """Return what is there of a chain, or None."""
        path = self._path(chain)
        if not path.is_file():
            return None
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"{path} is damaged ({type(error).__name__}): delete it, and its chain starts anew."
            ) from error
        if not isinstance(content, dict) or not content.keys() >= _CONTENT:
            raise ValueError(f"{path} is no checkpoint of a chain: give the estimate a folder of its own.")
        if content["settings"] != self._settings:
            stored = content["settings"]
            changed = sorted(k for k in {*stored, *self._settings} if stored.get(k) != self._settings.get(k))
            raise ValueError(
                f"{path} holds a chain of another estimate ({', '.join(changed)} differ): give each its own "
                "checkpoint folder, or delete it."
            )
        return StoredChain(
            position=content["position"],
            generator_state=content["generator_state"],
            draws=Draws(content["noise"], content["indices"]),
            traces=content["traces"],
            num_steps=content["traces"].shape[1],
        )

    def due(self, num_steps: int, last: int) -> bool:
        """Return whether chains are saved after this step."""
        return num_steps == last or num_steps % self.every == 0

    def save(self, chains: Sequence[int], state: SGLDState, traces: Tensor) -> None:
        """Write the chains with these numbers, the rows of `state`; `traces` (2, C, steps taken)."""
        ahead = state.draws.left()
        for row, chain in enumerate(chains):
            mine = slice(row, row + 1)
            indices = None if ahead.indices is None else ahead.indices[mine].clone().cpu()
            self._write(
                self._path(chain),
                {
                    "settings": self._settings,
                    "position": state.positions[row].clone().cpu(),
                    "generator_state": state.generators[row].get_state(),
                    "noise": ahead.noise[mine].clone().cpu(),
                    "indices": indices,
                    "traces": traces[:, row].clone().cpu(),
                },
            )

    def _write(self, path: Path, content: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(content, partial)
        os.replace(partial, path)

    def _path(self, chain: int) -> Path:
        return self.folder / f"chain_{chain:04d}.pt"


def fingerprint(*tensors: Tensor) -> str:
    """Return a hash of the tensors' values: what a checkpoint belongs to."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
