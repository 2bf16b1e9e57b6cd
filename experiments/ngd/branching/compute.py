"""Train by SGD, then let several optimizers go on from that very state: what Figs. 4, 5 and 6 share.

Everything up to the split is one unit of work for each seed, and so is each branch: targets with equal settings
share them. The LLC at the split is that of the state which all branches leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from curvlab.lab import Run, task_label, task_settings
from experiments.ngd.branching.measures import BEFORE, BranchResults
from experiments.ngd.task import Task, load_task
from experiments.ngd.trajectories import last_state, trajectory


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each epoch, and `summary`, the measures' means over seeds.

    Columns of `table`: task, branch ("before" for what comes before the split), seed, epoch (counted from the
    first), lr, what `trajectory` gives, and step_norm = lr * update_norm, the mean over batches of ‖Δw‖.

    Args:
        run: seeds, store, device.
        cfg: `tasks`, and for all of them or for one: `seeds`; `before` (optimizer, training, llc_epochs), `after`
            (training, llc_epochs: counted from the split), `branches` (optimizers by name; null: left out) and
            `llc`. The LLC is estimated at `llc_epochs` and at both ends.
    """
    parts = []
    for name, settings in task_settings(cfg).items():
        task = load_task(run, settings.data, settings.model, settings.seed_name)
        for seed in settings.seeds:
            own = _branches(run, task, settings, seed)
            parts += [part.assign(task=task_label(name), seed=seed) for part in own]
    table = pd.concat(parts, ignore_index=True)
    table["step_norm"] = table.lr * table.update_norm
    table["valid"] = table.valid.eq(True)  # nan where there is no estimate
    first = ["task", "branch", "seed", "epoch", "lr", "train_loss", "validation_loss", "update_norm", "step_norm"]
    table = table[first + [column for column in table if column not in first]]
    run.note(seeds=list(cfg.seeds))
    return {"table": table, "summary": BranchResults.of(table).summary}


def judged_branches(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the branches that the claims are about by the label of the task; tasks without any are left out."""
    found = {task_label(name): settings.judged_branches for name, settings in task_settings(config).items()}
    return {task: list(branches) for task, branches in found.items() if branches}


def _branches(run: Run, task: Task, settings: DictConfig, seed: int) -> Iterable[pd.DataFrame]:
    before, after = (
        OmegaConf.create({"llc": settings.llc, "trace": None, "training": settings[phase].training})
        for phase in ("before", "after")
    )
    optimizer = settings.before.optimizer
    rows = trajectory(run, task, optimizer, before, seed, llc_epochs=_llc_epochs(settings.before))
    yield rows.assign(branch=BEFORE, lr=optimizer.lr)
    start = last_state(run, task, optimizer, before, seed)
    for name, node in settings.branches.items():
        rows = trajectory(run, task, node, after, seed, start=start, llc_epochs=_llc_epochs(settings.after))
        yield rows.assign(branch=str(name), lr=node.lr)


def _llc_epochs(phase: DictConfig) -> set[int]:
    return {*phase.llc_epochs, phase.training.num_epochs}
