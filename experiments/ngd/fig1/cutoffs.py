"""NGD over SGD with other settings of the sampler: the localization, which cuts curvature off, and the step size.

What a localization γ takes for flat is a direction of curvature below γ/nbeta: there the loss does not hold the
chains, and an estimate counts little of it. An LLC is a number for one such cut-off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import DictConfig, OmegaConf

from curvlab.lab import Claim, ClaimResult, ClaimSheet, judge, out_of_reach, t_interval
from experiments.ngd.fig1.widths import PLACE, at, by_network, measured_again, place_of
from experiments.ngd.trajectories import Network, final_estimate, first_columns

SWEEPS = ("localization", "step_size")


# ------------------------------------------------------------------------------------ compute
def cutoff_tables(networks: Sequence[Network]) -> dict[str, pd.DataFrame]:
    """Return `cutoffs`, one row for each network, setting, optimizer and seed, and `cutoff_summary`.

    Further columns of `cutoffs` as of `final_estimate`.

    Args:
        networks: all of them; those whose width is in `cutoffs.widths` of their settings are sampled again, once
            for each of its `localizations` at the step size of the figure, and for each of its `step_sizes` at
            the localization of the figure, with its `seeds`. Where the figure's step size is chosen for each
            state, so are these, and there is no sweep of it.
    """
    parts = []
    for network in networks:
        for sweep, llc in sampler_settings(network.settings.llc, network.settings.cutoffs):
            settings: DictConfig = OmegaConf.merge(network.settings, {"llc": llc})  # type: ignore[assignment]
            for name, optimizer, seed in measured_again(network):
                row = final_estimate(network, optimizer, settings, seed)
                place = place_of(network) | {"sweep": sweep} | {key: llc[key] for key in SWEEPS if llc[key]}
                parts.append(row.assign(**place, optimizer=name, seed=seed))
    first = (*PLACE, "sweep", *SWEEPS, "curvature_cutoff", "optimizer", "seed", "converged", "valid", "llc")
    table = first_columns(pd.concat(parts, ignore_index=True), *first)
    return {"cutoffs": table, "cutoff_summary": cutoff_summary(table)}


def sampler_settings(llc: DictConfig, chosen: DictConfig) -> list[tuple[str, dict[str, Any]]]:
    """Return what is swept and the arguments of `estimate_llc` for each setting.

    Flat directions relax in 1/(step_size localization) steps: where that is more than at the figure's own
    settings, burn-in and draws are longer in proportion.
    """
    found = []
    for sweep, values in zip(SWEEPS, (chosen.localizations, chosen.step_sizes), strict=True):
        for value in values:
            own: dict[str, Any] = OmegaConf.to_container(llc, resolve=True)  # type: ignore[assignment]
            longer = max(1.0, own[sweep] / value)
            own |= {name: math.ceil(longer * own[name]) for name in ("num_draws", "num_burnin_steps")}
            found.append((sweep, own | {sweep: value}))
    return found


def relative_differences(table: pd.DataFrame) -> pd.DataFrame:
    """Return NGD minus SGD over the seeds' mean of SGD, by seed (rows) and setting (columns), nan where one lacks.

    Args:
        table: the rows of one network and one sweep of `cutoffs`.
    """
    sweep = str(table.sweep.iloc[0])
    wide = table.pivot_table(index="seed", columns=["optimizer", sweep], values="llc")
    columns = {
        value: (wide["ngd"][value] - wide["sgd"][value]) / wide["sgd"][value][wide["ngd"][value].notna()].mean()
        for value in np.sort(table[sweep].unique())
        if ("ngd", value) in wide and ("sgd", value) in wide
    }
    return pd.DataFrame(columns, index=wide.index)


def cutoff_summary(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each network and setting: LLCs, means over seeds, and NGD over SGD - 1, 95 % t interval.

    Columns: task, width, sweep, localization, step_size, curvature_cutoff; seeds, those with both estimates;
    sgd, ngd; relative_difference, low, high; problems, of the estimates that do not count.
    """
    rows = []
    for place, own in table.groupby([*PLACE, "sweep"], sort=False):
        differences, sweep = relative_differences(own), str(place[-1])
        for value, of_value in own.groupby(sweep):
            values = differences[value].dropna() if value in differences else pd.Series(dtype=float)
            interval = t_interval(values)
            row: dict[str, Any] = dict(zip([*PLACE, "sweep"], place, strict=True))
            row |= {name: of_value[name].iloc[0] for name in (*SWEEPS, "curvature_cutoff")}
            row |= {"seeds": len(values)}
            row |= {name: of_value[of_value.optimizer == name].llc.mean() for name in ("sgd", "ngd")}
            row |= {"relative_difference": values.mean(), "low": interval.low, "high": interval.high}
            lacking = of_value[of_value.llc.isna()]
            rows.append(row | {"problems": "; ".join(sorted(set(lacking.problem.dropna()) - {""}))})
    return pd.DataFrame(rows)


# ------------------------------------------------------------------------------------ judge
def judge_cutoffs(table: pd.DataFrame, summary: pd.DataFrame, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge sign and size over the localizations, and the size over the step sizes, for each network.

    Args:
        table: `cutoffs`.
        summary: `cutoff_summary`.
        claims: those of the target.
    """
    results = []
    for network, own in by_network(table):
        over = {sweep: relative_differences(rows) for sweep, rows in own.groupby("sweep", sort=False)}
        why = "NGD over SGD: " + "; ".join(_described(row) for _, row in at(summary, own).iterrows()) + "."
        for name, sweep in (
            ("llc-higher-every-cutoff", "localization"),
            ("size-whatever-cutoff", "localization"),
            ("size-whatever-step", "step_size"),
        ):
            claim, found = claims.claim(name, of=network), over.get(sweep, pd.DataFrame())
            results.append(_judge(claim, found, why, smallest=name.startswith("llc-higher")))
    return results


def _judge(claim: Claim, differences: pd.DataFrame, why: str, *, smallest: bool) -> ClaimResult:
    """Judge the smallest of the settings' means, or what changes from the first setting to the last."""
    if differences.shape[1] < 2 or (differences.count() < 2).any():
        return out_of_reach(claim, f"Two settings at least need two seeds each with both estimates. {why}")
    if smallest:
        values = differences[differences.mean().idxmin()].dropna()
    else:
        values = (differences.iloc[:, -1] - differences.iloc[:, 0]).dropna()
    if len(values) < 2:
        return out_of_reach(claim, f"Fewer than two seeds have both estimates at both ends. {why}")
    return judge(claim, values.mean(), t_interval(values), if_not_reproduced=why)


def _described(row: pd.Series) -> str:
    text = f"γ = {row.localization:g} (γ/(nβ) = {row.curvature_cutoff:.2g}), step size {row.step_size:g}: "
    if not row.seeds:
        return text + f"none ({row.problems or 'training has not converged'})"
    return text + f"{100 * row.relative_difference:+.0f} % ({100 * row.low:+.0f} to {100 * row.high:+.0f})"
