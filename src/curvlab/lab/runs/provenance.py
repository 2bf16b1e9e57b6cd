"""How a result was made: enough to make it again, and nothing about the machine but its speed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from curvlab.lab.runs.canonical import plain
from curvlab.lab.runs.command import Command
from curvlab.lab.runs.overrides import ConfigurationError
from curvlab.lab.runs.redaction import path_roots, without_paths

UNKNOWN = "unknown"
_PACKAGES = ("curvlab", "torch", "torchvision", "numpy")


@dataclass(frozen=True)
class Commit:
    """State of the source tree; both are "unknown" without git or outside a repository.

    Args:
        commit: full hash.
        clean: whether nothing but results differed from it, untracked files included.
    """

    commit: str
    clean: bool | str

    @property
    def short(self) -> str:
        """The first eight digits."""
        return self.commit[:8]


@dataclass(frozen=True)
class Cost:
    """What a run took.

    Args:
        wall_seconds: this call; little when most units were stored already.
        unit_seconds: CPU time of all units used, as measured when each was computed.
        num_matvecs: as counted by the experiment, stored units included.
        store_hits: units that were there.
        store_misses: units that were computed.
    """

    wall_seconds: float
    unit_seconds: float
    num_matvecs: int
    store_hits: int
    store_misses: int


def provenance(
    cfg: DictConfig,
    *,
    key: str,
    title: str,
    assembled: Mapping[str, Any],
    units: Sequence[Mapping[str, Any]],
    num_units: int,
    settings: Sequence[Mapping[str, Any]],
    cost: Cost,
    data: Mapping[str, str],
    notes: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the content of run.json.

    Args:
        cfg: the config, with the command that `Command.attach` put there.
        key: the target's key, e.g. "lissa/fig1".
        title: one line for the report.
        assembled: of the code that made tables of the units: commit, whether the tree was clean.
        units: origins of the units of work, with their counts: the commits that computed the numbers.
        num_units: units that the experiment asked for, without those inside others.
        settings: name, ours and paper.
        cost: what the run took.
        data: checksum by data set.
        notes: entries of the experiment's own, e.g. `reduced`; its `seeds` replace ours.
    """
    command = Command.of(cfg)
    device = torch_device(str(cfg.device))
    record = {
        "target": command.make_target or key.replace("/", "-"),
        "key": key,
        "title": title,
        "preset": str(cfg.preset),
        "command": command.make_line(cfg.preset),
        "python_command": command.python_line(cfg.preset),
        "units": list(units),
        "assembled": dict(assembled),
        "versions": versions(),
        "device": device_name(device),
        "num_threads": torch.get_num_threads(),
        "seeds": [cfg.seed],
        "settings": list(settings),
        "data": dict(data),
        "wall_seconds": round(cost.wall_seconds, 3),
        "unit_seconds": round(cost.unit_seconds, 3),
        "peak_memory_bytes": _peak_memory(),
        **({"peak_gpu_memory_bytes": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}),
        "num_matvecs": cost.num_matvecs,
        "num_units": num_units,
        "store": {"hits": cost.store_hits, "misses": cost.store_misses},
        "config": publishable_config(cfg),
    }
    return without_paths(record | dict(notes), path_roots(plain(cfg)))


@cache
def source_hash() -> str:
    """Return a hash of all Python files of curvlab and of `experiments`: what may make a number another."""
    found = hashlib.sha256()
    for package in ("curvlab", "experiments"):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(Path(folder).rglob("*.py")):
                found.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:16]


def grouped(units: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one entry for each kind of unit and each code, versions and device that computed some.

    Its `count`, `seconds` and `num_matvecs` are those of its units in all.
    """
    summed = ("count", "seconds", "num_matvecs")
    groups: dict[str, dict[str, Any]] = {}
    for unit in units:
        counted = {"count": 1} | dict(unit)
        identity = repr(sorted((key, repr(value)) for key, value in counted.items() if key not in summed))
        if identity in groups:
            for key in summed:
                groups[identity][key] += counted[key]
        else:
            groups[identity] = counted
    return [group | {"seconds": round(group["seconds"], 3)} for group in groups.values()]


def function_name(compute: Callable[..., Any]) -> str:
    """Return "module:function" of a function or of a `functools.partial` of one."""
    while isinstance(compute, partial):
        compute = compute.func
    return f"{compute.__module__}:{getattr(compute, '__qualname__', type(compute).__qualname__)}"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that make the numbers."""
    return {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}


def publishable_config(cfg: DictConfig) -> dict[str, Any]:
    """Return the resolved config without paths of this machine, the user's W&B team, and the command."""
    config = plain(cfg)
    roots = path_roots(config)
    config.pop("command", None)
    if isinstance(config.get("tracker"), dict):
        config["tracker"].pop("entity", None)
    return without_paths(config, roots)


def read_commit(results_root: str = "results") -> Commit:
    """Return the state of the working directory's repository.

    Args:
        results_root: left out of the comparison: a target does not make the next one's tree unclean.
    """
    commit = git("rev-parse", "HEAD")
    inside = not (Path(results_root).is_absolute() or ".." in Path(results_root).parts)
    exclude = [f":(exclude){results_root}"] if inside else []
    changes = git("status", "--porcelain", "--", ".", *exclude)
    return Commit(commit or UNKNOWN, UNKNOWN if changes is None or not commit else not changes)


def torch_device(name: str) -> torch.device:
    """Return the device of `device=NAME`; `auto` is a GPU when there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigurationError(f"device={name} is no device; use cpu, cuda, cuda:1 or auto.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(f"device={name}, but torch sees no GPU here; use device=cpu or device=auto.")
    return device


def check_seed(seed: object) -> None:
    """Raise unless `seed=` is a whole number; any other text would be a seed of its own, and a typing error."""
    if type(seed) is not int:
        raise ConfigurationError(f"seed={seed} is no whole number; use seed=0, or seed=0,1,2 with -m.")


def device_name(device: torch.device) -> str:
    """Return the model of the processor or the GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine() or UNKNOWN


def git(*arguments: str) -> str | None:
    """Return what `git ARGUMENTS` prints; None when it fails, or when there is no git."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN


def _peak_memory() -> int:
    """Return the largest resident size of this process so far, in bytes (Linux counts KiB, macOS bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
