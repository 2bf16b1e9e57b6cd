"""Fig. 1, claims: the LLC of NGD lies above that of SGD at every width, and significantly so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from curvlab.reporting import Claim, ClaimResult, Criterion, exact, judge, out_of_reach, t_interval

SOURCE = "Saghir et al. 2024, Sec. 3.1, Fig. 1"


def summary_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row a model and optimizer: mean LLC with 95 % t interval, losses, and p against sgd."""
    rows = []
    for (panel, width), model in table.groupby(["panel", "width"], sort=False):
        reference = model[model.optimizer == "sgd"].llc.dropna()
        for optimizer, own in model.groupby("optimizer", sort=False):
            llc = own.llc.dropna()
            row: dict[str, Any] = {"panel": panel, "width": width, "optimizer": optimizer}
            row |= {"seeds": len(own), "converged": int(own.converged.sum()), "llcs": len(llc)}
            row |= {"train_loss": own.train_loss.mean(), "validation_loss": own.validation_loss.mean()}
            row |= {"llc": np.nan, "llc_low": np.nan, "llc_high": np.nan, "difference": np.nan, "p": np.nan}
            if len(llc) > 0:
                interval = t_interval(llc.to_numpy())
                row |= {"llc": llc.mean(), "llc_low": interval.low, "llc_high": interval.high}
            if optimizer != "sgd" and min(len(llc), len(reference)) > 1:
                row["difference"] = llc.mean() - reference.mean()
                row["p"] = float(stats.ttest_ind(llc, reference, equal_var=False).pvalue)
            rows.append(row)
    return pd.DataFrame(rows)


def judge_claims(
    table: pd.DataFrame, summary: pd.DataFrame, *, claimed: str, settings: pd.DataFrame | None = None
) -> list[ClaimResult]:
    """Judge direction and significance for each panel (depth, LeNet-5).

    Args:
        table: a row a seed.
        summary: of `table`, see `summary_table`.
        claimed: the optimizer that is compared with sgd.
        settings: see `FairComparison.settings`; what a failure is explained with.
    """
    results = []
    for panel in summary.panel.unique():
        key = str(panel).lower().replace(" ", "-")
        direction, significance = _direction(key, panel), _significance(key, panel)
        from_minimum = _direction_from_minimum(key, panel)
        own = summary[(summary.panel == panel) & (summary.optimizer == claimed)]
        lacking = own[own.p.isna()]
        if len(lacking):
            reason = f"No LLC at width {', '.join(map(str, lacking.width))}: " + _why_none(table, panel, claimed)
            results += [out_of_reach(claim, reason) for claim in (direction, significance, from_minimum)]
            continue
        values = _relative_differences(table[table.panel == panel], claimed)
        why = _losses(summary[summary.panel == panel], claimed) + _elsewhere(settings, panel)
        results.append(judge(direction, values.mean(), t_interval(values), if_not_reproduced=why))
        largest = float(own.p.max())
        interval = exact(largest, kind=f"largest of {len(own)} tests, {own.seeds.iloc[0]} seeds each")
        results.append(judge(significance, largest, interval, if_not_reproduced=why))
        values = _relative_differences(table[table.panel == panel], claimed, from_minimum=True)
        results.append(judge(from_minimum, values.mean(), t_interval(values), if_not_reproduced=why))
    return results


def _direction(key: str, panel: str) -> Claim:
    return Claim(
        id=f"llc-higher-{key}",
        statement=f"NGD solutions have a higher LLC than SGD solutions over a range of model sizes ({panel}).",
        source=SOURCE,
        paper_value="higher, no number",
        measure="LLC of NGD minus that of SGD, seed by seed, averaged over widths, over SGD's mean",
        criterion=Criterion(at_least=0.0),
    )


def _direction_from_minimum(key: str, panel: str) -> Claim:
    return Claim(
        id=f"llc-higher-from-minimum-{key}",
        statement=f"NGD's LLC is the higher one, too, where both are measured from the minimum near the trained "
        f"weights ({panel}).",
        source="not in the paper: an LLC is too low by what the loss can still fall, and SGD and NGD end at "
        "different distances from a minimum",
        paper_value="no such comparison",
        measure="as above, with nbeta (L(w) - L(minimum that L-BFGS finds from w)) added to each LLC",
        criterion=Criterion(at_least=0.0),
    )


def _significance(key: str, panel: str) -> Claim:
    return Claim(
        id=f"llc-significant-{key}",
        statement=f"The difference of the LLCs is significant at every model size ({panel}).",
        source=SOURCE + ", caption (a p-value, printed as a t-value)",
        paper_value="1.9e-31 at the most significant size",
        measure="largest two-sided p of Welch's t-tests over widths",
        criterion=Criterion(at_most=0.05),
    )


def _relative_differences(table: pd.DataFrame, claimed: str, *, from_minimum: bool = False) -> np.ndarray:
    """Return one value a seed; SGD's LLCs are averaged first, since single ones may lie near zero."""
    own = table.assign(llc=table.llc + table.descent) if from_minimum else table
    wide = own.pivot_table(index=["seed", "width"], columns="optimizer", values="llc").dropna()
    means = wide.groupby("seed").mean()
    return ((means[claimed] - means["sgd"]) / wide["sgd"].mean()).to_numpy()


def _why_none(table: pd.DataFrame, panel: str, claimed: str) -> str:
    own = table[(table.panel == panel) & table.optimizer.isin([claimed, "sgd"]) & table.llc.isna()]
    if own.train_loss.isna().any():
        return "training diverged."
    if (~own.converged).any():
        return f"training has not converged (training loss {own.train_loss.max():.3g})."
    return f"the estimates are not valid ({own.problem.dropna().iloc[0]})."


def _losses(summary: pd.DataFrame, claimed: str) -> str:
    losses = {name: summary[summary.optimizer == name].train_loss.mean() for name in (claimed, "sgd")}
    widest = summary[summary.optimizer == claimed].sort_values("p").iloc[-1]
    return (
        f"p is largest at width {widest.width}, where the LLCs of NGD lie within {widest.llc_low:.3g} to "
        f"{widest.llc_high:.3g} and their mean {widest.difference:.3g} above SGD's. "
        f"The training losses differ, {losses[claimed]:.3g} (NGD) against {losses['sgd']:.3g} (SGD), and the LLC "
        "depends on them."
    )


def _elsewhere(settings: pd.DataFrame | None, panel: str) -> str:
    """Return how NGD compares in the settings that the paper does not have."""
    if settings is None:
        return ""
    own = settings[settings.model.str.startswith(panel) & (settings.quantity == "llc") & (settings.low.notna())]
    return "".join(
        f" {row.model}, {row.setting}: {100 * row.relative_difference:+.0f} % "
        f"({100 * row.low:+.0f} to {100 * row.high:+.0f})."
        for _, row in own.iterrows()
    )
