"""A file in which unfinished work is kept, so that a killed run goes on where it was."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from curvlab.described import described, fingerprint
from curvlab.files import DamagedFileError, decode, encode, write_atomically
from curvlab.iterate import CheckpointWarning

__all__ = ["Checkpoint", "CheckpointWarning", "described", "fingerprint"]

SECONDS_BETWEEN_SAVES = 60.0  # the work that a kill may cost
MAX_SHARE = 0.02  # of the time that saving may take: where a save takes longer than 1.2 s, they become rarer
_HEADER = "curvlab-checkpoint-1"


class Checkpoint:
    """One file, replaced atomically, that belongs to one set of settings.

    Args:
        path: of the file; its folder is created when needed.
        settings: all that the work depends on, numbers and strings; a file of other settings is refused. Of what
            takes time to find out and does not change meanwhile, such as the `fingerprint` of the data, a function
            that returns it, called only when there is a file, or something to save.
        every: steps between two saves, in addition to one every minute; None: none.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any], *, every: int | None = None) -> None:
        if every is not None and every < 1:
            raise ValueError(f"checkpoint_every must be at least 1 step, got {every}")
        self.path, self.every = Path(path), every
        self._given = {name: value if callable(value) else str(value) for name, value in settings.items()}
        self._saved_at = time.monotonic()
        self._seconds_to_save = 0.0

    @cached_property
    def _settings(self) -> dict[str, str]:
        return {name: value() if callable(value) else value for name, value in self._given.items()}

    def load(self) -> dict[str, Any] | None:
        """Return what was saved, on the CPU; None when there is nothing.

        A file that cannot be read is renamed, with a warning: the work starts afresh, and nothing is lost if the
        file was no checkpoint.

        Raises:
            ValueError: the file belongs to other settings.
        """
        try:
            content = decode(self.path.read_bytes(), _HEADER)
        except FileNotFoundError:
            return None
        except DamagedFileError as damage:
            aside = self.path.with_name(f"{self.path.name}.damaged")
            self.path.replace(aside)
            warnings.warn(
                f"{self.path} is no readable checkpoint ({damage}): it is now {aside.name}, and its work starts "
                "afresh.",
                CheckpointWarning,
                stacklevel=2,
            )
            return None
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
        """Return whether to save after this step: a multiple of `every`, or a minute after the last save."""
        if self.every is not None and num_steps % self.every == 0:
            return True
        wait = max(SECONDS_BETWEEN_SAVES, self._seconds_to_save / MAX_SHARE)
        return time.monotonic() - self._saved_at >= wait

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the file by one with this state: tensors, numbers, strings, and lists and dicts of them."""
        began = time.monotonic()
        write_atomically(self.path, encode({"settings": self._settings, "state": dict(state)}, _HEADER))
        self._saved_at = time.monotonic()
        self._seconds_to_save = self._saved_at - began
