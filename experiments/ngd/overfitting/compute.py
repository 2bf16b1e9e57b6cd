"""Train SGD and NGD until they overfit: what Figs. 7 and 8 share, from the same units of work.

Where the paper's data is too large to overfit in the time (digits), a share of the training labels is drawn anew
at random: noise that only memory can fit, as in the paper's "the model learns noise in the data". The validation
labels stay as they are.
"""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import torch
from omegaconf import DictConfig

from curvlab.lab import Run, task_label, task_settings
from experiments.ngd.overfitting.last_epoch import last_epoch_table
from experiments.ngd.overfitting.measures import since_minimum
from experiments.ngd.task import Task, load_task
from experiments.ngd.trajectories import trajectory


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each task, optimizer, seed and checkpoint, `summary` and `last_epoch`.

    Further columns of `table` as of `trajectory`, and num_train, n. `summary` is of `since_minimum`, `last_epoch`
    of `last_epoch_table`.

    Args:
        run: seeds, store, device.
        cfg: `tasks`, and for all of them or for one: `seeds`, `optimizers` by name, `label_noise`, and what
            `trajectory` takes.
    """
    parts = []
    for name, settings in task_settings(cfg).items():
        task = load_task(run, settings.data, settings.model, settings.seed_name)
        task = with_label_noise(run, task, settings.label_noise)
        for label, optimizer in settings.optimizers.items():
            for seed in settings.seeds:
                rows = trajectory(run, task, optimizer, settings, seed)
                place = {"task": task_label(name), "optimizer": str(label), "seed": seed}
                parts.append(rows.assign(**place, num_train=len(task.train[1])))
    table = pd.concat(parts, ignore_index=True)
    first = ["task", "optimizer", "seed", "epoch"]
    table = table[first + [column for column in table if column not in first]]
    run.note(seeds=list(cfg.seeds))
    return {"table": table, "summary": since_minimum(table), "last_epoch": last_epoch_table(table)}


def with_label_noise(run: Run, task: Task, share: float) -> Task:
    """Return the task with a share of its training labels drawn anew, uniformly over the other classes."""
    if not 0 <= share < 1:
        raise ValueError(f"label_noise is a share of the labels, from 0 to below 1, got {share}")
    if share == 0:
        return task
    inputs, targets = task.train
    generator = run.generator("label noise", task.name)
    chosen = torch.randperm(len(targets), generator=generator)[: round(share * len(targets))]
    shifts = torch.randint(1, task.splits.num_outputs, (len(chosen),), generator=generator)
    noisy = targets.clone()
    noisy[chosen.to(targets.device)] += shifts.to(targets)
    noisy %= task.splits.num_outputs
    return replace(task, train=(inputs, noisy), key=task.key | {"label_noise": share})
