"""One way to download: locked against a second process, and failing fast with a readable error."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

from filelock import FileLock

from curvlab.lab.data.errors import not_found

TIMEOUT_SECONDS = 15.0


def download(name: str, root: Path, action: Callable[[], object], *, missing: Path) -> None:
    """Run `action`, which downloads data set `name` into `root`.

    Args:
        name: the data set, as on the command line.
        root: data root, created when it does not exist.
        action: does nothing when the files are there already (another process may have been faster).
        missing: file that was looked for, named in the error.

    Raises:
        DataNotFoundError: when the network or the disk refuses.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{name}.lock"), _timeout(TIMEOUT_SECONDS):
            action()
    # URLError and a full disk are OSErrors; torchvision turns some failures into RuntimeErrors.
    except (OSError, RuntimeError, HTTPException, EOFError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise not_found(name, missing, reason=f"The download failed: {lines[-1]}") from None


@contextmanager
def _timeout(seconds: float) -> Iterator[None]:
    """Limit how long urllib waits: torchvision's downloads have no setting for it."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
