"""What Figs. 7 and 8 measure from the smallest validation loss on, and the claims that both judge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from curvlab.lab import Claim, ClaimResult, judge, out_of_reach, t_interval
from experiments.ngd.sampling import curvature_cutoff

QUANTITIES = ("validation_loss", "llc", "trace", "wbic")
RISES = 0.02  # relative rise of the validation loss from which a seed counts among those that overfit
_SAMPLED = {"llc": "llc_raw", "wbic": "wbic"}  # from chains, which may be not valid; and what the paper takes


def since_minimum(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each task, optimizer, seed and quantity: what it does past the smallest validation loss.

    Columns: minimum_epoch, the checkpoint of the smallest validation loss; checkpoints, how many from there on
    count (of LLC and WBIC, those with valid estimates); first_epoch, first, last_epoch, last, the quantity at the
    first and last of them; change, last/first - 1, where these are at least half of the epochs from the minimum on
    apart; rank_correlation, Spearman's with the validation loss over them; sampled_change, the change with every
    estimate, valid or not, from the weights, as in the paper, nan where it starts below 0; train_loss_first,
    train_loss_last, the training losses at the first and last epoch (nats); curvature_cutoff, γ/(nβ) of what is
    sampled.

    Args:
        table: see `experiments.ngd.overfitting.compute.compute`.
    """
    rows = []
    for place, own in table.groupby(["task", "optimizer", "seed"], sort=False):
        ordered = own.sort_values("epoch")
        minimum = int(ordered.epoch.iloc[ordered.validation_loss.argmin()])
        after = ordered[ordered.epoch >= minimum]
        for quantity in QUANTITIES:
            counted = after[after.valid.astype(bool)] if quantity in _SAMPLED else after
            row: dict[str, Any] = dict(zip(("task", "optimizer", "seed"), place, strict=True))
            row |= {"quantity": quantity, "minimum_epoch": minimum, "checkpoints": len(counted)}
            row["curvature_cutoff"] = curvature_cutoff(own) if quantity in _SAMPLED else np.nan
            row |= dict.fromkeys(
                ("first_epoch", "first", "last_epoch", "last", "change", "rank_correlation"), np.nan
            )
            row |= dict.fromkeys(("sampled_change", "train_loss_first", "train_loss_last"), np.nan)
            if len(counted) > 1:
                ends = counted.iloc[[0, -1]]
                row |= dict(zip(("first_epoch", "last_epoch"), ends.epoch, strict=True))
                row |= dict(zip(("first", "last"), ends[quantity], strict=True))
                row |= dict(zip(("train_loss_first", "train_loss_last"), ends.train_loss, strict=True))
                if row["last_epoch"] - row["first_epoch"] >= (after.epoch.max() - minimum) / 2:
                    row["change"] = row["last"] / row["first"] - 1
            if len(counted) > 2 and quantity != "validation_loss":
                found = stats.spearmanr(counted.validation_loss, counted[quantity])
                row["rank_correlation"] = float(found.statistic)
            sampled = after[_SAMPLED.get(quantity, quantity)]
            if len(after) > 1 and sampled.iloc[0] > 0:
                row["sampled_change"] = sampled.iloc[-1] / sampled.iloc[0] - 1
            rows.append(row)
    return pd.DataFrame(rows)


def judge_overfits(claim: Claim, since: pd.DataFrame, optimizer: str) -> ClaimResult:
    """Judge the rise of the validation loss of one optimizer.

    Args:
        claim: about the change of the validation loss.
        since: of one task, see `since_minimum`.
        optimizer: sgd or ngd.
    """
    values = overfitted(since, optimizer, "validation_loss").change.fillna(0.0).to_numpy()
    why = "Train for more epochs, on fewer examples, or with more label noise."
    return judge(claim, values.mean(), t_interval(values), if_not_reproduced=why)


def judge_increases(
    claim: Claim, since: pd.DataFrame, optimizer: str, quantity: str, more: str = ""
) -> ClaimResult:
    """Judge the change of a quantity (llc, trace, wbic) while `optimizer` overfits; `more` explains it further."""
    used = overfitted(since, optimizer, quantity).dropna(subset="change")
    if (lacking := why_none(since, optimizer, used)) is not None:
        return out_of_reach(claim, lacking)
    sampled = used.sampled_change.dropna().to_numpy()
    why = (
        f"It goes from {used['first'].mean():.4g} to {used['last'].mean():.4g}, {_from_to(used)}, while the "
        f"training loss goes from {used.train_loss_first.mean():.3g} to {used.train_loss_last.mean():.3g}: the "
        "curvature of the cross-entropy vanishes where that nears zero."
    )
    if quantity in _SAMPLED and len(sampled) > 1:
        every = t_interval(sampled)
        why += (
            f" With every estimate from the weights, valid or not, as in the paper: {sampled.mean():+.2f} "
            f"({every.low:+.2f} to {every.high:+.2f})."
        )
    values = used.change.to_numpy()
    return judge(claim, values.mean(), t_interval(values), if_not_reproduced=f"{why} {more}")


def overfitted(since: pd.DataFrame, optimizer: str, quantity: str) -> pd.DataFrame:
    """Return the rows of a quantity: of all seeds for the validation loss, else of those that overfit."""
    own = since[since.optimizer == optimizer]
    if quantity == "validation_loss":
        return own[own.quantity == quantity]
    rises = own[own.quantity == "validation_loss"]
    overfitted = rises[rises.change >= RISES].seed
    return own[(own.quantity == quantity) & own.seed.isin(overfitted)]


def why_none(since: pd.DataFrame, optimizer: str, used: pd.DataFrame) -> str | None:
    """Return why `used` is too little to judge; None where it is enough."""
    if len(used) > 1:
        return None
    rises = overfitted(since, optimizer, "validation_loss").change
    return (
        f"{int((rises >= RISES).sum())} of {len(rises)} seeds overfit, {len(used)} of them with enough valid "
        "estimates from the minimum of the validation loss on; two are needed."
    )


def _from_to(used: pd.DataFrame) -> str:
    return f"epochs {used.first_epoch.mean():.0f} to {used.last_epoch.mean():.0f} (means over {len(used)} seeds)"
