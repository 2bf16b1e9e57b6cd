"""Fig. 2, claims: NGD above SGD in LLC and tr(H); LLC levels off, tr(H) falls."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.reporting import Claim, ClaimResult, Criterion, judge, out_of_reach, t_interval

SOURCE = "Saghir et al. 2024, Sec. 3.1, Fig. 2"
NAMES = {"llc": "LLC", "trace": "tr(H)"}


def judge_claims(table: pd.DataFrame, matched: pd.DataFrame) -> list[ClaimResult]:
    """Judge the claims for each model; intervals are over seeds."""
    results = []
    for model, own in table.groupby("model", sort=False):
        similar = matched[matched.model == model]
        results += [_higher(str(model), own, quantity, similar) for quantity in ("llc", "trace")]
        results += [_plateau(str(model), own, optimizer) for optimizer in ("sgd", "ngd")]
        results += [_falls(str(model), own)]
    return results


def _higher(model: str, table: pd.DataFrame, quantity: str, matched: pd.DataFrame) -> ClaimResult:
    name = NAMES[quantity]
    claim = Claim(
        id=f"{quantity}-higher-{model}",
        statement=f"{name} is higher for NGD than for SGD across epochs ({model}).",
        source=SOURCE,
        paper_value="higher, no number",
        measure=f"NGD's {name} minus SGD's, mean over the checkpoints where both count, over SGD's mean over "
        "these and seeds; mean over seeds",
        criterion=Criterion(at_least=0.0),
    )
    usable = table[table.valid] if quantity == "llc" else table
    wide = usable.pivot_table(index=["seed", "epoch"], columns="optimizer", values=quantity)
    if not {"sgd", "ngd"} <= set(wide.columns) or wide.dropna().empty:
        return out_of_reach(claim, "At no checkpoint are both estimates a learning coefficient (see `problem`).")
    both = wide.dropna()
    means = both.groupby("seed").mean()
    values = ((means.ngd - means.sgd) / means.sgd.mean()).to_numpy()  # SGD's of one seed may lie near 0
    return judge(claim, values.mean(), t_interval(values), if_not_reproduced=_at_matched_loss(matched, quantity))


def _at_matched_loss(matched: pd.DataFrame, quantity: str) -> str:
    own = matched[(matched.quantity == quantity) & matched.difference.notna()]
    if own.empty:
        return "The two do not reach a common training loss (matched.csv)."
    interval = t_interval(own.difference.to_numpy())
    return (
        f"At equal training loss NGD - SGD is {own.difference.mean():.3g} ({interval.low:.3g} to "
        f"{interval.high:.3g}; SGD {own.sgd.mean():.3g}; matched.csv): at equal epochs the fit differs, too."
    )


def _halves(table: pd.DataFrame, optimizer: str, quantity: str) -> np.ndarray:
    """Return, for each seed, the last checkpoint's value over that of the checkpoint nearest half the epochs."""
    own = table[table.optimizer == optimizer]
    if quantity == "llc":
        own = own[own.valid]
    epochs = np.sort(table.epoch.unique())
    middle, last = epochs[np.abs(epochs - epochs[-1] / 2).argmin()], epochs[-1]
    wide = own.pivot_table(index="seed", columns="epoch", values=quantity)
    if middle == last or not {middle, last} <= set(wide.columns):
        return np.empty(0)
    return (wide[last] / wide[middle]).dropna().to_numpy()


def _plateau(model: str, table: pd.DataFrame, optimizer: str) -> ClaimResult:
    claim = Claim(
        id=f"llc-plateaus-{optimizer}-{model}",
        statement=f"Across epochs the LLC of {optimizer.upper()} plateaus ({model}).",
        source=SOURCE,
        paper_value="plateaus, no number",
        measure="LLC at the end over LLC at half the epochs, mean over seeds",
        criterion=Criterion(at_least=0.8, at_most=1.2),
    )
    ratios = _halves(table, optimizer, "llc")
    if len(ratios) < 2:
        return out_of_reach(claim, "For fewer than two seeds the LLC is one both in the middle and at the end.")
    why = "The LLC follows the training loss, which still falls: see the figure's last panel."
    if 0.8 <= ratios.mean() <= 1.2:
        why = f"It does on average; {len(ratios)} seeds are too few to tell."
    return judge(claim, ratios.mean(), t_interval(ratios), if_not_reproduced=why)


def _falls(model: str, table: pd.DataFrame) -> ClaimResult:
    claim = Claim(
        id=f"trace-decreases-{model}",
        statement=f"Across epochs the Hessian trace of both optimizers continues to decrease ({model}).",
        source=SOURCE,
        paper_value="decreases, no number",
        measure="tr(H) at the end over tr(H) at half the epochs, mean over seeds, the larger of both optimizers",
        criterion=Criterion(at_most=1.0),
    )
    ratios = [_halves(table, name, "trace") for name in ("sgd", "ngd")]
    if min(map(len, ratios)) < 2:
        return out_of_reach(claim, "It needs checkpoints at half the epochs and at the end, of two seeds.")
    worst = max(ratios, key=lambda ratio: ratio.mean())
    why = "tr(H) still rises while the training loss falls: see the figure."
    if worst.mean() <= 1:
        why = f"It falls on average; {len(worst)} seeds are too few to tell."
    return judge(claim, worst.mean(), t_interval(worst), if_not_reproduced=why)
