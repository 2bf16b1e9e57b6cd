"""What Fig. 1 shows of its table: means over seeds, and Welch's tests against SGD."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from curvlab.reporting import t_interval
from experiments.ngd.fig1.networks import PLACE
from experiments.ngd.sampling import curvature_cutoff


def summary_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each network and optimizer: mean LLC with 95 % t interval, losses, and p against sgd.

    llc is from the minimum; llc_raw and descent, whose sum it is, are means over the same seeds.
    """
    rows = []
    for place, network in table.groupby([*PLACE], sort=False):
        reference = network[network.optimizer == "sgd"].llc.dropna()
        for optimizer, own in network.groupby("optimizer", sort=False):
            counted = own[own.llc.notna()]
            llc = counted.llc
            row: dict[str, Any] = dict(zip(PLACE, place, strict=True)) | {"optimizer": optimizer}
            row |= {"seeds": len(own), "converged": int(own.converged.sum()), "llcs": len(llc)}
            row |= {"train_loss": own.train_loss.mean(), "validation_loss": own.validation_loss.mean()}
            row |= dict.fromkeys(("llc", "llc_low", "llc_high", "llc_raw", "descent", "difference", "p"), np.nan)
            row |= {"curvature_cutoff": curvature_cutoff(own)}
            if len(llc) > 0:
                interval = t_interval(llc.to_numpy())
                row |= {"llc": llc.mean(), "llc_low": interval.low, "llc_high": interval.high}
                row |= {"llc_raw": counted.llc_raw.mean(), "descent": counted.descent.mean()}
            if optimizer != "sgd" and min(len(llc), len(reference)) > 1:
                row["difference"] = llc.mean() - reference.mean()
                row["p"] = float(stats.ttest_ind(llc, reference, equal_var=False).pvalue)
            rows.append(row)
    return pd.DataFrame(rows)
