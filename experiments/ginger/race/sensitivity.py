"""Ginger over decay and rank, the other settings as tuned; and over damping, which the paper does not vary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from curvlab.lab import Run, task_settings
from experiments.ginger.race.final import final_run, summarised
from experiments.ginger.race.racers import Racer, load_racers
from experiments.ginger.race.task import RaceTask, load_race_task
from experiments.ginger.race.tuning import at_edge, tune

CELL = ("task", "sweep", "decay", "rank", "damping", "clip")
DAMPING_SWEEPS = {"damping": None, "damping, clipped": 1.0}  # and the bound on each entry of the direction


@dataclass(frozen=True)
class Cell:
    """One setting of Ginger.

    Attributes:
        sweep: "grid" of decay and rank, "damping", or "damping, clipped".
        racer: whose number of epochs it has.
        optimizer: settings, see `make_optimizer`.
        at_edge: whether its learning rate is the smallest or the largest of those tried.
    """

    sweep: str
    racer: Racer
    optimizer: dict[str, Any]
    at_edge: bool


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each cell and seed, and `summary`, over seeds.

    The grid has the settings that ginger-tab1 tunes, at its rank and decay. Each damping tunes its learning rate,
    at this rank and decay, with the number of gradients that a racer has: where the update is clipped among the
    rates of the race, elsewhere lr/γ among `rates_over_damping`, since that is the step outside the rows of U. A
    row says whether the rate lies `at_edge` of those tried.

    Args:
        run: seeds, store, device.
        cfg: `tasks`, and for all of them or for one: what ginger-tab1 takes, `decays`, `grid_ranks`, `dampings`,
            `rates_over_damping`.
    """
    rows = []
    for name, settings in task_settings(cfg).items():
        task = load_race_task(run, name, settings)
        for cell in _cells(run, task, settings):
            place = {"task": task.label, "sweep": cell.sweep, **_shown(cell.optimizer), "at_edge": cell.at_edge}
            for seed in settings.seeds:
                row, _ = final_run(run, task, cell.racer, cell.optimizer, settings, seed=seed)
                rows.append(place | row)
    table = pd.DataFrame(rows)
    run.note(seeds=list(cfg.seeds))
    return {"table": table, "summary": summarised(table, by=CELL, constant=("lr", "at_edge"))}


def _cells(run: Run, task: RaceTask, settings: DictConfig) -> Iterator[Cell]:
    ginger = load_racers(settings)["ginger"]
    chosen = tune(run, task, ginger, settings).chosen
    for decay in settings.decays:
        for rank in settings.grid_ranks:
            optimizer = ginger.with_rank(rank, **chosen) | {"decay": decay}
            yield Cell("grid", ginger, optimizer, at_edge(chosen["lr"], settings.lrs))
    for sweep, clip in DAMPING_SWEEPS.items():
        for damping in settings.dampings:
            racer = replace(ginger, candidates=({"damping": damping, "clip": clip},))
            rates = list(settings.lrs) if clip else [damping * ratio for ratio in settings.rates_over_damping]
            tuned = tune(run, task, racer, OmegaConf.merge(settings, {"lrs": rates})).chosen  # type: ignore[arg-type]  # a DictConfig
            optimizer = racer.with_rank(settings.tuned_rank, **tuned)
            yield Cell(sweep, racer, optimizer, at_edge(tuned["lr"], rates))


def _shown(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    return {name: optimizer[name] for name in ("decay", "rank", "damping", "clip", "lr")}


def without_diverged(table: pd.DataFrame) -> pd.DataFrame:
    """Return the cells at which no seed diverged."""
    return table[~table.groupby(list(CELL), dropna=False).diverged.transform("any").astype(bool)]


def named_cell(place: Any) -> str:
    """Return "decay 0.99, rank 4" of a pair."""
    decay, rank = place
    return f"decay {decay:g}, rank {rank:g}"
