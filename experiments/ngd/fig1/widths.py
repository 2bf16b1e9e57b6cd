"""The networks of Fig. 1: each task's model at every width."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from omegaconf import DictConfig

from curvlab.lab import Run
from experiments.ngd.trajectories import Network

PLACE = ("task", "width")  # the columns that tell the networks apart


def networks(run: Run, cfg: DictConfig) -> list[Network]:
    """Return the networks of all tasks, each with its `width` in its settings.

    A run of one width compares that one and samples it again, whatever `tuned_and_matched` and `cutoffs` name.

    Raises:
        ValueError: a width of `tuned_and_matched` or `cutoffs` is not among several widths of the task.
    """
    found = []
    for task in Network.each(run, cfg):
        settings = task.settings
        parts = [part for part in ("tuned_and_matched", "cutoffs") if settings[part].widths]
        alone = {part: {"widths": settings.widths} for part in parts if len(settings.widths) == 1}
        for part in parts:
            missing = [width for width in settings[part].widths if width not in settings.widths]
            if missing and not alone:
                raise ValueError(
                    f"{part}.widths of {task.name} has {missing}, not among its widths: choose of "
                    f"{list(settings.widths)}"
                )
        for width in settings.widths:
            change: dict[str, Any] = {"width": width, "seed_name": f"{task.seed_name}, width {width}", **alone}
            if width:  # 0: the model as it is
                change["model"] = {"hidden_sizes": [width] * len(settings.model.hidden_sizes)}
            found.append(task.changed(**change))
    return found


def measured_again(network: Network) -> Iterator[tuple[str, DictConfig, int]]:
    """Yield "sgd" or "ngd", its settings, and seed, of a network whose width is in `cutoffs.widths`."""
    settings = network.settings
    if settings.width in settings.cutoffs.widths:
        for name, optimizer in (("sgd", "sgd"), ("ngd", settings.judged_optimizer)):
            for seed in settings.cutoffs.seeds:
                yield name, settings.optimizers[optimizer], seed


def place_of(network: Network) -> dict[str, Any]:
    """Return where a network stands in the tables."""
    return {"task": network.label, "width": network.settings.width}


def by_network(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield each network's name, "ffnn-1-layer-digits-width-16" or a task's that has one model, and its rows."""
    for (task, width), own in table.groupby([*PLACE], sort=False):
        yield f"{task}-width-{width}" if width else str(task), own


def at(table: pd.DataFrame, like: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the network that the rows `like` are of."""
    first = like.iloc[0]
    return table[(table.task == first.task) & (table.width == first.width)]
