"""Finished units of work on disk, so that a killed run goes on where it was."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import Tensor

from curvlab.files import DamagedFileError, decode, encode, remove_stale, write_atomically
from curvlab.lab.runs.over_ranks import launched

if TYPE_CHECKING:
    from curvlab.parallel import Ranks

_FORMAT = "curvlab-store-3"
_UNFINISHED = ".unfinished"
_COMPUTE = "compute"
_LOG = logging.getLogger(__name__)


class StoreWarning(UserWarning):
    """An entry of the store cannot be trusted and is computed again."""


class Store:
    """Results of units of work (one seed of one variant), keyed by name and resolved config.

    An entry is <root>/<name>/<key>.pt, beside it <key>.json with the config to read. Its first line holds the
    key and the sha256 of the rest, so a damaged or a foreign file is noticed. Entries are written atomically
    under a lock of their own, which the operating system releases when the process dies: `kill -9` at any
    moment costs the unit at work, and of two processes the second waits for the first. A long unit may keep what
    it has so far in a folder of its own, see `unfinished`.

    The key knows the config, not the code: `Run.unit` puts a version into it and keeps the commit.
    Leave out of it what does not change the numbers (folders, progress, device).

    Args:
        root: folder, created when needed.
        force: compute every unit once more, also those that are there.
    """

    def __init__(self, root: str | Path, *, force: bool = False) -> None:
        self.root = Path(root)
        self.force = force
        self.hits = 0
        self.misses = 0
        self._computed: set[Path] = set()  # with force: once per unit, not once per call

    def get_or_compute(
        self, name: str, config: Mapping[str, Any], compute: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the stored payload of this unit, or compute and store it.

        Args:
            name: kind of unit, e.g. "lissa/scores": a folder below `root`.
            config: everything that the payload depends on, seed included: numbers, strings, lists, mappings.
            compute: returns tensors, numbers, strings and lists by name; only called when needed. Other units
                may be used inside.

        Returns:
            The payload as read back from disk: tensors on the CPU, tuples as lists.
        """
        path = self._path(name, config)
        entry = None if self._must_compute(path) else self._read(path, quiet=True)
        if entry is None:
            with self._locked(path, name):
                # Another process may have finished it while this one waited.
                entry = None if self._must_compute(path) else self._read(path)
                if entry is None:
                    return self._compute(path, name, config, compute)
        self.hits += 1
        return entry["payload"]

    def unfinished(self, name: str, config: Mapping[str, Any], made_by: Mapping[str, Any]) -> Path:
        """Return a folder for checkpoints of this unit, for its `compute`, which alone holds the unit's lock.

        It does not exist until something is written there, survives a kill, and goes when the unit is stored.

        Args:
            name: of the unit.
            config: likewise.
            made_by: code, versions, ...: what another maker has left is removed; with `force`, all is.
        """
        place = self._path(name, config).with_suffix(_UNFINISHED)
        own = place / digest(made_by, where="made_by")[:16]
        for folder in place.glob("*"):
            if folder != own or self.force:
                shutil.rmtree(folder)
        return own

    def _must_compute(self, path: Path) -> bool:
        return self.force and path not in self._computed

    def _compute(
        self, path: Path, name: str, config: Mapping[str, Any], compute: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        entry = {"payload": plain(named_results(compute(), name), where=name, tensors=True)}
        content = encode(entry, _header(path))
        described = json.dumps({"name": name, "config": plain(config)}, indent=2, sort_keys=True) + "\n"
        write_atomically(path.with_suffix(".json"), described.encode())
        write_atomically(path, content)
        shutil.rmtree(path.with_suffix(_UNFINISHED), ignore_errors=True)
        self.misses += 1
        self._computed.add(path)
        return decode(content, _header(path))["payload"]

    def _path(self, name: str, config: Mapping[str, Any]) -> Path:
        parts = [re.sub(r"[^\w.=-]", "-", part) for part in name.split("/")]
        if any(part.strip(".") == "" for part in parts):
            raise ValueError(f"unit name {name!r} has an empty part; name it like 'lissa/scores'.")
        return self.root.joinpath(*parts, f"{digest({'name': name, 'config': config}, where='unit')}.pt")

    def _read(self, path: Path, *, quiet: bool = False) -> dict[str, Any] | None:
        """Return the entry, or None when there is none or when it cannot be trusted."""
        try:
            return decode(path.read_bytes(), _header(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except DamagedFileError as damage:
            if not quiet:
                message = f"stored unit {path} is damaged ({damage}); it is not used but computed again."
                warnings.warn(message, StoreWarning, stacklevel=4)
            return None

    @contextmanager
    def _locked(self, path: Path, name: str) -> Iterator[None]:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(path.parent / f".{path.stem}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                _LOG.warning("waiting for unit %s, which another process computes (%s)", name, path.stem[:8])
                lock.acquire()
        except OSError as error:
            raise OSError(
                f"cannot write to the store {self.root} ({error.strerror or error}); choose another folder with "
                "store.root=FOLDER or the environment variable CURVLAB_STORE."
            ) from error
        try:
            remove_stale(path.parent, path.stem, older_than=0)  # whoever wrote them held this lock, and is dead
            yield
        finally:
            lock.release()


def named_results(payload: Any, name: str) -> dict[str, Any]:
    """Return what a unit computed when it is a dict; a forgotten `return` must not be stored."""
    if not isinstance(payload, dict):
        raise TypeError(f"unit {name!r} returned a {type(payload).__name__}; return a dict of named results.")
    return payload


def _header(path: Path) -> str:
    return f"{_FORMAT} {path.stem}"


# ------------------------------------------------------------------------------------ keys
def plain(value: Any, *, where: str = "config", tensors: bool = False) -> Any:
    """Return `value` as dicts, lists, numbers and strings, with interpolations resolved.

    With `tensors` they may be among them, and come on the CPU; without, their text is no exact key.

    Raises:
        TypeError: for anything else. `where` names the place.
    """
    if isinstance(value, DictConfig | ListConfig):
        value = OmegaConf.to_container(value, resolve=True)
    if isinstance(value, np.generic):
        value = value.item()
    if tensors and isinstance(value, Tensor):
        return value.detach().cpu().clone(memory_format=torch.contiguous_format)
    if value is None or isinstance(value, bool):
        return value
    for scalar in (int, float, str):
        if isinstance(value, scalar):
            return scalar(value)
    if isinstance(value, Mapping):
        return {
            _key(key, where): plain(own, where=f"{where}.{key}", tensors=tensors) for key, own in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain(own, where=f"{where}[{index}]", tensors=tensors) for index, own in enumerate(value)]
    allowed = "use numbers, strings, lists and mappings of them (of a tensor or an array, name its origin)."
    if tensors:
        allowed = "a unit returns tensors, numbers, strings, and lists and dicts of them "
        allowed += "(torch.from_numpy for an array, .tolist() for a column)."
    raise TypeError(f"{where} is a {type(value).__name__}; {allowed}")


def _key(key: Any, where: str) -> str:
    """Return `key` when it is a string: JSON would merge the keys 1 and "1"."""
    if not isinstance(key, str):
        raise TypeError(f"{where} has the key {key!r}; use strings as keys, here {str(key)!r}.")
    return key


def digest(value: Any, *, where: str = "config") -> str:
    """Return the sha256 of the canonical JSON: keys sorted, floats with all their digits, 1 apart from 1.0."""
    text = json.dumps(plain(value, where=where), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


# -------------------------------------------------------------------------------- torchrun
def store_of(cfg: DictConfig) -> Store:
    """Return the store that a config names, shared where several processes run."""
    if not launched():
        return Store(cfg.store.root, force=cfg.force)
    from curvlab.parallel import Ranks

    return SharedStore(cfg.store.root, force=cfg.force, ranks=Ranks.current())


class SharedStore(Store):
    """A store whose files rank 0 reads and writes; all ranks have its payloads, and compute what it has not.

    All ranks ask for the same units in the same order.

    Args:
        root: see Store.
        force: see Store.
        ranks: who works together.
    """

    def __init__(self, root: str | Path, *, force: bool = False, ranks: Ranks) -> None:
        super().__init__(root, force=force)
        self.ranks = ranks

    def get_or_compute(
        self, name: str, config: Mapping[str, Any], compute: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return rank 0's payload: from its disk, or as it is after all ranks have computed."""
        if self.ranks.is_first:

            def with_all() -> dict[str, Any]:
                self.ranks.object_from_first(_COMPUTE)
                return compute()

            return self.ranks.object_from_first(super().get_or_compute(name, config, with_all))
        told: Any = self.ranks.object_from_first(None)
        if told != _COMPUTE:
            self.hits += 1
            return told
        compute()
        self.misses += 1
        return self.ranks.object_from_first(told)

    def unfinished(self, name: str, config: Mapping[str, Any], made_by: Mapping[str, Any]) -> Path:
        """Return the same folder on all ranks; each has its own in it."""
        folder = super().unfinished(name, config, made_by) if self.ranks.is_first else None
        return Path(self.ranks.object_from_first(str(folder))) / f"rank-{self.ranks.rank}"
