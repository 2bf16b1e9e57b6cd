"""run.json: how a result was made, enough to make it again, and nothing of the machine but its speed.

target, key, title, preset, command, python_command, config
units       [{"name", "version", "function", "commit", "clean", "versions", "device", "count", "seconds",
"num_matvecs"}, ...]: the units of work, each once, together where all else is the same
assembled, judged, drawn    {"commit", "clean"}: the code that put the tables together, judged and drew
settings    [{"name", "ours", "paper"}, ...]: our settings beside the paper's
wall_seconds of the last run; unit_seconds (CPU) and num_matvecs, stored units included; num_units asked for
versions, device, num_threads, seeds, data (checksums), peak_memory_bytes, store, and notes of the target's own
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from curvlab.files import write_atomically
from curvlab.lab.runs.store import plain

RECORD = "run.json"
UNKNOWN = "unknown"
_PACKAGES = ("curvlab", "torch", "torchvision", "numpy")
# A path of this machine, inside a longer text: absolute, of a user, or out of the repository. Not the // of a URL.
_PATH = re.compile(r"(?<![\w.>/])(?:file:/+|~\w*/|(?:\.\./)+|/)(?=[\w.~-])[^\s'\",;\]})]*")


# ------------------------------------------------------------------------------------ code
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


def read_commit(results_root: str = "results") -> Commit:
    """Return the state of the working directory's repository.

    Args:
        results_root: left out of the comparison: a target does not make the next one's tree unclean.
    """
    commit = git("rev-parse", "HEAD")
    inside = not (Path(results_root).is_absolute() or ".." in Path(results_root).parts)
    changes = git("status", "--porcelain", "--", ".", *([f":(exclude){results_root}"] if inside else []))
    return Commit(commit or UNKNOWN, UNKNOWN if changes is None or not commit else not changes)


def git(*arguments: str) -> str | None:
    """Return what `git ARGUMENTS` prints; None when it fails, or when there is no git."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


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


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that make the numbers."""
    return {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}


def function_name(compute: Callable[..., Any]) -> str:
    """Return "module:function" of a function or of a `functools.partial` of one."""
    while isinstance(compute, partial):
        compute = compute.func
    return f"{compute.__module__}:{getattr(compute, '__qualname__', type(compute).__qualname__)}"


@cache  # reading what is installed takes milliseconds, and each unit of work asks
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN


# ------------------------------------------------------------------------------------ machine
def device_name(device: torch.device) -> str:
    """Return the model of the processor or the GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = found.get("model name") or platform.processor() or platform.machine() or UNKNOWN
    if "cpu family" in found and not any(letter.isdigit() for letter in name):  # a virtual machine may hide it
        name += f" (family {found['cpu family']}, model {found['model']})"
    return name


def machine_of(device: torch.device) -> dict[str, Any]:
    """Return the keys of run.json that tell of the machine: versions, device, threads, peak memory so far."""
    # The largest resident size: Linux counts KiB, macOS bytes.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    gpu = {"peak_gpu_memory_bytes": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}
    return {
        "versions": versions(),
        "device": device_name(device),
        "num_threads": torch.get_num_threads(),
        "peak_memory_bytes": peak,
        **gpu,
    }


# ------------------------------------------------------------------------------------ what is written
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


def publishable_config(cfg: DictConfig) -> dict[str, Any]:
    """Return the resolved config without paths of this machine, the user's W&B team, and the command."""
    config = plain(cfg)
    config.pop("command", None)
    if isinstance(config.get("tracker"), dict):
        config["tracker"].pop("entity", None)
    published: dict[str, Any] = without_paths(config)
    return published


def without_paths(value: Any) -> Any:
    """Return `value` (dicts, lists, scalars) with "<path>" for every path of this machine."""
    if isinstance(value, Mapping):
        return {key: without_paths(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(entry) for entry in value]
    if not isinstance(value, str):
        return value
    is_path = re.match(r"/[\w.~-]|~\w*/|\.\.(/|$)|file:/", value)  # as a whole: it may have blanks
    return "<path>" if is_path else _PATH.sub("<path>", value)


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write `folder`/run.json in one step."""
    write_atomically(folder / RECORD, (_lines(record, depth=2) + "\n").encode())


def _lines(value: Any, *, depth: int, indent: str = "") -> str:
    """Return JSON with a line for each entry, `depth` levels down: what lies deeper, a unit say, is one line."""
    if depth == 0 or not value or not isinstance(value, Mapping | list | tuple):
        return json.dumps(value)
    inner = indent + " "
    below = partial(_lines, depth=depth - 1, indent=inner)
    if isinstance(value, Mapping):
        ends, entries = "{}", [f"{json.dumps(str(key))}: {below(entry)}" for key, entry in value.items()]
    else:
        ends, entries = "[]", [below(entry) for entry in value]
    return f"{ends[0]}\n{inner}" + f",\n{inner}".join(entries) + f"\n{indent}{ends[1]}"


def sign(folder: Path, act: str, commit: Commit) -> None:
    """Note in run.json which commit did something with the tables: `act` is "judged" or "drawn"."""
    write_record(folder, read_record(folder) | {act: {"commit": commit.commit, "clean": commit.clean}})


# ------------------------------------------------------------------------------------ what is read
def read_record(folder: Path) -> dict[str, Any]:
    """Return the content of `folder`/run.json.

    Raises:
        ValueError: it is missing or damaged; says which run writes it anew.
    """
    path = folder / RECORD
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{path.as_posix()} is missing: its run was stopped, or never made; run the target again."
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.as_posix()} is damaged ({error}): run the target again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.as_posix()} is damaged (it holds no keys): run the target again.")
    return content


def recorded_units(folder: Path) -> int | None:
    """Return how many units of work the folder's last run asked for; None when that cannot be known.

    Of a variation that never ran, the preset's own folder is taken.
    """
    for candidate in (folder, folder.with_name(folder.name.partition("+")[0])):
        try:
            return int(read_record(candidate)["num_units"])
        except (ValueError, KeyError, TypeError):
            continue
    return None
