"""Entry points of experiments: Hydra, with mistyped overrides refused before anything runs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser  # the parser that hydra.main itself uses
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from curvlab.lab.runs.command import Command
from curvlab.lab.runs.failures import explanation, unwritable
from curvlab.lab.runs.overrides import ConfigurationError, checked_config

VERSION_BASE = "1.3"
_EXIT_FAILED = 1
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130

Job = Callable[[DictConfig], Any]
Expand = Callable[[str, Sequence[str]], dict[str, str]]


@dataclass(frozen=True)
class Entry:
    """What a command line is about.

    Args:
        config_name: primary config below `folder`, e.g. "lissa/fig1/target".
        folder: the configs.
        make_target: name in the Makefile, for the record.
        module: what `python -m` runs, for the record.
        expand: takes the config's name and the overrides as typed, and returns what Hydra is given, each with the
            typed one that it comes from: this is where short forms are made long.
    """

    config_name: str
    folder: Path
    make_target: str = ""
    module: str = ""
    expand: Expand = lambda config_name, overrides: {override: override for override in overrides}

    def command(self, given: Mapping[str, str], overrides: Sequence[str]) -> Command:
        """Return the record of `overrides`, as Hydra had them, in the words that were typed."""
        typed = dict.fromkeys(given.get(override, override) for override in overrides)
        return Command(self.make_target, self.module, tuple(typed))


def main(entry: Entry, job: Job) -> None:
    """Run `job` with the config of this process's command line.

    Hydra's command line, sweeps (`-m`), `--help` and `--cfg job` all work. An unknown key or choice ends the
    process with status 2 before anything runs. Missing data, a folder that cannot be written and a full disk end
    it with one line, too, and status 1.
    """
    try:
        given = _check_command_line(entry)
    except ConfigurationError as error:
        _fail(error)

    def task(cfg: DictConfig) -> Any:
        entry.command(given, HydraConfig.get().overrides.task).attach(cfg)
        if (problem := unwritable(cfg)) is not None:
            _fail(problem, _EXIT_FAILED)
        try:
            return job(cfg)
        except ConfigurationError as error:  # found late, e.g. by the tracker: still no traceback
            _fail(error)
        except Exception as error:
            if (problem := explanation(error, cfg)) is None:
                raise
            _fail(problem, _EXIT_FAILED)

    # torch.func warns on first use of what it does itself; nothing a user could change.
    warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=FutureWarning)
    decorate = hydra.main(version_base=VERSION_BASE, config_path=str(entry.folder), config_name=entry.config_name)
    try:
        decorate(task)()
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)


def load_config(entry: Entry, overrides: Sequence[str] = ()) -> DictConfig:
    """Return the config that the command line would give, for tests and notebooks.

    Args:
        entry: where the configs are.
        overrides: e.g. ["preset=smoke", "data=digits"]; no sweeps.

    Raises:
        ConfigurationError: for an unknown key or choice.
    """
    with _initialized(entry.folder):
        given = entry.expand(entry.config_name, overrides)
        cfg = checked_config(entry.config_name, list(given))
    return entry.command(given, list(given)).attach(cfg)


@contextmanager
def _initialized(folder: Path) -> Iterator[None]:
    with hydra.initialize_config_dir(str(folder), version_base=VERSION_BASE):
        yield


def _check_command_line(entry: Entry) -> dict[str, str]:
    """Check the overrides, put the long forms into sys.argv, and return them with what was typed."""
    arguments = get_args_parser().parse_args()
    # Options that compose nothing, or from folders of the user's own: left to Hydra.
    leave = ("shell_completion", "hydra_help", "experimental_rerun", "config_dir", "config_path")
    if any(getattr(arguments, option) for option in leave):
        return {}
    config_name = arguments.config_name or entry.config_name
    with _initialized(entry.folder):
        given = entry.expand(config_name, arguments.overrides)
        checked_config(config_name, list(given), multirun=arguments.multirun)
    options = [argument for argument in sys.argv[1:] if argument not in arguments.overrides]
    named = [f"hydra.job.name={entry.make_target}"] if entry.make_target else []  # what a queue shows
    sys.argv[1:] = [*options, *named, *given]
    return given


def _fail(error: ConfigurationError | str, status: int = _EXIT_USAGE) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(status)
