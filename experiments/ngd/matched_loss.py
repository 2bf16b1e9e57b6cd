"""LLC and tr(H) of two optimizers at equal training loss, from their checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from experiments.ngd.sampling import curvature_cutoff

_NUM_POINTS = 21


def matched_differences(table: pd.DataFrame, *, by: Sequence[str] = ("task",)) -> pd.DataFrame:
    """Return, for each network, seed and quantity, NGD - SGD averaged over the training losses that both reach.

    Each curve, quantity against log training loss, is interpolated linearly between checkpoints; of the LLC only
    valid estimates count. nan where the losses of the two do not overlap.

    Args:
        table: columns optimizer (sgd, ngd), seed, train_loss, valid, the quantities llc, trace, or one, and `by`.
        by: columns that tell the networks apart.
    """
    rows = []
    for (*network, seed), own in table.groupby([*by, "seed"], sort=False):
        for quantity in (name for name in ("llc", "trace") if name in table):
            usable = own[own.valid] if quantity == "llc" else own
            curves = [_curve(usable[usable.optimizer == name], quantity) for name in ("sgd", "ngd")]
            low, high = (
                max(c[0].min(initial=np.inf) for c in curves),
                min(c[0].max(initial=-np.inf) for c in curves),
            )
            row: dict[str, Any] = dict(zip(by, network, strict=True)) | {"seed": seed, "quantity": quantity}
            row["curvature_cutoff"] = curvature_cutoff(own) if quantity == "llc" else np.nan
            row |= dict.fromkeys(("loss_low", "loss_high", "sgd", "ngd", "difference"), np.nan)
            if all(len(c[0]) > 1 for c in curves) and low < high:
                grid = np.linspace(low, high, _NUM_POINTS)
                sgd, ngd = (float(np.interp(grid, *curve).mean()) for curve in curves)
                row |= {"loss_low": np.exp(low), "loss_high": np.exp(high)}
                row |= {"sgd": sgd, "ngd": ngd, "difference": ngd - sgd}
            rows.append(row)
    return pd.DataFrame(rows)


def _curve(rows: pd.DataFrame, quantity: str) -> tuple[np.ndarray, np.ndarray]:
    ordered = rows.sort_values("train_loss")
    return np.log(ordered.train_loss.to_numpy(float)), ordered[quantity].to_numpy(float)
