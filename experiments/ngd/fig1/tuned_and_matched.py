"""The comparisons that the paper lacks: each optimizer at its own learning rate, and at equal training loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf

from curvlab.lab import ClaimResult, ClaimSheet, Computed, judge, out_of_reach, panels, t_interval
from experiments.ngd.fig1.cutoffs import draw_cutoffs
from experiments.ngd.fig1.widths import PLACE, at, by_network, place_of
from experiments.ngd.matched_loss import matched_differences
from experiments.ngd.sampling import curvature_cutoff
from experiments.ngd.trajectories import Network, final_estimate, first_columns, trajectory

EQUAL, TUNED, MATCHED = "equal lr and epochs", "own lr, equal epochs", "equal training loss"
QUANTITIES = {"llc": "LLC", "trace": "tr(H)"}


# ------------------------------------------------------------------------------------ compute
def tuned_and_matched(networks: Sequence[Network]) -> dict[str, pd.DataFrame]:
    """Return the tables tuning, equal, tuned and matched (`Compared`), and settings.

    Args:
        networks: all of them; those whose width is in `tuned_and_matched.widths` of their settings are compared,
            with its `lrs`, the grid, its `seeds` and its `trace`.
    """
    parts: dict[str, list[pd.DataFrame]] = {"tuning": [], "equal": [], "tuned": []}
    for network in networks:
        if network.settings.width in network.settings.tuned_and_matched.widths:
            for name, rows in _compared(network).items():
                parts[name] += rows
    first = (*PLACE, "optimizer", "lr", "seed", "epoch")
    tables = {name: first_columns(pd.concat(part, ignore_index=True), *first) for name, part in parts.items()}
    tables["matched"] = matched_differences(tables["equal"], by=PLACE)
    return tables | {"settings": Compared(**tables).settings()}


def _compared(network: Network) -> dict[str, list[pd.DataFrame]]:
    further = network.settings.tuned_and_matched
    extra = {"seeds": further.seeds, "trace": further.trace}
    settings: DictConfig = OmegaConf.merge(network.settings, extra)  # type: ignore[assignment]  # stays a mapping
    judged = settings.optimizers[settings.judged_optimizer]
    optimizers: dict[str, dict[str, Any]] = {"sgd": {**settings.optimizers.sgd}, "ngd": {**judged}}
    grid = tune(network, optimizers, settings, further.lrs)
    chosen = chosen_rates(grid)
    equal, tuned = [], []
    for label, optimizer in optimizers.items():
        for seed in settings.seeds:
            place = place_of(network) | {"optimizer": label, "seed": seed}
            rows = trajectory(network, optimizer, settings, seed)
            rows["converged"] = rows.train_loss <= settings.converged_below
            equal.append(rows.assign(lr=optimizer["lr"], **place))
            if label in chosen:
                row = final_estimate(network, {**optimizer, "lr": chosen[label]}, settings, seed)
                tuned.append(row.assign(lr=chosen[label], **place))
    return {"tuning": [grid.assign(**place_of(network))], "equal": equal, "tuned": tuned}


def tune(
    network: Network, optimizers: Mapping[str, Mapping[str, Any]], settings: DictConfig, lrs: Sequence[float]
) -> pd.DataFrame:
    """Train with every learning rate; return one row an optimizer, learning rate and seed.

    Columns: optimizer, lr, seed, epochs, train_loss, validation_loss (nats, at the end; nan where training
    diverged), chosen: whether the optimizer takes this learning rate.
    """
    unmeasured: Any = OmegaConf.merge(settings, {"llc": None, "trace": None})
    rows = []
    for name, optimizer in optimizers.items():
        for lr in lrs:
            for seed in settings.seeds:
                row = final_estimate(network, {**optimizer, "lr": lr}, unmeasured, seed).iloc[0]
                losses = {"train_loss": row.train_loss, "validation_loss": row.validation_loss}
                rows.append({"optimizer": name, "lr": lr, "seed": seed, "epochs": row.epoch} | losses)
    grid = pd.DataFrame(rows)
    chosen = chosen_rates(grid)
    grid["chosen"] = [chosen.get(name) == lr for name, lr in zip(grid.optimizer, grid.lr, strict=True)]
    return grid


def chosen_rates(grid: pd.DataFrame) -> dict[str, float]:
    """Return each optimizer's learning rate of the smallest mean validation loss.

    A learning rate at which a seed diverged is no choice; an optimizer that diverged at all of them is left out.
    """
    chosen = {}
    for name, own in grid.groupby("optimizer", sort=False):
        means = own.groupby("lr").validation_loss.agg(lambda losses: losses.mean(skipna=False)).dropna()
        if len(means):
            chosen[str(name)] = float(means.index.to_numpy(float)[means.argmin()])
    return chosen


# ------------------------------------------------------------------------------------ compare
@dataclass(frozen=True)
class Compared:
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
    def of(cls, computed: Computed) -> Compared:
        """Read the tables of a run."""
        return cls(*(computed[name] for name in ("tuning", "equal", "tuned", "matched")))

    def networks(self) -> Iterator[tuple[str, Compared]]:
        """Yield the name of every network, and its own part of the tables."""
        for name, tuning in by_network(self.tuning):
            yield name, Compared(tuning, *(at(table, tuning) for table in (self.equal, self.tuned, self.matched)))

    def relative_differences(self, setting: str, quantity: str) -> pd.Series:
        """Return, of one network, NGD minus SGD over the seeds' mean of SGD, for each seed where both have it."""
        if setting == MATCHED:
            own = self.matched[self.matched.quantity == quantity]
            return (own.difference / own.sgd.mean()).dropna()
        own = self.tuned if setting == TUNED else self.equal
        own = own[own.epoch == own.epoch.max()]
        if quantity == "llc":
            own = own[own.converged & own.valid]
        wide = own.pivot_table(index="seed", columns="optimizer", values=quantity)
        if not {"sgd", "ngd"} <= set(wide.columns):
            return pd.Series(dtype=float)
        both = wide.dropna()
        return (both.ngd - both.sgd) / both.sgd.mean()

    def settings(self) -> pd.DataFrame:
        """Return one row for each network, quantity and setting: mean difference over seeds, 95 % t interval."""
        rows = []
        for _, network in self.networks():
            cutoff = curvature_cutoff(network.equal)
            for quantity in QUANTITIES:
                for setting in (EQUAL, TUNED, MATCHED):
                    values = network.relative_differences(setting, quantity)
                    interval = t_interval(values)
                    row = {name: network.tuning[name].iloc[0] for name in PLACE}
                    row |= {"quantity": quantity, "setting": setting, "seeds": len(values)}
                    row |= {"curvature_cutoff": cutoff if quantity == "llc" else np.nan}
                    row |= {"relative_difference": values.mean(), "low": interval.low, "high": interval.high}
                    rows.append(row)
        return pd.DataFrame(rows)


