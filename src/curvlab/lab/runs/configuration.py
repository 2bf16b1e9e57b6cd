"""The command line of a target: Hydra, with mistyped overrides refused, and failures from outside in one line."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser  # the parser that hydra.main itself uses
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError

from curvlab.lab.runs import sweeps
from curvlab.lab.runs.overrides import ConfigurationError, checked_config, expand

VERSION_BASE = "1.3"
_EXIT_FAILED = 1
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130

Job = Callable[[DictConfig], Any]
# Overrides that change where and how a run works, not which numbers it finds.
_NEUTRAL = re.compile(
    r"(preset|sweep|force|progress|device|tracker(\..*)?|(store|results|data)\.root|hydra[./].*)(@.*)?", re.ASCII
)
_MAX_LENGTH = 80
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FOLDERS = ("results.root", "store.root", "tracker.folder")  # the last not where there is no tracker
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT}
# As PyTorch's allocators, Python, and the loader of shared libraries say it.
_NO_MEMORY = ("out of memory", "allocate memory", "not enough memory", "failed to map segment")
_TO_LOAD = 4 * 2**30  # bytes of address space that PyTorch, pandas and this library take
_KEPT = "Finished units of work are kept: the same command goes on where it stopped."


@dataclass(frozen=True)
class Command:
    """A target's command line.

    Args:
        make_target: name in the Makefile, e.g. "lissa-fig1"; "" for a config made by hand.
        overrides: as typed, e.g. ("preset=laptop", "model=lenet").
        sweep: id of the sweep that it is a job of; "" for a run of its own.
    """

    make_target: str = ""
    overrides: tuple[str, ...] = ()
    sweep: str = ""

    @classmethod
    def of(cls, cfg: DictConfig) -> Command:
        """Return the command that `attach` put into `cfg`; an empty one for a config made by hand."""
        command = OmegaConf.select(cfg, "command")
        if command is None:
            return cls()
        return cls(str(command.make_target), tuple(command.overrides), str(command.sweep))

    def attach(self, cfg: DictConfig) -> DictConfig:
        """Put the command into `cfg` under `command`, and return `cfg`."""
        with open_dict(cfg):
            own = {"make_target": self.make_target, "overrides": list(self.overrides), "sweep": self.sweep}
            cfg.command = own
        return cfg

    @property
    def changes(self) -> tuple[str, ...]:
        """The overrides that change the numbers, sorted; of several for one key, the last."""
        last = {_key(override): override for override in self.overrides}
        return tuple(sorted(override for key, override in last.items() if not _NEUTRAL.fullmatch(key)))

    @property
    def label(self) -> tuple[str, ...]:
        """What tells a sweep's jobs apart: `changes`, and the device where one was asked for."""
        devices = [override for override in self.overrides if _key(override) == "device"]
        return (*self.changes, *devices[-1:])

    def folder_name(self, preset: str) -> str:
        """Return `preset`, or e.g. "laptop+damping=0.1,model=lenet" for a variation of it.

        A variation never shares its folder with the published result: a name that had to be shortened or
        cleaned ends in a hash of the overrides.
        """
        if not self.changes:
            return preset
        typed = ",".join(self.changes)
        clean = re.sub(r"[^A-Za-z0-9_.,=~+-]", "_", typed)
        name = f"{preset}+{clean}"
        if clean == typed and len(name) <= _MAX_LENGTH:
            return name
        suffix = f"-{hashlib.sha256(typed.encode()).hexdigest()[:8]}"
        return name[: _MAX_LENGTH - len(suffix)] + suffix

    def make_line(self, preset: str) -> str:
        """Return e.g. `make lissa-fig1 PRESET=laptop ARGS="model=lenet"`; "" for a config made by hand."""
        if not self.make_target:
            return ""
        line = f"make {self.make_target} PRESET={preset}"
        arguments = _joined(self.changes).replace("$", "$$")
        if not arguments:
            return line
        quoted = shlex.quote(arguments) if re.search(r'["$`\\!]', arguments) else f'"{arguments}"'
        return f"{line} ARGS={quoted}"

    def python_line(self, preset: str) -> str:
        """Return e.g. `python -m experiments run lissa-fig1 preset=laptop`; "" for a config made by hand."""
        if not self.make_target:
            return ""
        return f"python -m experiments run {self.make_target} {_joined([f'preset={preset}', *self.changes])}"


