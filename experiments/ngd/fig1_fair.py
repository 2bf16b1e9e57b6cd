"""The comparison that the paper lacks: each optimizer at its own learning rate, and at equal training loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import DictConfig, OmegaConf

from curvlab import runs
from curvlab.reporting import t_interval
from experiments.ngd.matched_loss import matched_differences
from experiments.ngd.trajectories import final_estimate, load_problem, trajectory
from experiments.ngd.tuning import chosen_rates, tune

EQUAL, TUNED, MATCHED = "equal lr and epochs", "own lr, equal epochs", "equal training loss"
QUANTITIES = {"llc": "LLC", "trace": "tr(H)"}


@dataclass(frozen=True)
class FairComparison:
    """What was found, `optimizer` being sgd or ngd (the claimed one) throughout.

    Attributes:
        tuning: see `tune`, for each model.
        equal: LLC and tr(H) at each checkpoint, both optimizers at the figure's learning rate.
        tuned: the same at the end, each optimizer at the learning rate that it chose.
        matched: of `equal`, see `matched_differences`.
    """

    tuning: pd.DataFrame
    equal: pd.DataFrame
    tuned: pd.DataFrame
    matched: pd.DataFrame

    def relative_differences(self, model: str, setting: str, quantity: str) -> np.ndarray:
        """Return NGD minus SGD over the seeds' mean of SGD, one value a seed where both have the quantity."""
        if setting == MATCHED:
            own = self.matched[(self.matched.model == model) & (self.matched.quantity == quantity)]
            return (own.difference / own.sgd.mean()).dropna().to_numpy(float)
        table = self.tuned if setting == TUNED else self.equal
        own = table[(table.model == model) & (table.epoch == table.epoch.max())]
        if quantity == "llc":
            own = own[own.converged & own.valid]
        wide = own.pivot_table(index="seed", columns="optimizer", values=quantity)
        if not {"sgd", "ngd"} <= set(wide.columns):
            return np.empty(0)
        both = wide.dropna()
        return ((both.ngd - both.sgd) / both.sgd.mean()).to_numpy(float)

    def settings(self) -> pd.DataFrame:
        """Return one row a model, quantity and setting: mean difference over seeds, 95 % t interval."""
        rows = []
        for model in self.tuning.model.unique():
            for quantity in QUANTITIES:
                for setting in (EQUAL, TUNED, MATCHED):
                    values = self.relative_differences(model, setting, quantity)
                    row = {"model": model, "quantity": quantity, "setting": setting, "seeds": len(values)}
                    row |= {"relative_difference": np.nan, "low": np.nan, "high": np.nan}
                    if len(values):
                        interval = t_interval(values)
                        row |= {"relative_difference": values.mean(), "low": interval.low, "high": interval.high}
                    rows.append(row)
        return pd.DataFrame(rows)


def compare_fairly(run: runs.Run, cfg: DictConfig, models: list[tuple[DictConfig, str]]) -> FairComparison:
    """Compute, save tuning.csv, equal.csv, tuned.csv and matched.csv, and return what stands there.

    Args:
        run: seeds, store, device.
        cfg: the target's; `fair` holds lrs, the grid, seeds and trace.
        models: each node with its name.
    """
    own: DictConfig = OmegaConf.merge(cfg, {"seeds": cfg.fair.seeds})  # type: ignore[assignment]  # stays a mapping
    own.trace = cfg.fair.trace
    parts: dict[str, list[pd.DataFrame]] = {"tuning": [], "equal": [], "tuned": []}
    optimizers: dict[str, dict[str, Any]] = {"sgd": {**cfg.optimizers.sgd}, "ngd": {**cfg.optimizers[cfg.claimed]}}
    for model, name in models:
        problem = load_problem(run, cfg.data, model, name)
        grid = tune(run, problem, optimizers, own, cfg.fair.lrs)
        parts["tuning"].append(grid.assign(model=name))
        chosen = chosen_rates(grid)
        for label, settings in optimizers.items():
            for seed in own.seeds:
                place = {"model": name, "optimizer": label, "seed": seed}
                rows = trajectory(run, problem, settings, own, seed)
                rows["converged"] = rows.train_loss <= cfg.converged_below
                parts["equal"].append(rows.assign(lr=settings["lr"], **place))
                if label in chosen:
                    row = final_estimate(run, problem, {**settings, "lr": chosen[label]}, own, seed)
                    parts["tuned"].append(row.assign(lr=chosen[label], **place))
    tables = {name: _saved(run, pd.concat(part, ignore_index=True), name) for name, part in parts.items()}
    matched = _saved(run, matched_differences(tables["equal"]), "matched")
    return FairComparison(**tables, matched=matched)


def _saved(run: runs.Run, table: pd.DataFrame, name: str) -> pd.DataFrame:
    first = [column for column in ("model", "optimizer", "lr", "seed", "epoch") if column in table]
    ordered = table[first + [column for column in table if column not in first]]
    return pd.read_csv(run.save_table(ordered, f"{name}.csv"))
