"""Train SGD and NGD until they overfit, and what LLC, tr(H) and WBIC do from then on: shared by fig. 7 and fig. 8.

Both figures compute the same table from the same units of work. Where the paper's data is too large to overfit in
the time (digits), a share of the training labels is drawn anew at random: noise that only memory can fit, as in
the paper's "the model learns noise in the data". The validation labels stay as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig
from scipy import stats

from curvlab import runs
from experiments.ngd.trajectories import Problem, load_problem, trajectory

QUANTITIES = ("validation_loss", "llc", "trace", "wbic")
_SAMPLED = ("llc", "wbic")  # from chains, which may be not valid


def overfitting_table(run: runs.Run, cfg: DictConfig) -> pd.DataFrame:
    """Return one row an optimizer, seed and checkpoint; columns as of `trajectory`, and num_train, n.

    Args:
        run: seeds, store, device.
        cfg: nodes as of `trajectory`; model, optimizers, seeds, label_noise.
    """
    problem = with_label_noise(run, load_problem(run, cfg.data, cfg.model, "overfitting"), cfg.label_noise)
    parts = []
    for label, optimizer in cfg.optimizers.items():
        for seed in cfg.seeds:
            rows = trajectory(run, problem, optimizer, cfg, seed)
            parts.append(rows.assign(optimizer=str(label), seed=seed, num_train=len(problem.train[1])))
    table = pd.concat(parts, ignore_index=True)
    columns = ["optimizer", "seed", "epoch"]
    return table[columns + [column for column in table if column not in columns]]


def with_label_noise(run: runs.Run, problem: Problem, share: float) -> Problem:
    """Return the problem with a share of its training labels drawn anew, uniformly over the other classes."""
    if not 0 <= share < 1:
        raise ValueError(f"label_noise is a share of the labels, from 0 to below 1, got {share}")
    if share == 0:
        return problem
    inputs, targets = problem.train
    generator = run.generator("label noise", problem.name)
    chosen = torch.randperm(len(targets), generator=generator)[: round(share * len(targets))]
    shifts = torch.randint(1, problem.splits.num_outputs, (len(chosen),), generator=generator)
    noisy = targets.clone()
    noisy[chosen.to(targets.device)] += shifts.to(targets)
    noisy %= problem.splits.num_outputs
    return replace(problem, train=(inputs, noisy), key=problem.key | {"label_noise": share})


def since_minimum(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row an optimizer, seed and quantity: what it does from the minimum of the validation loss on.

    Columns: minimum_epoch, the checkpoint of the smallest validation loss; checkpoints, how many from there on
    count (of LLC and WBIC, those with valid estimates); first_epoch, first, last_epoch, last, the quantity at the
    first and last of them; change, last/first - 1, where these are at least half of the epochs from the minimum on
    apart; rank_correlation, Spearman's with the validation loss over them; sampled_change, the change with every
    estimate, valid or not, as in the paper, nan where it starts below 0; train_loss_first, train_loss_last, the
    training losses at the first and last epoch (nats).

    Args:
        table: see `overfitting_table`.
    """
    rows = []
    for (optimizer, seed), own in table.groupby(["optimizer", "seed"], sort=False):
        ordered = own.sort_values("epoch")
        minimum = int(ordered.epoch.iloc[ordered.validation_loss.argmin()])
        after = ordered[ordered.epoch >= minimum]
        for quantity in QUANTITIES:
            counted = after[after.valid.astype(bool)] if quantity in _SAMPLED else after
            row: dict[str, Any] = {
                "optimizer": optimizer,
                "seed": seed,
                "quantity": quantity,
                "minimum_epoch": minimum,
            }
            row |= {"checkpoints": len(counted), "first_epoch": np.nan, "first": np.nan, "last_epoch": np.nan}
            row |= {"last": np.nan, "change": np.nan, "rank_correlation": np.nan, "sampled_change": np.nan}
            row |= {"train_loss_first": np.nan, "train_loss_last": np.nan}
            if len(counted) > 1:
                ends = counted.iloc[[0, -1]]
                row |= dict(zip(("first_epoch", "last_epoch"), ends.epoch, strict=True))
                row |= dict(zip(("first", "last"), ends[quantity], strict=True))
                row |= dict(zip(("train_loss_first", "train_loss_last"), ends.train_loss, strict=True))
                if row["last_epoch"] - row["first_epoch"] >= (after.epoch.max() - minimum) / 2:
                    row["change"] = row["last"] / row["first"] - 1
            if len(counted) > 2 and quantity != "validation_loss":
                found = stats.spearmanr(counted.validation_loss, counted[quantity])
                row["rank_correlation"] = float(found.statistic)
            if len(after) > 1 and after[quantity].iloc[0] > 0:
                row["sampled_change"] = after[quantity].iloc[-1] / after[quantity].iloc[0] - 1
            rows.append(row)
    return pd.DataFrame(rows)


def scale(cfg: DictConfig, num_train: int) -> dict[str, object]:
    """Return what was reduced or changed, ours beside the paper's."""
    return {
        "training examples": {"ours": num_train, "paper": "60000, not stated"},
        "labels drawn at random": {"ours": f"{100 * cfg.label_noise:g} %", "paper": "none"},
        "model": {"ours": f"FFNN {list(cfg.model.hidden_sizes)}", "paper": "not stated"},
        "seeds": {"ours": len(cfg.seeds), "paper": "not stated"},
        "epochs": {"ours": cfg.training.num_epochs, "paper": "not stated"},
        "learning rate": {"ours": cfg.optimizers.ngd.lr, "paper": 0.01},
        "alpha": {"ours": cfg.optimizers.ngd.alpha, "paper": 0.1},
        "batch size": {"ours": cfg.training.batch_size, "paper": 128},
        "probes of the trace": {"ours": f"until 5 %, at most {cfg.trace.max_matvecs}", "paper": 10000},
    }
