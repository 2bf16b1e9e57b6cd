"""Fig. 1, a larger epsilon: whether SGD on the proximal objective leaves the range of the quadratic, and when."""

from __future__ import annotations

import math

import pandas as pd

from curvlab.influence import agreement, median_rms
from experiments.lissa.fig1.paired import parting_steps
from experiments.lissa.fig1.records import Scores

COLUMNS = [
    "task", "epsilon", "position", "seed", "lissa_pbrf_case", "lissa_pbrf_pearson", "lissa_overflow",
    "pbrf_overflow", "lissa_length", "sgd_length", "parted_step", "length_at_parting",
]  # fmt: skip


def larger_epsilon_table(task: str, epsilon: float, scores: Scores) -> pd.DataFrame:
    """Return one row for each point and seed with C = 2 and this epsilon, columns as `panel_table` has them.

    `sgd_length`: of the seed's own SGD at its end, (θ - θ*) damping / (epsilon ‖g‖).
    """
    rows, pairs = [], scores.larger
    if pairs is None:
        return pd.DataFrame(columns=COLUMNS)
    scale = median_rms(scores.cg) if scores.cg.shape[1] else 0.0
    num_seeds, _, num_points = pairs.lissa.shape
    parted = [parting_steps(pairs.lissa_lengths[seed], pairs.distances[seed]) for seed in range(num_seeds)]
    for position in range(num_points):
        for seed in range(num_seeds):
            other = (seed + 1) % num_seeds
            x, y = pairs.lissa[seed, :, position], pairs.pbrf[other, :, position]
            finite = bool(x.isfinite().all() and y.isfinite().all())
            found = agreement(x, y, scale=scale) if finite else None
            step = int(parted[other][position])
            lengths = pairs.lissa_lengths[other, :, position]
            rows.append(
                {
                    "task": task,
                    "epsilon": epsilon,
                    "position": position,
                    "seed": seed,
                    "lissa_pbrf_case": found.case if found else "overflow",
                    "lissa_pbrf_pearson": found.pearson if found else math.nan,
                    "lissa_overflow": not bool(x.isfinite().all()),
                    "pbrf_overflow": not bool(pairs.pbrf[seed, :, position].isfinite().all()),
                    "lissa_length": float(pairs.lissa_lengths[seed, -1, position]),
                    "sgd_length": float(pairs.sgd_lengths[seed, -1, position]),
                    "parted_step": step,
                    "length_at_parting": float(lengths[step - 1]) if step else math.nan,
                }
            )
    return pd.DataFrame(rows, columns=COLUMNS)
