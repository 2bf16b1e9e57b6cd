"""A file in which unfinished work is kept, so that a killed run goes on where it was."""

from __future__ import annotations

import hashlib
import io
import pickle
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvlab.atomic_file import write_atomically

MAX_SECONDS = 60.0  # of work that a kill may cost


class Checkpoint:
    """One file, replaced atomically, that belongs to one set of settings.

    Args:
        path: of the file; its folder is created when needed.
        settings: all that the work depends on, numbers and strings; a file of other settings is refused.
        every: steps between two saves; a save is due after a minute, too.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any], *, every: int = 200) -> None:
        if every < 1:
            raise ValueError(f"checkpoint_every must be at least 1 step, got {every}")
        self.path, self.every = Path(path), every
        self._settings = {name: str(value) for name, value in settings.items()}
        self._last = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """Return what was saved, on the CPU; None when there is nothing."""
        if not self.path.is_file():
            return None
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True)
        except (OSError, EOFError, LookupError, RuntimeError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"{self.path} is damaged ({type(error).__name__}): delete it, and its work starts anew."
            ) from error
        if not isinstance(content, dict) or content.keys() != {"settings", "state"}:
            raise ValueError(f"{self.path} is no checkpoint: give the checkpoint a place of its own.")
        stored = content["settings"]
        if stored != self._settings:
            changed = sorted(k for k in {*stored, *self._settings} if stored.get(k) != self._settings.get(k))
            raise ValueError(
                f"{self.path} belongs to other work ({', '.join(changed)} differ): give each its own checkpoint, "
                "or delete it."
            )
        state: dict[str, Any] = content["state"]
        return state

    def due(self, num_steps: int) -> bool:
        """Return whether to save after this step: a multiple of `every`, or a minute since the last save."""
        return num_steps % self.every == 0 or time.monotonic() - self._last >= MAX_SECONDS

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the file by one with this state: tensors, numbers, strings, and lists and dicts of them."""
        buffer = io.BytesIO()
        torch.save({"settings": self._settings, "state": dict(state)}, buffer)
        write_atomically(self.path, buffer.getvalue())
        self._last = time.monotonic()


def fingerprint(*tensors: Tensor) -> str:
    """Return a hash of the tensors' types, shapes and values: what a checkpoint belongs to."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