# ------------------------------------------------------------------------------------ judge
def judge_tuned_and_matched(found: Compared, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge whether NGD's LLC and tr(H) are the larger ones in both settings, for each network."""
    results = []
    for name, network in found.networks():
        for setting, word in ((TUNED, "tuned"), (MATCHED, "matched")):
            for quantity in QUANTITIES:
                claim = claims.claim(f"{quantity}-higher-{word}", of=name)
                values = network.relative_differences(setting, quantity)
                if len(values) < 2:
                    results.append(out_of_reach(claim, _why_not(network, quantity, setting)))
                    continue
                why = _choices(network) if setting == TUNED else _at_equal_epochs(network, quantity)
                results.append(judge(claim, values.mean(), t_interval(values), if_not_reproduced=why))
    return results


def _choices(network: Compared) -> str:
    chosen = network.tuning[network.tuning.chosen]
    parts = [
        f"{str(name).upper()} takes lr {rows.lr.iloc[0]:g} and ends at a training loss of "
        f"{rows.train_loss.mean():.3g}"
        for name, rows in chosen.groupby("optimizer", sort=False)
    ]
    return f"{'; '.join(parts)}; settings.csv has the other settings."


def _at_equal_epochs(network: Compared, quantity: str) -> str:
    values = network.relative_differences(EQUAL, quantity)
    if not len(values):
        return "At equal epochs nothing can be compared, either (settings.csv)."
    return f"At equal lr and epochs the difference is {100 * values.mean():+.0f} % (settings.csv)."


def _why_not(network: Compared, quantity: str, setting: str) -> str:
    if setting == MATCHED:
        return "Fewer than two seeds in which both optimizers reach a common training loss with valid estimates."
    if not {"sgd", "ngd"} <= set(network.tuned.optimizer):
        return "Training diverged at every learning rate of the grid."
    problems = ", ".join(network.tuned.problem.dropna().unique()) or "training has not converged"
    return f"Fewer than two seeds with both estimates ({problems if quantity == 'llc' else 'no trace'})."


# ------------------------------------------------------------------------------------ draw
def draw_tuned_and_matched(
    found: Compared, settings: pd.DataFrame, cutoffs: tuple[pd.DataFrame, pd.DataFrame] | None = None
) -> Figure:
    """Return one row for each network: the tuning, LLC and tr(H) against training loss, NGD over SGD, cut-offs.

    Args:
        found: what was compared.
        settings: `found.settings()`.
        cutoffs: what `draw_cutoffs` draws, of some of the networks.
    """
    networks = list(found.networks())
    tables = pd.concat([network.tuning.assign(network=name) for name, network in networks])
    figure, rows = panels.rows(tables, by="network", columns=4 + (cutoffs is not None), panel_size=(3.3, 2.8))
    styles = panels.styles_of(("sgd", "ngd"))
    of_quantities = panels.styles_of(QUANTITIES.values())
    shown = settings.assign(quantity=settings.quantity.map(QUANTITIES))
    shown[["relative_difference", "low", "high"]] *= 100
    shown["setting"] = shown.setting.str.replace(" ", "\n", n=1)
    for (tuning, llc, trace, over, *last), (name, network) in zip((row[0] for row in rows), networks, strict=True):
        _tuning_panel(tuning, network.tuning, styles)
        panels.frame(tuning, x="learning rate", y="validation loss (nats)", title=name, log="xy")
        kind: dict[str, Any] = {"x": "train_loss", "by": "optimizer", "identity": False, "styles": styles}
        panels.scatter(llc, network.equal.assign(hollow=~network.equal.valid), y="llc", hollow="hollow", **kind)
        panels.scatter(trace, network.equal[network.equal.trace.notna()], y="trace", **kind)
        panels.frame(llc, x="training loss (nats)", y="LLC from the lowest point", log="x")
        panels.frame(trace, x="training loss (nats)", y="tr(H) (nats/parameter²)", log="x")
        own = at(shown, network.tuning)
        ends: dict[str, Any] = {"low": "low", "high": "high", "styles": of_quantities}
        panels.forest(over, own, name="setting", value="relative_difference", by="quantity", **ends)
        panels.rule(over, x=0)
        panels.frame(over, x="NGD over SGD − 1 (%)")
        if cutoffs is not None and len(quadratic := at(cutoffs[0], network.tuning)):
            draw_cutoffs(last[0], quadratic, at(cutoffs[1], network.tuning))
        elif last:
            last[0].set_axis_off()
    rows[0][0][1].set_title("at one lr, along training; hollow: not valid", fontsize=8)
    rows[0][0][3].set_title("95 % t interval over seeds", fontsize=8)
    panels.legend(
        figure,
        title="line: mean over seeds; ring: the lr chosen",
        axes=rows[0][0][[0, *range(3, len(rows[0][0]))]],
    )
    return figure


def _tuning_panel(ax: Axes, own: pd.DataFrame, styles: Mapping[Any, Any]) -> None:
    diverged = own.groupby(["optimizer", "lr"]).validation_loss.transform(lambda losses: losses.isna().any())
    panels.lines(ax, own[~diverged], x="lr", y="validation_loss", by="optimizer", styles=styles)
    for name, taken in own[own.chosen].groupby("optimizer", sort=False):
        color = styles[name]["color"]
        where = (taken.lr.iloc[0], taken.validation_loss.mean())
        ax.scatter(*where, s=110, facecolors="none", edgecolors=color, linewidths=1.2)
