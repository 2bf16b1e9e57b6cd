"""Where runs are recorded: in W&B, offline by default, with trackio, or nowhere."""

from __future__ import annotations

import importlib
import io
import os
import re
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig

from curvlab.lab.runs.overrides import ConfigurationError


class Tracker:
    """One run that is recorded nowhere: what a tracker can be told. `finish` comes last and once."""

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Record numbers; a number that was there before becomes a curve over time."""

    def log_curves(self, x: str, curves: pd.DataFrame) -> None:
        """Record the columns of a table as curves over its index, whose name is `x`; nan is no point."""
        for place, row in curves.iterrows():
            self.log({x: float(place)} | {str(name): float(y) for name, y in row.dropna().items()})  # type: ignore[arg-type]  # an index of numbers

    def log_table(self, name: str, table: pd.DataFrame) -> None:
        """Record a table under `name`."""

    def log_figure(self, name: str, path: Path) -> None:
        """Record an image under `name`."""

    def log_folder(self, name: str, folder: Path) -> None:
        """Record all files of a result folder as one artifact."""

    def finish(self, error: str = "") -> None:
        """Close the run; a message marks it as failed, and is kept as `error` in its summary."""


class _PackageTracker(Tracker):
    """Records with a package that has W&B's words for tables and images.

    Args:
        name: of the package, of its extra, and of the tracker.
    """

    def __init__(self, name: str) -> None:
        try:
            self._package: Any = importlib.import_module(name)
        except ImportError:
            raise ConfigurationError(
                f'tracker={name} needs the package {name}: pip install "curvlab[{name}]", or record nothing with '
                "tracker=none."
            ) from None
        self._run: Any = self._package

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Record numbers; a number that was there before becomes a curve over time."""
        self._run.log(dict(metrics))

    def log_table(self, name: str, table: pd.DataFrame) -> None:
        """Record a table under `name`."""
        self.log({name: self._package.Table(dataframe=table.reset_index(drop=True))})

    def log_figure(self, name: str, path: Path) -> None:
        """Record an image under `name`."""
        self.log({name: self._package.Image(str(path))})


class WandbTracker(_PackageTracker):
    """Records to Weights & Biases.

    Args:
        settings: the config's `tracker`. mode: "offline" needs neither account nor network, "online" needs
            `wandb login` once; project; entity: team or user, None is the account's default; folder: wandb's
            files go to <folder>/wandb, its caches included.
        run: name, group, job_type, tags and config, as `wandb.init` takes them.
    """

    def __init__(self, settings: DictConfig, **run: Any) -> None:
        if settings.mode not in ("offline", "online"):
            raise ConfigurationError(
                f"unknown tracker.mode={settings.mode}; use offline or online, or tracker=none."
            )
        folder = Path(settings.folder).absolute()
        for variable in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR", "WANDB_CONFIG_DIR"):
            if settings.mode == "offline":  # online, the user's own places may hold settings that count
                os.environ.setdefault(variable, str(folder / "wandb" / ".cache"))
        super().__init__("wandb")
        (folder / "wandb").mkdir(parents=True, exist_ok=True)
        self._run = self._package.init(
            **run,
            mode=settings.mode,
            project=settings.project,
            entity=settings.entity,
            dir=str(folder),
            settings=self._package.Settings(console="off", silent=True),
        )

    def log_curves(self, x: str, curves: pd.DataFrame) -> None:
        """Record the columns of a table as curves over its index, whose name is `x`; nan is no point."""
        for name in curves:
            self._run.define_metric(name, step_metric=x)
        super().log_curves(x, curves)

    def log_table(self, name: str, table: pd.DataFrame) -> None:
        """Record a table under `name`."""
        rows = table.astype(object).to_numpy().tolist()  # a DataFrame W&B reads cell by cell: seconds a target
        self.log({name: self._package.Table(columns=[*map(str, table)], data=rows)})

    def log_folder(self, name: str, folder: Path) -> None:
        """Record all files of a result folder as one artifact."""
        artifact = self._package.Artifact(re.sub(r"[^\w.-]", "-", name)[:128], type="result")
        for path in sorted(folder.rglob("[!.]*")):  # add_dir would write to the terminal
            if path.is_file():
                artifact.add_file(str(path), name=path.relative_to(folder).as_posix())
        self._run.log_artifact(artifact)

    def finish(self, error: str = "") -> None:
        """Close the run; a message marks it as failed, and is kept as `error` in its summary."""
        if error:
            self._run.summary["error"] = error
        self._run.finish(exit_code=int(bool(error)))


class TrackioTracker(_PackageTracker):
    """Records with trackio, in a folder of this machine: `TRACKIO_DIR=outputs/trackio trackio show`.

    Args:
        settings: the config's `tracker`. project; folder: its files go to <folder>/trackio.
        run: name, group, job_type, tags and config, as `wandb.init` takes them; trackio has no tags and no job
            type, so that both stand in its config.
    """

    def __init__(self, settings: DictConfig, **run: Any) -> None:
        os.environ["TRACKIO_DIR"] = str(Path(settings.folder).absolute() / "trackio")  # read when it is imported
        super().__init__("trackio")
        config = run["config"] | {name: run[name] for name in ("job_type", "tags")}
        with redirect_stdout(io.StringIO()):
            self._package.init(
                settings.project, name=run["name"], group=run["group"], config=config,
                embed=False, auto_log_cpu=False, auto_log_gpu=False,
            )  # fmt: skip

    def finish(self, error: str = "") -> None:
        """Close the run; a message is kept as `error`, since trackio knows no failed runs."""
        if error:
            self.log({"error": error})
        with redirect_stdout(io.StringIO()):
            self._package.finish()


def start_tracker(settings: DictConfig, **run: Any) -> Tracker:
    """Return the tracker that `tracker=NAME` chose.

    Args:
        settings: the config's `tracker`: `name`, `project` and `folder`, and for wandb `mode` and `entity`.
        run: what it is called there: name, group (the paper), job_type (the target), tags (preset, commit,
            overrides, sweep), and config, without paths.
    """
    kinds: dict[str, Callable[..., Tracker]] = {"wandb": WandbTracker, "trackio": TrackioTracker}
    if settings.name in kinds:
        return kinds[settings.name](settings, **run)
    if settings.name == "none":
        return Tracker()
    raise ConfigurationError(f"unknown tracker {settings.name!r}; use tracker=wandb, trackio or none.")
