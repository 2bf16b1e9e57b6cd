"""Fig. 2: NGD above SGD in LLC and tr(H); LLC levels off, tr(H) falls."""

from __future__ import annotations

import numpy as np
import pandas as pd

from curvlab.lab import Claim, ClaimResult, ClaimSheet, Computed, out_of_reach, t_interval
from curvlab.lab import judge as judge_claim


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge the claims on each task; intervals are over seeds."""
    table, matched = computed["table"], computed["matched"]
    results = []
    for task, own in table.groupby("task", sort=False):
        of_task = str(task)
        results += [
            _higher(claims.claim(f"{quantity}-higher", of=of_task), own, quantity, matched[matched.task == task])
            for quantity in ("llc", "trace")
        ]
        results += [
            _plateau(claims.claim(f"llc-plateaus-{name}", of=of_task), own, name) for name in ("sgd", "ngd")
        ]
        results.append(_falls(claims.claim("trace-decreases", of=of_task), own))
    return results


def _higher(claim: Claim, table: pd.DataFrame, quantity: str, matched: pd.DataFrame) -> ClaimResult:
    usable = table[table.valid] if quantity == "llc" else table
    wide = usable.pivot_table(index="seed", columns=["optimizer", "epoch"], values=quantity)
    wide = wide.reindex(table.seed.unique()).dropna(axis="columns")  # what every seed has
    epochs = [epoch for epoch in table.epoch.unique() if {("sgd", epoch), ("ngd", epoch)} <= set(wide.columns)]
    if not epochs:
        return out_of_reach(
            claim, "At no checkpoint have all seeds a learning coefficient of both (see `problem`)."
        )
    sgd, ngd = (wide[[(name, epoch) for epoch in epochs]].to_numpy().mean(axis=1) for name in ("sgd", "ngd"))
    values = (ngd - sgd) / sgd.mean()  # SGD's of one seed may lie near 0
    why = f"Of epochs {', '.join(map(str, epochs))}. {_at_matched_loss(matched, quantity)}"
    return judge_claim(claim, values.mean(), t_interval(values), if_not_reproduced=why)


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
    """Return, for each seed, the last checkpoint's value over that of the first one from half the epochs on."""
    own = table[table.optimizer == optimizer]
    if quantity == "llc":
        own = own[own.valid]
    epochs = np.sort(table.epoch.unique())
    middle, last = epochs[epochs >= epochs[-1] / 2][0], epochs[-1]
    wide = own.pivot_table(index="seed", columns="epoch", values=quantity)
    if middle == last or not {middle, last} <= set(wide.columns):
        return np.empty(0)
    return (wide[last] / wide[middle]).dropna().to_numpy()


def _plateau(claim: Claim, table: pd.DataFrame, optimizer: str) -> ClaimResult:
    ratios = _halves(table, optimizer, "llc")
    if len(ratios) < 2:
        return out_of_reach(claim, "For fewer than two seeds the LLC is one both in the middle and at the end.")
    loss = _halves(table, optimizer, "train_loss")
    why = f"The training loss at the end is {loss.mean():.2g} times that at half the epochs."
    return judge_claim(claim, ratios.mean(), t_interval(ratios), if_not_reproduced=why)


def _falls(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    ratios = [_halves(table, name, "trace") for name in ("sgd", "ngd")]
    if min(map(len, ratios)) < 2:
        return out_of_reach(claim, "It needs checkpoints at half the epochs and at the end, of two seeds.")
    worst = max(ratios, key=lambda ratio: ratio.mean())
    why = "Where tr(H) rises, the training loss still falls: see the figure."
    return judge_claim(claim, worst.mean(), t_interval(worst), if_not_reproduced=why)
