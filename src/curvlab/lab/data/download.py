"""Files of data sets: what is said when one is missing or damaged, known hashes, and one way to download."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from http.client import HTTPException
from pathlib import Path

from filelock import FileLock

TIMEOUT_SECONDS = 15.0
# Size and sha256 of published files, by their place below the data root.
KNOWN: dict[str, tuple[int, str]] = {
    "MNIST/raw/train-images-idx3-ubyte": (
        47040016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    "MNIST/raw/train-labels-idx1-ubyte": (
        60008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    "MNIST/raw/t10k-images-idx3-ubyte": (
        7840016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    "MNIST/raw/t10k-labels-idx1-ubyte": (
        10008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    "FashionMNIST/raw/train-images-idx3-ubyte": (
        47040016, "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    ),
    "FashionMNIST/raw/train-labels-idx1-ubyte": (
        60008, "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    ),
    "FashionMNIST/raw/t10k-images-idx3-ubyte": (
        7840016, "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    ),
    "FashionMNIST/raw/t10k-labels-idx1-ubyte": (
        10008, "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    "libsvm/mushrooms": (879712, "f39a4eb628dc61a7d43760815b061c9e497aa728ce1ad8bde57a09ef6043b538"),
    "ptb/ptb.train.txt": (5101618, "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
    "ptb/ptb.test.txt": (449945, "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
    "xsum/test.jsonl": (2410652, "d824400a3d422550d016e15599806196600932bc6109e00ab97be3044426c052"),
    "xsum/test_extra.jsonl": (2294194, "f32016c7f04f23d3eb98e9c938366fd784ce44ec17fc3a417596987f35ad730d"),
}  # fmt: skip


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


def check_known(root: Path, *names: str) -> None:
    """Raise a DamagedDataError where a published file is not as it was published.

    The size is looked at each time, the sha256 when this process first sees the file.

    Args:
        root: data root.
        names: places below it; those that are not `KNOWN` are passed over.
    """
    for name in names:
        if name in KNOWN:
            path, (size, expected) = root / name, KNOWN[name]
            state = path.stat()
            if state.st_size != size:
                raise damaged(path, f"{state.st_size:,} bytes; as published it has {size:,}")
            if (found := file_hash(path, state.st_mtime_ns)) != expected:
                raise damaged(path, f"its sha256 starts with {found[:12]}; as published with {expected[:12]}")


@cache
def file_hash(path: Path, time: int, algorithm: str = "sha256") -> str:
    """Return the file's hash, computed once for each `time` of its last change."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


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
        raise not_found(name, missing, reason=f"The download failed: {line_of(error, -1)}") from None


@contextmanager
def reading_hub(name: str) -> Iterator[str]:
    """Give the data set's name without its owner; what the hub refuses inside is a DataNotFoundError."""
    label = name.rstrip("/").split("/")[-1]
    try:
        yield label
    except (OSError, ValueError, RuntimeError) as error:
        raise not_found(label, Path(name), reason=f"Reading it from the hub failed: {line_of(error)}") from error


def line_of(error: Exception, place: int = 0) -> str:
    """Return the first line of an error's text, or another; the error's kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[place]


@contextmanager
def _timeout(seconds: float) -> Iterator[None]:
    """Limit how long urllib waits: torchvision's downloads have no setting for it."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
