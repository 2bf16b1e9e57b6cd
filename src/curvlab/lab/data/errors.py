"""What the loaders raise when files are missing or damaged, with texts that say what to do next."""

from __future__ import annotations

from pathlib import Path


class DataNotFoundError(FileNotFoundError):
    """A data set is not under the data root and could not be downloaded."""


class DamagedDataError(ValueError):
    """A file is there but does not hold what it should."""


def not_found(name: str, path: Path, *, reason: str = "") -> DataNotFoundError:
    """Return the error for data set `name` whose file or folder `path` is missing.

    Args:
        name: what was wanted, as on the command line (`data=mnist`).
        path: what was looked for, as given: relative when the root is relative.
        reason: why it was not downloaded.
    """
    why = f" {reason.rstrip('.')}." if reason else ""
    return DataNotFoundError(
        f"data={name} is not there: looked for '{path}'.{why} Set the environment variable CURVLAB_DATA, or "
        "data.root on the command line, to the folder that holds it. data=digits, data=breast_cancer and "
        "data=diabetes need no files and no download."
    )


def damaged(path: Path, problem: object) -> DamagedDataError:
    """Return the error for the unreadable file `path`."""
    text = " ".join(str(problem).split()) or type(problem).__name__
    return DamagedDataError(
        f"'{path}' is damaged ({text}). Delete it, then run again to download it, or copy it anew."
    )
