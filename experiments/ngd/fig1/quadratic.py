"""NGD over SGD at every curvature cut-off: by one run of Lanczos at the trained weights, beside SGLD's.

Were the loss quadratic around the weights, with a Hessian G of eigenvalues h, chains of localization γ would give
½ Σ h / (h + γ/nβ), whatever their step: one spectrum has the LLC at every cut-off. G is the Gauss-Newton matrix of
the training data. What SGLD gives otherwise comes of what this leaves out: the rest of the Hessian, the loss
beyond its second order, the point that chains are measured from, the noise of batches and of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from torch import nn

from curvlab.curvature import GaussNewtonOperator
from curvlab.lab import ClaimResult, ClaimSheet, Run, judge, out_of_reach, panels, t_interval, unit
from curvlab.spectrum import spectral_density
from experiments.ngd.fig1.widths import at, by_network, measured_again, place_of
from experiments.ngd.trajectories import Network, trained_network

CUTOFFS = np.geomspace(1e-3, 1e2, 21)  # γ/nβ, five decades


# ------------------------------------------------------------------------------------ compute
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
