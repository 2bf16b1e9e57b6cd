"""Estimates where the answer is known: polynomials, by quadrature at the same n, nbeta and localization.

K(w) is a sum or a product of even powers with its minimum 0 at w = 0. A sum's asymptotic coefficient is
sum 1/(2 p_i) for powers 2 p_i (Watanabe 2009), a product's 1/(largest power). At finite n a product's value is far
below it, by a factor that grows like ln n only: nbeta E[K] is what an estimate can be compared with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from omegaconf import DictConfig
from torch import Tensor, nn

from curvlab.lab import ClaimResult, ClaimSheet, Interval, Run, out_of_reach, panels, unit
from curvlab.lab import judge as verdict
from curvlab.sampling import default_nbeta, estimate_llc
from experiments.shared.stats import mean


class _Polynomial(nn.Module):
    def __init__(self, powers: Sequence[int], *, product: bool) -> None:
        super().__init__()
        self.powers, self.product = tuple(powers), product
        self.w = nn.Parameter(torch.zeros(len(self.powers), dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        terms = torch.stack([self.w[i] ** power for i, power in enumerate(self.powers)])
        return (terms.prod() if self.product else terms.sum()).expand(len(inputs))


def known_table(run: Run, cfg: DictConfig) -> pd.DataFrame:
    """Return one row for each polynomial: estimate with interval, value at this n, asymptotic coefficient."""
    kinds = [(kind, list(powers)) for kind in ("sum", "product") for powers in cfg[f"{kind}s"]]
    return pd.DataFrame([_row(run, cfg, powers, product=kind == "product") for kind, powers in kinds])


def _row(run: Run, cfg: DictConfig, powers: list[int], *, product: bool) -> dict[str, Any]:
    kind = "product" if product else "sum"
    nbeta, localization = default_nbeta(cfg.n[kind]), cfg.localization[kind]
    settings = {name: cfg[name] for name in ("num_chains", "num_draws", "num_burnin_steps", "step_size")}
    settings |= {"localization": localization, "nbeta": nbeta}
    found = _estimate(run, powers=powers, product=product, **settings)
    names = (" " if product else " + ").join(f"w{i + 1}^{power}" for i, power in enumerate(powers))
    value = finite_value(powers, product=product, nbeta=nbeta, localization=localization)
    asymptotic = 1 / max(powers) if product else sum(1 / power for power in powers)
    row = {"problem": names, "n": cfg.n[kind], "nbeta": nbeta, "localization": localization}
    return row | found | {"at_this_n": value, "asymptotic": asymptotic}


@unit("benchmarks/llc_known", version=1, about="LLC of a polynomial, powers {powers}")
def _estimate(run: Run, /, *, powers: list[int], product: bool, **settings: Any) -> dict[str, Any]:
    model, nothing = _Polynomial(powers, product=product), torch.zeros(4, 1, dtype=torch.float64)
    seed = run.generator("llc_known", str(powers), str(product))
    data = (nothing, nothing[:, 0])
    llc = estimate_llc(model, lambda outputs, _: outputs.mean(), data, batch_size=4, **settings, generator=seed)
    low, high = llc.interval()
    return {"estimate": llc.value, "low": float(low), "high": float(high), "rhat": llc.rhat, "valid": llc.valid}


def finite_value(powers: Sequence[int], *, product: bool, nbeta: float, localization: float) -> float:
    """Return E[nbeta K] under exp(-nbeta K - localization/2 |w|²), by the midpoint rule (even powers)."""
    if not product and len(powers) > 1:
        return sum(finite_value([power], product=True, nbeta=nbeta, localization=localization) for power in powers)
    points = {1: 200_000, 2: 1500, 3: 160}[len(powers)]
    # Beyond 8 standard deviations of the localization, or where one power alone exceeds e^-40, nothing is left.
    reach = 8 / math.sqrt(localization)
    if len(powers) == 1:
        reach = min(reach, (40 / nbeta) ** (1 / powers[0]))
    axis = (np.arange(points) + 0.5) * reach / points
    energy, square = np.full((), nbeta), np.zeros(())
    for grid, power in zip(np.meshgrid(*[axis] * len(powers), indexing="ij", sparse=True), powers, strict=True):
        energy, square = energy * grid**power, square + grid**2
    weight = np.exp(-energy - localization / 2 * square)
    return float((energy * weight).sum() / weight.sum())


# ------------------------------------------------------------------------------------ claims and figure
CLAIMS = ("polynomial", "unbiased")


def judge(known: pd.DataFrame, claims: ClaimSheet, *, num_chains: int) -> list[ClaimResult]:
    """Judge each polynomial over chains, and the mean of all over polynomials."""
    results = []
    for _, row in known.assign(ratio=known.estimate / known.at_this_n).iterrows():
        slug = row.problem.replace(" + ", "-plus-").replace(" ", "-").replace("^", "")
        claim = claims.claim("polynomial", of=slug)
        if not row.valid:
            why = f"The rule finds its chains not valid (R-hat {row.rhat:.3g}); the ratio is {row.ratio:.3g}."
            results.append(out_of_reach(claim, why))
            continue
        interval = Interval(row.low / row.at_this_n, row.high / row.at_this_n, "t 95 %, chains", num_chains)
        why = f"R-hat is {row.rhat:.3g}; the asymptotic coefficient is {row.asymptotic:.3g}."
        results.append(verdict(claim, row.ratio, interval, if_not_reproduced=why))
    ratios = known.estimate / known.at_this_n
    why = f"{int((ratios > 1).sum())} of {len(ratios)} ratios are above 1; steps of a finite size raise them."
    found = mean(ratios, unit="polynomials")
    return [*results, verdict(claims.claim("unbiased"), *found, if_not_reproduced=why)]


def draw(ax: Axes, table: pd.DataFrame) -> None:
    """Draw estimates and asymptotic coefficients over the values at this n."""
    at = table.at_this_n
    ratios = table.assign(estimate=table.estimate / at, low=table.low / at, high=table.high / at)
    ratios = ratios.assign(asymptotic=table.asymptotic / at, of="estimate, 95 %")
    panels.forest(ax, ratios, name="problem", value="estimate", low="low", high="high", by="of")
    style: dict[str, Any] = {"color": "black", "markerfacecolor": "white", "linestyle": "none", "zorder": 1.9}
    label = "asymptotic coefficient, no estimate"
    ax.plot(ratios.asymptotic, range(len(ratios)), marker="d", label=label, **style)
    panels.rule(ax, x=1.0, color="black", linestyle="-", label="value at this n (quadrature)")
    panels.frame(ax, x="ratio to the value at this n", title="polynomials", log="x")
