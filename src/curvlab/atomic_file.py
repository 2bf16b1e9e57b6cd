"""Files that are either the old one or the new one, also after `kill -9`. Every layer may import this module."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

_STALE_SECONDS = 3600.0  # a temporary file lives for the time of one write


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path`: a temporary file in the same folder, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            # mkstemp makes files that only the owner can read; results are meant to be shared.
            os.fchmod(file.fileno(), 0o644)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def remove_stale(folder: Path, prefix: str = "", *, older_than: float = _STALE_SECONDS) -> None:
    """Remove the temporary files that a killed process left in `folder`, those `older_than` seconds."""
    for temporary in folder.glob(f".{prefix}*.tmp"):
        try:
            if time.time() - temporary.stat().st_mtime >= older_than:
                temporary.unlink()
        except FileNotFoundError:
            continue  # another process was faster
