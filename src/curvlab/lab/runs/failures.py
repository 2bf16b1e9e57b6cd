"""What stops a run from outside, in one line that says what to change: missing data, folders, full disks."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

_FULL = {errno.ENOSPC, errno.EDQUOT}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT}
_KEPT = "Finished units of work are kept: the same command goes on where it stopped."


def unwritable(cfg: DictConfig) -> str | None:
    """Return what is wrong with `results.root` or `store.root`, before anything is computed; None: nothing."""
    for key in ("results.root", "store.root"):
        root = Path(OmegaConf.select(cfg, key))
        there = next(folder for folder in (root.absolute(), *root.absolute().parents) if os.path.lexists(folder))
        if not there.is_dir():
            return f"{key}={root} cannot be written: '{there}' is no folder. {_another(key)}"
        if not os.access(there, os.W_OK | os.X_OK):
            return f"{key}={root} cannot be written: no permission for '{there}'. {_another(key)}"
    return None


def explanation(error: BaseException, cfg: DictConfig) -> str | None:
    """Return the line for an error that the user can mend without reading code; None for all others.

    What it was raised from counts, too: Hydra wraps errors of the functions that a config names.
    """
    # Here, because torch comes with it: only after a failure.
    from curvlab.lab.data.errors import DamagedDataError, DataNotFoundError

    for cause in _causes(error):
        if isinstance(cause, DataNotFoundError | DamagedDataError):
            return str(cause)
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return _full(cause, cfg)
        if isinstance(cause, OSError) and cause.errno in _REFUSED and cause.filename is not None:
            path = Path(os.fsdecode(cause.filename)).absolute()
            for key in ("results.root", "store.root"):
                root = Path(OmegaConf.select(cfg, key)).absolute()
                # The folder itself, what is in it, or what it lies in: creating it failed.
                if path.is_relative_to(root) or (cause.errno != errno.ENOENT and root.is_relative_to(path)):
                    return f"{key}={root} cannot be written: '{path}': {cause.strerror}. {_another(key)} {_KEPT}"
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and what led to it, the outermost first."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _another(key: str) -> str:
    variable = " or the environment variable CURVLAB_STORE" if key == "store.root" else ""
    return f"Choose another folder with {key}=FOLDER{variable}."


def _full(error: OSError, cfg: DictConfig) -> str:
    """Name the disk with the least room among those that a run writes to: a failed write does not say which."""
    if error.filename is not None:
        place = f"'{os.fsdecode(error.filename)}'"
    else:
        roots = {key: Path(OmegaConf.select(cfg, key)).absolute() for key in ("results.root", "store.root")}
        free = {key: _free_bytes(root) for key, root in roots.items()}
        fullest = min(free, key=lambda key: free[key])
        place = f"{fullest}={roots[fullest]}, {free[fullest] / 2**20:.0f} MiB free"
    return (
        f"no space is left on the disk ({place}; {error.strerror}). Free some, or put results and store on "
        f"another disk with results.root=FOLDER store.root=FOLDER. {_KEPT}"
    )


def _free_bytes(root: Path) -> int:
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    return shutil.disk_usage(there).free
