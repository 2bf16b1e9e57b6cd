"""Fig. 3: NGD with every value of each smoothing constant, and SGD."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import DictConfig
from scipy import stats

from curvlab.lab import Run, t_interval, task_label, task_settings
from experiments.ngd.fig3.equal_loss import MIN_VALUES, equal_loss, equal_loss_trends
from experiments.ngd.sampling import curvature_cutoff
from experiments.ngd.task import load_task
from experiments.ngd.trajectories import final_estimate

SWEEPS = ("alpha", "epsilon")


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, `summary` (`summary_table`), `trends` (`trend_table`), and the sweep of alpha at equal loss.

    That is `equal_loss` with its `equal_loss_trends`, of the same names.

    `table` has one row for each task, sweep (sgd, alpha, epsilon), value of the constant and seed; further columns
    as of `final_estimate`.

    Args:
        run: seeds, store, device.
        cfg: `tasks`, and for all of them or for one: `seeds`, `sgd` and `ngd` (see `make_optimizer`), `alphas`,
            `epsilons`, and what `final_estimate` and `equal_loss` take.
    """
    parts, at_equal_loss = [], []
    for name, settings in task_settings(cfg).items():
        task = load_task(run, settings.data, settings.model, settings.seed_name)
        cells = [("sgd", math.nan, {**settings.sgd})]
        cells += [("alpha", alpha, {**settings.ngd, "alpha": alpha}) for alpha in settings.alphas]
        cells += [("epsilon", epsilon, {**settings.ngd, "epsilon": epsilon}) for epsilon in settings.epsilons]
        for sweep, value, optimizer in cells:
            for seed in settings.seeds:
                row = final_estimate(run, task, optimizer, settings, seed)
                parts.append(row.assign(task=task_label(name), sweep=sweep, value=value, seed=seed))
        optimizers = {value: optimizer for sweep, value, optimizer in cells if sweep != "epsilon"}
        for seed in settings.seeds:
            rows = equal_loss(run, task, optimizers, settings, seed)
            at_equal_loss.append(rows.assign(task=task_label(name)))
    table = pd.concat(parts, ignore_index=True)
    first = ["task", "sweep", "value", "seed", "train_loss", "validation_loss", "converged", "valid", "llc"]
    first += ["llc_raw", "descent", "curvature_cutoff"]
    table = table[first + [column for column in table if column not in first]]
    run.note(seeds=list(cfg.seeds))
    equal = pd.concat(at_equal_loss, ignore_index=True)
    equal = equal[["task", *(column for column in equal if column != "task")]]
    tables = {"table": table, "summary": summary_table(table), "trends": trend_table(table)}
    return tables | {"equal_loss": equal, "equal_loss_trends": equal_loss_trends(equal)}


def summary_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each value: seeds, those that converged, those with an LLC, its mean, 95 % t interval.

    llc is from the minimum; llc_raw and descent, whose sum it is, are means over the same seeds.
    """
    rows = []
    for place, own in table.groupby(["task", "sweep", "value"], sort=False, dropna=False):
        counted = own[own.llc.notna()]
        llc = counted.llc.to_numpy()
        interval = t_interval(llc) if len(llc) else None
        rows.append(
            dict(zip(("task", "sweep", "value"), place, strict=True))
            | {"seeds": len(own), "converged": int(own.converged.sum()), "llcs": len(llc)}
            | {"llc": llc.mean() if interval else np.nan}
            | {"llc_low": interval.low if interval else np.nan, "llc_high": interval.high if interval else np.nan}
            | {"llc_raw": counted.llc_raw.mean(), "descent": counted.descent.mean()}
            | {"curvature_cutoff": curvature_cutoff(own)}
            | {"train_loss": own.train_loss.mean(), "validation_loss": own.validation_loss.mean()}
            | {"problems": "; ".join(sorted(set(own.problem.dropna()) - {""}))}
        )
    return pd.DataFrame(rows)


def trend_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each task, sweep and seed, over the values that have an LLC.

    Columns: values, how many; rank_correlation, Spearman's, of LLC and value; slope, of ln LLC on log10 of the
    value; loss_rank_correlation, of the training loss and the value; most_smoothed, the largest value, with
    llc_there and sgd, the LLCs of NGD and of SGD at the same seed.
    """
    sgd = table[table.sweep == "sgd"].set_index(["task", "seed"]).llc
    rows = []
    for (sweep, task, seed), own in table[table.sweep != "sgd"].groupby(["sweep", "task", "seed"], sort=False):
        used = own[own.llc.notna() & (own.llc > 0)].sort_values("value")
        row: dict[str, Any] = {"task": task, "sweep": sweep, "seed": seed, "values": len(used)}
        row |= {"sgd": sgd.get((task, seed), np.nan), "curvature_cutoff": curvature_cutoff(own)}
        row |= dict.fromkeys(("rank_correlation", "slope", "loss_rank_correlation"), np.nan)
        at_most = own.iloc[own.value.argmax()]
        row |= {"most_smoothed": at_most.value, "llc_there": at_most.llc}
        if len(used) >= MIN_VALUES:
            row["rank_correlation"] = float(stats.spearmanr(used.value, used.llc).statistic)
            row["slope"] = float(np.polyfit(np.log10(used.value), np.log(used.llc), 1)[0])
            row["loss_rank_correlation"] = float(stats.spearmanr(used.value, used.train_loss).statistic)
        rows.append(row)
    return pd.DataFrame(rows)
