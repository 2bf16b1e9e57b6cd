"""Where runs are recorded: in W&B, offline by default, or nowhere."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig

from curvlab.lab.runs.overrides import ConfigurationError


class Tracker:
    """One run that is recorded nowhere: what a tracker can be told. `finish` comes last and once."""

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record numbers, as a curve when they come with steps."""

    def log_table(self, name: str, table: pd.DataFrame) -> None:
        """Record a table under `name`."""

    def log_figure(self, name: str, path: Path) -> None:
        """Record an image under `name`."""

    def log_folder(self, name: str, folder: Path) -> None:
        """Record all files of a result folder as one artifact."""

    def finish(self, exit_code: int = 0) -> None:
        """Close the run; anything but 0 marks it as failed."""


class WandbTracker(Tracker):
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
        try:
            import wandb
        except ImportError:
            raise ConfigurationError(
                'tracker=wandb needs the package wandb: pip install "curvlab[wandb]", or record nothing with '
                "tracker=none."
            ) from None
        self._wandb = wandb
        (folder / "wandb").mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            **run,
            mode=settings.mode,
            project=settings.project,
            entity=settings.entity,
            dir=str(folder),
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record numbers, as a curve when they come with steps."""
        self._run.log(dict(metrics), step=step)

    def log_table(self, name: str, table: pd.DataFrame) -> None:
        """Record a table under `name`."""
        self._run.log({name: self._wandb.Table(dataframe=table.reset_index(drop=True))})

    def log_figure(self, name: str, path: Path) -> None:
        """Record an image under `name`."""
        self._run.log({name: self._wandb.Image(str(path))})

    def log_folder(self, name: str, folder: Path) -> None:
        """Record all files of a result folder as one artifact."""
        artifact = self._wandb.Artifact(re.sub(r"[^\w.-]", "-", name)[:128], type="result")
        for path in sorted(folder.rglob("[!.]*")):  # add_dir would write to the terminal
            if path.is_file():
                artifact.add_file(str(path), name=path.relative_to(folder).as_posix())
        self._run.log_artifact(artifact)

    def finish(self, exit_code: int = 0) -> None:
        """Close the run; anything but 0 marks it as failed."""
        self._run.finish(exit_code=exit_code)


def start_tracker(settings: DictConfig, **run: Any) -> Tracker:
    """Return the tracker that `tracker=NAME` chose.

    Args:
        settings: the config's `tracker`: `name`, and for wandb `mode`, `project`, `entity` and `folder`.
        run: what it is called there: name, group (the paper), job_type (the target), tags (preset and commit), and
            config, without paths.
    """
    if settings.name == "none":
        return Tracker()
    if settings.name == "wandb":
        return WandbTracker(settings, **run)
    raise ConfigurationError(f"unknown tracker {settings.name!r}; use tracker=wandb or tracker=none.")
