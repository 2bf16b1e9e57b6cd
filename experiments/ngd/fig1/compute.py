"""Fig. 1: LLC of NGD and SGD over the widths of each task."""

from __future__ import annotations

import pandas as pd
from omegaconf import DictConfig

from curvlab.lab import Run
from experiments.ngd.fig1.cutoffs import cutoff_tables
from experiments.ngd.fig1.measures import summary_table
from experiments.ngd.fig1.networks import PLACE, networks
from experiments.ngd.fig1.tuned_and_matched import tuned_and_matched
from experiments.ngd.trajectories import final_estimate


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, `summary` (`summary_table`), and the tables of `tuned_and_matched` and `cutoff_tables`.

    `table` has one row for each task, width, optimizer and seed; further columns as of `final_estimate`.

    Args:
        run: seeds, store, device.
        cfg: `tasks`, and for all of them or for one: `widths` (0: the model as it is), `seeds`, `optimizers` by
            name, `judged_optimizer`, `tuned_and_matched`, `cutoffs`, and what `final_estimate` takes.
    """
    found = networks(run, cfg)
    parts = [
        final_estimate(run, network.task, optimizer, network.settings, seed).assign(
            **network.place, optimizer=str(label), seed=seed
        )
        for network in found
        for label, optimizer in network.settings.optimizers.items()
        for seed in network.settings.seeds
    ]
    table = pd.concat(parts, ignore_index=True)
    first = [*PLACE, "optimizer", "seed", "train_loss", "validation_loss", "converged", "valid", "llc"]
    first += ["llc_raw", "descent", "curvature_cutoff"]
    table = table[first + [column for column in table if column not in first]]
    run.note(seeds=list(cfg.seeds))
    further = tuned_and_matched(run, found) | cutoff_tables(run, found)
    return {"table": table, "summary": summary_table(table), **further}