@dataclass(frozen=True)
class Entry:
    """What a command line is about.

    Args:
        config_name: primary config below `folder`, e.g. "lissa/fig1".
        folder: the configs.
        make_target: name in the Makefile, for the record.
    """

    config_name: str
    folder: Path
    make_target: str = ""

    def command(self, given: Mapping[str, str], overrides: Sequence[str]) -> Command:
        """Return the record of `overrides`, as Hydra had them, in the words that were typed."""
        typed = dict.fromkeys(given.get(override, override) for override in overrides)
        return Command(self.make_target, tuple(typed), os.environ.get(sweeps.SWEEP_VARIABLE, ""))


def main(entry: Entry, job: Job) -> None:
    """Run `job` with the config of this process's command line.

    Hydra's command line, sweeps (`-m`, `sweep=`), `--help` and `--cfg job` all work. An unknown key or choice ends
    the process with status 2 before anything runs. Missing data, a folder that cannot be written and a full disk
    end it with one line, too, and status 1; of a sweep this job alone, and status 1 at the end.
    """
    try:
        given, sweep = _check_command_line(entry)
    except ConfigurationError as error:
        _fail(error)

    def task(cfg: DictConfig) -> Any:
        command = entry.command(given, HydraConfig.get().overrides.task)
        command.attach(cfg)

        def checked() -> Any:
            if (problem := unwritable(cfg)) is not None:
                raise _UnwritableError(problem)
            return job(cfg)

        if command.sweep:
            name = " ".join([str(cfg.preset), *command.label])
            job_id = str(HydraConfig.get().job.id)
            return sweeps.attempt(command.sweep, job_id, name, checked, lambda error: explanation(error, cfg))
        try:
            return checked()
        except Exception as error:
            if (problem := explanation(error, cfg)) is None:
                raise
            _fail(problem, _EXIT_USAGE if isinstance(error, ConfigurationError) else _EXIT_FAILED)

    def folder(overrides: Sequence[str]) -> Path:
        own = dict(override.partition("=")[::2] for override in overrides)
        name = entry.command(given, overrides).folder_name(preset_of(overrides))
        return Path(own.get("results.root", "results"), entry.config_name, name)

    # torch.func warns on first use of what it does itself; nothing a user could change.
    warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=FutureWarning)
    decorate = hydra.main(version_base=VERSION_BASE, config_path=str(entry.folder), config_name=entry.config_name)
    try:
        with sweeps.told(sweep, folder):
            decorate(task)()
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)


def preset_of(overrides: Sequence[str]) -> str:
    """Return the preset that overrides choose."""
    chosen = [override.partition("=")[2] for override in overrides if override.startswith("preset=")]
    return chosen[-1] if chosen else "embedded"


def load_config(entry: Entry, overrides: Sequence[str] = ()) -> DictConfig:
    """Return the config that the command line would give, for tests and notebooks.

    Args:
        entry: where the configs are.
        overrides: e.g. ["preset=smoke", "data=digits"]; no sweeps.

    Raises:
        ConfigurationError: for an unknown key or choice.
    """
    with hydra.initialize_config_dir(str(entry.folder), version_base=VERSION_BASE):
        given = expand(entry.config_name, overrides)
        cfg = checked_config(entry.config_name, list(given))
    return entry.command(given, list(given)).attach(cfg)


def _check_command_line(entry: Entry) -> tuple[dict[str, str], str]:
    """Check the overrides, put the long forms into sys.argv; return them with what was typed, and a sweep's id."""
    arguments = get_args_parser().parse_args()
    # Options that compose nothing, or from folders of the user's own: left to Hydra.
    leave = ("shell_completion", "hydra_help", "experimental_rerun", "config_dir", "config_path")
    if any(getattr(arguments, option) for option in leave):
        return {}, ""
    config_name = arguments.config_name or entry.config_name
    with hydra.initialize_config_dir(str(entry.folder), version_base=VERSION_BASE):
        given = expand(config_name, arguments.overrides)
        checked_config(config_name, list(given), multirun=arguments.multirun)
    dirs = [word for word in given if word.startswith(("hydra.run.dir=", "hydra.sweep.dir="))]
    for key, _, folder in (word.partition("=") for word in dirs or ["hydra.run.dir=outputs"]):
        if (problem := _unwritable(key, Path(folder))) is not None:  # Hydra would end in a trace
            raise ConfigurationError(problem)
    options = [argument for argument in sys.argv[1:] if argument not in arguments.overrides]
    named = [f"hydra.job.name={entry.make_target}"] if entry.make_target else []  # what a queue shows
    sweep = ""
    if sweeps.is_sweep(arguments.overrides, arguments.multirun):
        sweep = sweeps.sweep_id(entry.make_target, arguments.overrides)
        named += [f"+hydra.job.env_set.{sweeps.SWEEP_VARIABLE}={sweep}"]
    sys.argv[1:] = [*options, *named, *given]
    return given, sweep


