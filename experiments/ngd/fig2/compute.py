"""Fig. 2: LLC and tr(H) along the training of NGD and SGD."""

from __future__ import annotations

import pandas as pd
from omegaconf import DictConfig

from curvlab.lab import Run, task_label, task_settings
from experiments.ngd.matched_loss import matched_differences
from experiments.ngd.task import load_task
from experiments.ngd.trajectories import trajectory


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each task, optimizer, seed and checkpoint, and `matched`.

    Further columns of `table` as of `trajectory`; `matched` is of `matched_differences`.

    Args:
        run: seeds, store, device.
        cfg: `tasks`, and for all of them or for one: `seeds`, `optimizers` by name, and what `trajectory` takes.
    """
    parts = []
    for name, settings in task_settings(cfg).items():
        task = load_task(run, settings.data, settings.model, settings.seed_name)
        for label, optimizer in settings.optimizers.items():
            for seed in settings.seeds:
                rows = trajectory(run, task, optimizer, settings, seed)
                parts.append(rows.assign(task=task_label(name), optimizer=str(label), seed=seed))
    table = pd.concat(parts, ignore_index=True)
    first = ["task", "optimizer", "seed", "epoch"]
    run.note(seeds=list(cfg.seeds))
    return {
        "table": table[first + [column for column in table if column not in first]],
        "matched": matched_differences(table),
    }
