"""What Figs. 7 and 8 would say had training ended at an earlier checkpoint, and the claim that both judge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from curvlab.lab import Claim, ClaimResult, judge, out_of_reach, t_interval
from curvlab.lab.reporting.plots import MIN_SEEDS
from experiments.ngd.overfitting.measures import QUANTITIES, overfitted, since_minimum

JUDGED = tuple(quantity for quantity in QUANTITIES if quantity != "validation_loss")
PLACE = ["task", "optimizer", "quantity"]


def changes_by_last_epoch(table: pd.DataFrame) -> pd.DataFrame:
    """Return every change that is judged, of the table cut off at each checkpoint: one row for each that there is.

    Columns: task, optimizer, quantity (llc, trace, wbic), last_epoch, the checkpoint at which training ends, seed,
    change. All as in `since_minimum` of the checkpoints up to there: the minimum of the validation loss is the
    smallest so far, only seeds count whose validation loss has risen by then, and only valid estimates.

    Args:
        table: see `experiments.ngd.overfitting.compute.compute`.
    """
    parts = []
    for epoch in sorted(table.epoch.unique())[1:]:
        since = since_minimum(table[table.epoch <= epoch])
        for (_, optimizer), own in since.groupby(["task", "optimizer"], sort=False):
            for quantity in JUDGED:
                used = overfitted(own, str(optimizer), quantity).dropna(subset="change")
                parts.append(used[[*PLACE, "seed", "change"]].assign(last_epoch=epoch))
    return pd.concat(parts, ignore_index=True)[[*PLACE, "last_epoch", "seed", "change"]]


def last_epoch_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each task, optimizer, quantity and checkpoint at which training might have ended.

    Columns: seeds, those that overfit by then and have the quantity; change, its mean over them; low, high, the
    95 % t interval of three or more; sign: rises or falls where the whole interval does, undecided elsewhere, none
    with fewer than three seeds.
    """
    changes = changes_by_last_epoch(table)
    groups = {place: own.change.to_numpy(float) for place, own in changes.groupby([*PLACE, "last_epoch"])}
    rows = []
    for (task, optimizer), own in table.groupby(["task", "optimizer"], sort=False):
        for quantity in JUDGED:
            for epoch in sorted(own.epoch.unique())[1:]:
                values = groups.get((task, optimizer, quantity, epoch), np.empty(0))
                row: dict[str, Any] = {"task": task, "optimizer": optimizer, "quantity": quantity}
                row |= {"last_epoch": epoch, "seeds": len(values), "change": np.nan, "low": np.nan, "high": np.nan}
                if len(values):
                    row["change"] = values.mean()
                if len(values) >= MIN_SEEDS:
                    interval = t_interval(values)
                    row |= {"low": interval.low, "high": interval.high}
                rows.append(row | {"sign": _sign(row)})
    return pd.DataFrame(rows)


def judge_sign(claim: Claim, table: pd.DataFrame, optimizer: str, quantity: str) -> ClaimResult:
    """Judge whether the sign of the change depends on where training ends.

    For each seed: of its changes at all ends, the smallest in the direction of the mean change at the last one; it
    is negative where the seed would have shown the opposite at some end.

    Args:
        claim: about that smallest change.
        table: of one task, as in `changes_by_last_epoch`.
        optimizer: sgd or ngd.
        quantity: llc, trace or wbic.
    """
    changes = changes_by_last_epoch(table)
    own = changes[(changes.optimizer == optimizer) & (changes.quantity == quantity)]
    at_end = own[own.last_epoch == table.epoch.max()].change
    ends = own.last_epoch.nunique()
    if len(at_end) < 2 or ends < 2:
        reason = f"It needs two checkpoints at which two seeds overfit, with valid estimates; there are {ends}."
        return out_of_reach(claim, reason)
    values = own.assign(along=np.sign(at_end.mean()) * own.change).groupby("seed").along.min().to_numpy()
    told = last_epoch_table(table)
    told = told[(told.optimizer == optimizer) & (told.quantity == quantity) & (told.seeds > 0)]
    texts = [_told(row) for row in told.to_dict("records")]
    why = f"The change by the epoch at which training ends (last_epoch.csv): {', '.join(texts)}."
    return judge(claim, values.mean(), t_interval(values), if_not_reproduced=why)


def _told(row: Mapping[Any, Any]) -> str:
    interval = f"{row['low']:+.2f} to {row['high']:+.2f}; " if row["seeds"] >= MIN_SEEDS else ""
    return f"{row['last_epoch']}: {row['change']:+.2f} ({interval}{row['seeds']} seeds)"


def _sign(row: dict[str, Any]) -> str:
    if row["seeds"] < MIN_SEEDS:
        return "none"
    if row["low"] > 0:
        return "rises"
    return "falls" if row["high"] < 0 else "undecided"
