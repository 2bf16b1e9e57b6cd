"""What Fig. 1 shows of its table: means over seeds, and Welch's tests against SGD."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from curvlab.lab import Interval, t_interval
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


def relative_difference(table: pd.DataFrame, judged: str, column: str) -> tuple[float, Interval]:
    """Return the judged optimizer's means over SGD's, both summed over widths, less one, and its 95 % interval.

    Every width has the mean of its own valid seeds, so that a seed that lacks a width shifts no other. To first
    order the variance is (sum v_judged + ratio² sum v_sgd) / (sum of SGD's means)², v of each mean, with the
    degrees of freedom of Welch and Satterthwaite; nan where a width has fewer than two seeds.

    Args:
        table: rows of one task: optimizer, width, seed, llc and `column`.
        judged: optimizer that is compared with SGD.
        column: what is compared, over the rows that have an llc.
    """
    own = table[table.llc.notna() & table.optimizer.isin([judged, "sgd"])]
    by_width = own.groupby(["optimizer", "width"])[column].agg(["mean", "var", "count"])
    num_widths = table[table.optimizer == judged].width.nunique()
    fewest = int(by_width["count"].min()) if len(by_width) == 2 * num_widths else 0
    kind = f"t 95 % (Welch), {fewest} to {int(by_width['count'].max()) if len(by_width) else 0} seeds a width"
    sums = by_width["mean"].groupby("optimizer").sum()
    ratio = float(sums[judged] / sums["sgd"])
    if fewest < 2:
        return ratio - 1, Interval(np.nan, np.nan, kind, fewest)
    weights = np.where(by_width.index.get_level_values("optimizer") == judged, 1.0, ratio**2) / sums["sgd"] ** 2
    parts = weights * (by_width["var"] / by_width["count"]).to_numpy()
    variance = parts.sum()
    if not variance:  # of a table made by hand
        return ratio - 1, Interval(ratio - 1, ratio - 1, kind, fewest)
    degrees = variance**2 / (parts**2 / (by_width["count"].to_numpy() - 1)).sum()
    half = float(stats.t.ppf(0.975, degrees) * np.sqrt(variance))
    return ratio - 1, Interval(ratio - 1 - half, ratio - 1 + half, kind, fewest)
