"""The comparisons that the paper lacks: each optimizer at its own learning rate, and at equal training loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import DictConfig, OmegaConf

from curvlab.lab import Computed, Run, t_interval
from experiments.ngd.fig1.networks import PLACE, Network
from experiments.ngd.matched_loss import matched_differences
from experiments.ngd.sampling import curvature_cutoff
from experiments.ngd.trajectories import final_estimate, trajectory
from experiments.ngd.tuning import chosen_rates, tune

EQUAL, TUNED, MATCHED = "equal lr and epochs", "own lr, equal epochs", "equal training loss"
QUANTITIES = {"llc": "LLC", "trace": "tr(H)"}


@dataclass(frozen=True)
class TunedAndMatched:
    """The tables of `tuned_and_matched`, `optimizer` being sgd or ngd (the judged one) throughout.

    Attributes:
        tuning: see `tune`, for each network.
        equal: LLC and tr(H) at each checkpoint, both optimizers at the figure's learning rate.
        tuned: the same at the end, each optimizer at the learning rate that it chose.
        matched: of `equal`, see `matched_differences`.
    """

    tuning: pd.DataFrame
    equal: pd.DataFrame
    tuned: pd.DataFrame
    matched: pd.DataFrame

    @classmethod
    def of(cls, computed: Computed) -> TunedAndMatched:
        """Read the tables of a run."""
        return cls(*(computed[name] for name in ("tuning", "equal", "tuned", "matched")))

    def networks(self) -> list[tuple[str, int]]:
        """Return the task and width of every network."""
        places = self.tuning[[*PLACE]].drop_duplicates()
        return list(places.itertuples(index=False, name=None))

    def at(self, table: pd.DataFrame, network: tuple[str, int]) -> pd.DataFrame:
        """Return the rows of one network."""
        task, width = network
        return table[(table.task == task) & (table.width == width)]

    def relative_differences(self, network: tuple[str, int], setting: str, quantity: str) -> np.ndarray:
        """Return NGD minus SGD over the seeds' mean of SGD, one value for each seed where both have it."""
        if setting == MATCHED:
            own = self.at(self.matched, network)
            own = own[own.quantity == quantity]
            return (own.difference / own.sgd.mean()).dropna().to_numpy(float)
        own = self.at(self.tuned if setting == TUNED else self.equal, network)
        own = own[own.epoch == own.epoch.max()]
        if quantity == "llc":
            own = own[own.converged & own.valid]
        wide = own.pivot_table(index="seed", columns="optimizer", values=quantity)
        if not {"sgd", "ngd"} <= set(wide.columns):
            return np.empty(0)
        both = wide.dropna()
        return ((both.ngd - both.sgd) / both.sgd.mean()).to_numpy(float)

    def settings(self) -> pd.DataFrame:
        """Return one row for each network, quantity and setting: mean difference over seeds, 95 % t interval."""
        rows = []
        for network in self.networks():
            for quantity in QUANTITIES:
                for setting in (EQUAL, TUNED, MATCHED):
                    values = self.relative_differences(network, setting, quantity)
                    interval = t_interval(values) if len(values) else None
                    row: dict[str, Any] = dict(zip(PLACE, network, strict=True))
                    row |= {"quantity": quantity, "setting": setting, "seeds": len(values)}
                    sampled = self.at(self.equal, network)
                    row["curvature_cutoff"] = curvature_cutoff(sampled) if quantity == "llc" else np.nan
                    row |= {"relative_difference": values.mean() if interval else np.nan}
                    row |= (
                        {"low": interval.low, "high": interval.high}
                        if interval
                        else {"low": np.nan, "high": np.nan}
                    )
                    rows.append(row)
        return pd.DataFrame(rows)


def tuned_and_matched(run: Run, networks: Sequence[Network]) -> dict[str, pd.DataFrame]:
    """Return the tables tuning, equal, tuned and matched (`TunedAndMatched`), and settings.

    Args:
        run: seeds, store, device.
        networks: all of them; those whose width is in `tuned_and_matched.widths` of their settings are compared,
            with its `lrs`, the grid, its `seeds` and its `trace`.
    """
    parts: dict[str, list[pd.DataFrame]] = {"tuning": [], "equal": [], "tuned": []}
    for network in networks:
        if network.width in network.settings.tuned_and_matched.widths:
            for name, rows in _compared(run, network).items():
                parts[name] += rows
    tables = {name: _ordered(pd.concat(part, ignore_index=True)) for name, part in parts.items()}
    tables["matched"] = matched_differences(tables["equal"], by=PLACE)
    return tables | {"settings": TunedAndMatched(**tables).settings()}


def _compared(run: Run, network: Network) -> dict[str, list[pd.DataFrame]]:
    chosen_settings = network.settings.tuned_and_matched
    extra = {"seeds": chosen_settings.seeds, "trace": chosen_settings.trace}
    settings: DictConfig = OmegaConf.merge(network.settings, extra)  # type: ignore[assignment]  # stays a mapping
    judged = settings.optimizers[settings.judged_optimizer]
    optimizers: dict[str, dict[str, Any]] = {"sgd": {**settings.optimizers.sgd}, "ngd": {**judged}}
    grid = tune(run, network.task, optimizers, settings, chosen_settings.lrs)
    chosen = chosen_rates(grid)
    equal, tuned = [], []
    for label, optimizer in optimizers.items():
        for seed in settings.seeds:
            place = network.place | {"optimizer": label, "seed": seed}
            rows = trajectory(run, network.task, optimizer, settings, seed)
            rows["converged"] = rows.train_loss <= settings.converged_below
            equal.append(rows.assign(lr=optimizer["lr"], **place))
            if label in chosen:
                row = final_estimate(run, network.task, {**optimizer, "lr": chosen[label]}, settings, seed)
                tuned.append(row.assign(lr=chosen[label], **place))
    return {"tuning": [grid.assign(**network.place)], "equal": equal, "tuned": tuned}


def _ordered(table: pd.DataFrame) -> pd.DataFrame:
    first = [column for column in (*PLACE, "optimizer", "lr", "seed", "epoch") if column in table]
    return table[first + [column for column in table if column not in first]]
