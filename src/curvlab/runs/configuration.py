"""Entry points of experiments: Hydra, with mistyped overrides refused before anything runs."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser  # the parser that hydra.main itself uses
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from curvlab.runs.command import Command
from curvlab.runs.overrides import ConfigurationError, check_overrides

VERSION_BASE = "1.3"
_EXIT_USAGE = 2
_EXIT_INTERRUPTED = 130

Task = Callable[[DictConfig], Any]


def main(config_name: str) -> Callable[[Task], Callable[..., Any]]:
    """Make a function the entry point of `python -m experiments.<paper>.<item>`.

    Hydra's command line, sweeps (`-m`), `--help` and `--cfg job` all work. An unknown key or choice ends the
    process with status 2 before anything runs. Called with a config (see `load_config`), the function just runs.

    Args:
        config_name: primary config below conf/, e.g. "lissa/fig1_pbrf_scatter".
    """

    def decorate(task: Task) -> Callable[..., Any]:
        @functools.wraps(task)
        def job(cfg: DictConfig) -> Any:
            Command(config_name, tuple(HydraConfig.get().overrides.task)).attach(cfg)
            try:
                return task(cfg)
            except ConfigurationError as error:  # found late, e.g. by the tracker: still no traceback
                _fail(error)

        @functools.wraps(task)
        def entry(cfg: DictConfig | None = None) -> Any:
            if cfg is not None:
                return task(cfg)
            try:
                folder = config_folder()
                _check_command_line(folder, config_name)
            except ConfigurationError as error:
                _fail(error)
            # torch.func warns on first use of what it does itself; nothing a user could change.
            warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=FutureWarning)
            try:
                hydra.main(version_base=VERSION_BASE, config_path=str(folder), config_name=config_name)(job)()
            except KeyboardInterrupt:
                sys.exit(_EXIT_INTERRUPTED)

        return entry

    return decorate


def load_config(config_name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Return the config that the command line would give, for tests and notebooks.

    Args:
        config_name: primary config below conf/, e.g. "lissa/fig1_pbrf_scatter".
        overrides: e.g. ["preset=smoke", "data=digits"]; no sweeps.

    Raises:
        ConfigurationError: for an unknown key or choice.
    """
    with _initialized(config_folder()):
        check_overrides(config_name, overrides)
        cfg = hydra.compose(config_name, list(overrides))
    return Command(config_name, tuple(overrides)).attach(cfg)


def config_folder() -> Path:
    """Return conf/ of the working directory, or else of the source tree that this package runs from."""
    for root in (Path.cwd(), Path(__file__).resolve().parents[3]):
        if (root / "conf" / "base.yaml").is_file():
            return root / "conf"
    raise ConfigurationError("no conf/base.yaml here; run from the root of the repository.")


@contextmanager
def _initialized(folder: Path) -> Iterator[None]:
    with hydra.initialize_config_dir(str(folder), version_base=VERSION_BASE):
        yield


def _check_command_line(folder: Path, config_name: str) -> None:
    arguments = get_args_parser().parse_args()
    # Options that compose nothing, or from folders of the user's own: left to Hydra.
    leave = ("shell_completion", "hydra_help", "experimental_rerun", "config_dir", "config_path")
    if any(getattr(arguments, option) for option in leave):
        return
    with _initialized(folder):
        check_overrides(arguments.config_name or config_name, arguments.overrides, multirun=arguments.multirun)


def _fail(error: ConfigurationError) -> None:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(_EXIT_USAGE)
