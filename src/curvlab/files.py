"""Files that hold what was written, or what was there before: atomic writes, and tensors whose damage is noticed.

Every layer may import this module.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import pickle
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_STALE_SECONDS = 3600.0  # a temporary file lives for the time of one write


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path`: a temporary file in the same folder, fsync, rename. An OSError names `path`."""
    try:
        check_place(path)
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
    except OSError as error:  # a full disk's names no file, others the temporary one
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def check_place(path: Path) -> None:
    """Raise an OSError that says why no file can be written to `path`: a folder, or no permission."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file in it")
    there = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        number, why = (errno.EACCES, "no permission for") if there.is_dir() else (errno.ENOTDIR, "no folder is")
        raise OSError(number, f"cannot be written, {why} {there}", str(path))


def remove_stale(folder: Path, prefix: str = "", *, older_than: float = _STALE_SECONDS) -> None:
    """Remove the temporary files that a killed process left in `folder`, those `older_than` seconds."""
    for temporary in folder.glob(f".{prefix}*.tmp"):
        try:
            if time.time() - temporary.stat().st_mtime >= older_than:
                temporary.unlink()
        except FileNotFoundError:
            continue  # another process was faster


class DamagedFileError(ValueError):
    """The file is not what was written; the text says what is wrong."""


def encode(entry: Mapping[str, Any], header: str) -> bytes:
    """Return a file's content: a line with `header` and the sha256 of the rest, then tensors and plain values.

    Of a view its own numbers alone are kept, not all of the memory that it lies in.
    """
    buffer = io.BytesIO()
    torch.save(_without_the_rest(dict(entry)), buffer)
    body = buffer.getvalue()
    return f"{header} {hashlib.sha256(body).hexdigest()}\n".encode() + body


def decode(content: bytes, header: str, *, device: torch.device | None = None) -> dict[str, Any]:
    """Return the entry; tensors that were not on the CPU come to `device`, to the CPU without one.

    Raises:
        DamagedFileError: another header, a wrong checksum, or an entry that would run code.
    """
    line, _, body = content.partition(b"\n")
    found, _, checksum = line.decode("ascii", errors="replace").rpartition(" ")
    if found != header:
        raise DamagedFileError(f"it does not begin with {header!r}")
    # torch.load would not notice a changed byte of a tensor.
    if checksum != hashlib.sha256(body).hexdigest():
        raise DamagedFileError("its checksum is wrong")

    def place(storage: Any, location: str) -> Any:
        return storage if device is None or location == "cpu" else storage.to(device=device)

    try:
        entry: dict[str, Any] = torch.load(io.BytesIO(body), map_location=place, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise DamagedFileError(f"it does not load: {type(error).__name__}") from None
    return entry


def _without_the_rest(part: Any) -> Any:
    """Return the same, with views of larger memory copied: torch.save would write all of it."""
    if isinstance(part, Tensor) and part.layout is torch.strided:
        return part.clone() if part.untyped_storage().nbytes() > part.nbytes else part
    if type(part) is dict:
        return {name: _without_the_rest(of) for name, of in part.items()}
    if type(part) in (list, tuple):
        return type(part)(_without_the_rest(of) for of in part)
    return part
