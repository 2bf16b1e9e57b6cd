"""Which units of a target's work are in the store: its own code is followed, up to the first that is not there.

The key of a unit holds numbers that units before it have found (damping, say), so that no config alone tells it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from curvlab.lab.runs import Run
from curvlab.lab.runs.store import Store
from curvlab.lab.target.declaration import Target
from curvlab.lab.target.plan.times import in_time
from curvlab.lab.target.tasks import plain_task_settings


class NotStoredError(BaseException):
    """The first unit that is not in the store; no Exception, so that no target takes it for one of its own."""


class _LookingStore(Store):
    """A store that computes nothing and writes nothing."""

    def get_or_compute(
        self, name: str, config: Mapping[str, Any], compute: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the stored payload, or raise a NotStoredError."""
        entry = self._read(self._path(name, config), quiet=True)
        if entry is None:
            raise NotStoredError
        self.hits += 1
        payload: dict[str, Any] = entry["payload"]
        return payload


class _LookingRun(Run):
    """A run that ends at the first unit that is not stored, and says which."""

    def __init__(self, cfg: DictConfig, target: Target) -> None:
        super().__init__(cfg, key=target.key, title=target.title)
        self.store = _LookingStore(cfg.store.root)

    @property
    def seconds(self) -> float:
        """CPU seconds that the units found have taken."""
        return sum(float(unit["seconds"]) for unit in self._units.values())

    def unit(
        self,
        name: str,
        config: Mapping[str, Any],
        compute: Callable[..., dict[str, Any]],
        *,
        version: int,
        about: str = "",
        resumes: bool = False,
    ) -> dict[str, Any]:
        """Return a unit of work from the store."""
        try:
            return super().unit(name, config, compute, version=version, about=about, resumes=resumes)
        except NotStoredError:
            raise NotStoredError(about or name) from None


def stored_units(target: Target, cfg: DictConfig) -> Iterator[str]:
    """Yield a line for each task (of a target without tasks, one): how many units are stored, and which is next.

    Cost: loading data and building networks, and what a target does beside its units where all are there. So
    nothing is looked for at `paper`, whose models fill a GPU, nor without a store.
    """
    if cfg.preset == "paper" or cfg.force or not Path(cfg.store.root).is_dir():
        return
    for name, own in _by_task(cfg):
        yield f"{name}: {_found(target, own)}"


def _found(target: Target, cfg: DictConfig) -> str:
    run = _LookingRun(cfg, target)
    following = ""
    try:
        target.load("compute")(run, cfg)
    except NotStoredError as first:
        following = f"; first that is not: {first} (what comes after it was not looked for)"
    except Exception as error:  # whatever stops a run of one task alone, or without its data
        following = f"; not followed further ({str(error).partition(chr(10))[0][:80]})"
    count = run.store.hits
    stored = (
        f"{count} unit{'' if count == 1 else 's'} stored, {in_time(run.seconds)} CPU time"
        if count
        else "none stored"
    )
    return stored + (following or ": all")


def _by_task(cfg: DictConfig) -> Iterator[tuple[str, DictConfig]]:
    silent = cfg.copy()
    OmegaConf.set_struct(silent, False)
    silent.progress, silent.tracker = False, {"name": "none"}
    names = list(plain_task_settings(cfg))
    if not names:
        yield "store", silent
    for name in names:
        own = silent.copy()
        for other in names:
            if other != name:
                own.tasks[other] = None
        yield f"store, {name}", own
