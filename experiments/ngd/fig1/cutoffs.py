"""NGD over SGD with other settings of the sampler: the localization, which cuts curvature off, and the step size.

What a localization γ takes for flat is a direction of curvature below γ/nbeta: there the loss does not hold the
chains, and an estimate counts little of it. An LLC is a number for one such cut-off.

One run of Lanczos at the trained weights has it at every cut-off. Were the loss quadratic around the weights, with
a Hessian G of eigenvalues h, chains of localization γ would give ½ Σ h / (h + γ/nβ), whatever their step. G is the
Gauss-Newton matrix of the training data. What SGLD gives otherwise comes of what this leaves out: the rest of the
Hessian, the loss beyond its second order, the point that chains are measured from, the noise of batches and of the
step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from omegaconf import DictConfig, OmegaConf
from torch import nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.lab import Claim, ClaimResult, ClaimSheet, Run, judge, out_of_reach, panels, t_interval, unit
from curvlab.spectrum import spectral_density
from experiments.ngd.fig1.widths import PLACE, at, by_network, measured_again, place_of
from experiments.ngd.trajectories import Network, final_estimate, first_columns, trained_network

SWEEPS = ("localization", "step_size")
CUTOFFS = np.geomspace(1e-3, 1e2, 21)  # γ/nβ, five decades


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


def quadratic_tables(networks: Sequence[Network]) -> dict[str, pd.DataFrame]:
    """Return `quadratic`: one row for each network, optimizer, seed and cut-off, with the quadratic `llc`.

    Args:
        networks: all of them; those whose width is in `cutoffs.widths` are measured, with `cutoffs.seeds` and the
            `cutoffs.spectrum` (arguments of spectral_density).
    """
    rows = []
    for network in networks:
        for name, optimizer, seed in measured_again(network):
            key, model = trained_network(network, optimizer, network.settings, seed)
            settings = dict(network.settings.cutoffs.spectrum)
            found = _spectrum(network.run, network, model, seed, **key, spectrum=settings)
            nodes, weights = found["nodes"].clamp(min=0), found["weights"]
            size = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
            for cutoff in CUTOFFS:
                share = float((weights * nodes / (nodes + cutoff)).sum(1).mean())
                place = place_of(network) | {"optimizer": name, "seed": seed, "curvature_cutoff": cutoff}
                rows.append(place | {"llc": size * share / 2})
    return {"quadratic": pd.DataFrame(rows)}


@unit("ngd/spectrum", version=1, about="spectrum of {seed_name} by {optimizer[name]}, seed {repeat}")
def _spectrum(
    run: Run, network: Network, model: nn.Module, seed: int, /, *, spectrum: dict[str, Any], **_: Any
) -> dict[str, Any]:
    """Return the quadrature's nodes and weights, (probes, steps); both optimizers have the same starts."""
    operator = GaussNewtonOperator(model, network.loss, network.train)
    generator = network.generator("spectrum", seed)
    found = spectral_density(operator, **spectrum, progress=False, generator=generator)
    run.add_matvecs(found.num_matvecs)
    return {"nodes": found.nodes, "weights": found.weights}


def excess(table: pd.DataFrame) -> pd.DataFrame:
    """Return NGD minus SGD over SGD's mean over seeds, by seed (rows) and cut-off (columns), of one network."""
    ngd, sgd = (
        table[table.optimizer == name].pivot(index="seed", columns="curvature_cutoff", values="llc")
        for name in ("ngd", "sgd")
    )
    return (ngd - sgd) / sgd.mean()


# ------------------------------------------------------------------------------------ judge
def judge_cutoffs(
    table: pd.DataFrame, summary: pd.DataFrame, quadratic: pd.DataFrame, claims: ClaimSheet
) -> list[ClaimResult]:
    """Judge sign and size over the localizations, and the size over the step sizes, for each network.

    Args:
        table: `cutoffs`.
        summary: `cutoff_summary`.
        quadratic: of the same networks.
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
            share = _of_matrix(at(quadratic, own), own) if name == "size-whatever-cutoff" else ""
            results.append(_judge(claim, found, share + why, smallest=name.startswith("llc-higher")))
    return results


def _of_matrix(quadratic: pd.DataFrame, table: pd.DataFrame) -> str:
    """Return what of the change over the localizations the Gauss-Newton matrix has, on the same seeds."""
    cutoffs = table[table.sweep == "localization"].curvature_cutoff
    if quadratic.empty or cutoffs.empty:
        return ""
    means = 100 * excess(quadratic[quadratic.seed.isin(table.seed)]).mean()
    low, high = np.interp(np.log([cutoffs.min(), cutoffs.max()]), np.log(means.index.to_numpy(float)), means)
    return f"Of this the Gauss-Newton matrix has {high - low:+.0f} points ({low:+.0f} to {high:+.0f} %). "


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


def judge_quadratic(table: pd.DataFrame, summary: pd.DataFrame, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge the sign at the cut-off of the smallest mean; `summary` is of the chains (`cutoff_summary`)."""
    results = []
    for network, own in by_network(table):
        claim, over = claims.claim("quadratic-higher-every-cutoff", of=network), excess(own)
        if len(over.dropna()) < 2:
            results.append(out_of_reach(claim, "Fewer than two seeds have both spectra."))
            continue
        means, sampled = 100 * over.mean(), at(summary, own)
        chains = 100 * sampled[sampled.sweep == "localization"].relative_difference.dropna()
        why = f"NGD over SGD by Gauss-Newton: {means.min():+.0f} to {means.max():+.0f} % over the cut-offs"
        why += f", {chains.min():+.0f} to {chains.max():+.0f} % by SGLD at its own." if len(chains) else "."
        smallest = over[over.mean().idxmin()]
        results.append(judge(claim, smallest.mean(), t_interval(smallest), if_not_reproduced=why))
    return results


# ------------------------------------------------------------------------------------ draw
QUADRATIC, CHAINS = "by the Gauss-Newton matrix", "by SGLD"


def draw_cutoffs(ax: Axes, table: pd.DataFrame, summary: pd.DataFrame) -> None:
    """Draw NGD over SGD - 1 of one network against the cut-off, by Lanczos (`table`) and by SGLD (`summary`)."""
    styles = panels.styles_of((QUADRATIC, CHAINS))
    over = (100 * excess(table)).melt(value_name="over", ignore_index=False).assign(by=QUADRATIC)
    panels.lines(ax, over, x="curvature_cutoff", y="over", by="by", styles=styles)
    chains = summary[(summary.sweep == "localization") & summary.relative_difference.notna()]
    ends = 100 * (chains.relative_difference - chains.low).abs().fillna(0.0)
    kind: dict[str, Any] = {"fmt": "D", "color": styles[CHAINS]["color"], "capsize": 3, "label": CHAINS}
    ax.errorbar(chains.curvature_cutoff, 100 * chains.relative_difference, yerr=ends, **kind)
    panels.rule(ax, y=0)
    panels.frame(ax, x="curvature cut-off γ/(nβ)", y="NGD over SGD − 1 (%)", log="x")
