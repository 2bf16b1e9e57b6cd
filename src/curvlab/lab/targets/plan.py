"""plan=true, a dry run: the sizes of a target's networks, what its published runs took, and what is stored.

The time of a preset that was never published
follows from nothing that a config says: how many products a solver takes depends on what it finds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from curvlab.lab.models.unread import network
from curvlab.lab.runs.over_ranks import silenced
from curvlab.lab.runs.run import Run
from curvlab.lab.runs.store import Store
from curvlab.lab.targets.help import published_record
from curvlab.lab.targets.settings import plain_task_settings
from curvlab.lab.targets.target import PRESETS, Target
from curvlab.problem import freeze

_VECTORS = 3  # beside the parameters of a product: v, G v, and the gradient of one batch
_GPU = 80e9


def plan(target: Target, cfg: DictConfig) -> Iterator[str]:
    """Yield the lines of a plan."""
    yield f"{target.make_name} ({cfg.preset}): a plan; nothing is computed"
    for name, settings in plain_task_settings(cfg).items():
        yield f"{name}: {sizes(settings)}"
    yield from _published(target, str(cfg.preset))
    yield from stored_units(target, cfg)


def sizes(settings: Mapping[str, Any]) -> str:
    """Return parameters and bytes of a task's network, or why they are not known before its data are read."""
    if settings.get("model") is None or settings.get("data") is None:
        return "not planned: its config names no data and model of a task"
    try:
        model = network(settings)
    except Exception as error:  # whatever a loader finds missing
        return f"not planned: its network cannot be built ({str(error).partition(chr(10))[0][:80]})"
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = freeze(model, **(settings.get("freeze") or {"normalization": False, "biases": False}))
    itemsize = next(model.parameters()).dtype.itemsize
    least = itemsize * (total + _VECTORS * trained)
    frozen = f" and {total - trained:,} frozen" if total > trained else ""
    number = math.ceil(least / _GPU)
    machine = "" if least < 1e9 else ": one GPU of 80 GB" if number == 1 else f": {number} GPUs of 80 GB"
    return (
        f"{trained:,} parameters{frozen}, {in_bytes(itemsize * total)}; a product of one vector holds "
        f"{in_bytes(least)} and what a forward keeps{machine}"
    )


def in_bytes(number: float) -> str:
    """Return 5.2 GB."""
    power = min(4, int(math.log(max(number, 1), 1000)))
    return f"{number / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def _published(target: Target, preset: str) -> Iterator[str]:
    """Yield what each published preset took, and of `preset` its units."""
    for name in PRESETS:
        if not (record := published_record(target, name)):
            continue
        took = f"{record['unit_seconds']:,.0f} s of CPU time, {record['num_matvecs']:,} products"
        yield f"published, {name}: {took} ({record['device']})"
        for unit in record["units"] if name == preset else ():
            yield f"  {unit['count']} x {unit['name']}, {unit['seconds']:,.0f} s"


class _NotStoredError(BaseException):
    """The first unit that is not there; no Exception, so that no target takes it for one of its own."""


class _LookingStore(Store):
    """A store that computes nothing and writes nothing."""

    def get_or_compute(self, name: str, config: Mapping[str, Any], compute: Any) -> dict[str, Any]:
        """Return the stored payload, or raise a _NotStoredError."""
        if (entry := self._read(self._path(name, config), quiet=True)) is None:
            raise _NotStoredError(name)
        self.hits += 1
        return dict(entry["payload"])


def stored_units(target: Target, cfg: DictConfig) -> Iterator[str]:
    """Yield how many units are stored, and which is the first that is not: the target's own code is followed.

    The key of a unit holds numbers that units before it have found (damping, say), so that no config alone tells
    it. Cost: loading data and building networks; so nothing is looked for at `paper`, nor without a store.
    """
    if cfg.preset == "paper" or cfg.force or not Path(cfg.store.root).is_dir():
        return
    own = silenced(cfg)
    run = Run(own, key=target.key, title=target.title)
    run.store = _LookingStore(cfg.store.root)
    try:
        target.load("compute")(run, own)
    except _NotStoredError as first:
        yield f"store: {run.store.hits} units; first that is not there: {first} (then none was looked for)"
    except Exception as error:  # whatever stops a run without its data
        yield f"store: {run.store.hits} units; not followed further ({str(error).partition(chr(10))[0][:80]})"
    else:
        yield f"store: {run.store.hits} units, all there are"