def _fail(error: ConfigurationError | str, status: int = _EXIT_USAGE) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(status)


def _key(override: str) -> str:
    return override.split("=", 1)[0].lstrip("+~")


def _joined(overrides: Sequence[str]) -> str:
    return " ".join(shlex.quote(override) for override in overrides)


# ------------------------------------------------------------------------------------ failures
class _UnwritableError(OSError):
    """A folder that a run writes to cannot be written."""


def unwritable(cfg: DictConfig) -> str | None:
    """Return what is wrong with a folder that a run writes to, before anything is computed; None: nothing."""
    roots = {key: OmegaConf.select(cfg, key) for key in _FOLDERS}
    return next(filter(None, (_unwritable(key, Path(root)) for key, root in roots.items() if root)), None)


def _unwritable(key: str, root: Path) -> str | None:
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
    if any(_is_out_of_memory(cause) for cause in _causes(error)):
        return _no_memory(error)
    # Here, because torch comes with it: only after a failure.
    from curvlab.lab.data.download import DamagedDataError, DataNotFoundError

    changed = [line for line in Command.of(cfg).overrides if line.startswith(("~", "+"))]
    for cause in _causes(error):
        if isinstance(cause, ConfigAttributeError | ConfigKeyError) and changed:
            return f"this target reads the key {cause.full_key!r}, which a task lacks after {' '.join(changed)}."
        if isinstance(cause, ConfigurationError | _UnwritableError | DataNotFoundError | DamagedDataError):
            return str(cause)
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return _full(cause, cfg)
        if isinstance(cause, OSError) and cause.errno in _REFUSED and cause.filename is not None:
            path = Path(os.fsdecode(cause.filename)).absolute()
            for key in _FOLDERS:
                root = Path(OmegaConf.select(cfg, key) or os.devnull).absolute()
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


def too_little_memory() -> str | None:
    """Return what is wrong with `ulimit -v`, before torch is loaded; None: nothing, or no such limit (Windows)."""
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY or limit >= _TO_LOAD:
        return None
    return (
        f"the address space is limited to {limit / 2**30:.2g} GiB (ulimit -v), and loading PyTorch takes "
        f"{_TO_LOAD / 2**30:.0f}: raise the limit to 6 GiB or more (8388608 is 8 GiB), or take it away, "
        "ulimit -v unlimited."
    )


def _is_out_of_memory(error: BaseException) -> bool:
    is_told = isinstance(error, RuntimeError | ImportError | OSError)
    return isinstance(error, MemoryError) or (is_told and any(text in str(error).lower() for text in _NO_MEMORY))


def _no_memory(error: BaseException) -> str:
    first = (str(error).splitlines() or [""])[0] or type(error).__name__
    return (
        f"memory ran out ({first}). Raise the limit if there is one (ulimit -v, Slurm's --mem, a container's), "
        "run fewer targets side by side (CURVLAB_JOBS=1), or take a smaller preset or batch_size (`--help` lists "
        f"the keys). {_KEPT}"
    )


def _another(key: str) -> str:
    variable = " or the environment variable CURVLAB_STORE" if key == "store.root" else ""
    return f"Choose another folder with {key}=FOLDER{variable}."


def _full(error: OSError, cfg: DictConfig) -> str:
    """Name the disk with the least room among those that a run writes to: a failed write does not say which."""
    written = error.filename2 if error.filename2 is not None else error.filename  # of a copy the second
    if written is not None:
        place = f"'{os.fsdecode(written)}'"
    else:
        roots = {key: Path(root).absolute() for key in _FOLDERS if (root := OmegaConf.select(cfg, key))}
        free = {key: _free_bytes(root) for key, root in roots.items()}
        fullest = min(free, key=lambda key: free[key])
        place = f"{fullest}={roots[fullest]}, {free[fullest] / 2**20:.0f} MiB free"
    return (
        f"no space is left on the disk ({place}; {error.strerror}). Free some, or write to "
        f"another disk with {' '.join(f'{key}=FOLDER' for key in _FOLDERS)}. {_KEPT}"
    )


def _free_bytes(root: Path) -> int:
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    return shutil.disk_usage(there).free
