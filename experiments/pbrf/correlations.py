"""Changes of test losses, predicted by influence and met by retraining, and how far they correlate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import DictConfig
from scipy import stats
from torch import Tensor

from curvlab.reporting import bootstrap_interval, load_paper_numbers, t_interval
from curvlab.runs import Run
from experiments.papers import FOLDER
from experiments.pbrf.decomposition import Decomposition
from experiments.pbrf.networks import load_network
from experiments.target import task_settings

COEFFICIENTS = ("pearson", "spearman")
WAYS = ("over_test", "over_points", "pooled")


def correlation_tables(
    run: Run, cfg: DictConfig, *, responses: Sequence[str], curvatures: Sequence[str], printed: dict[str, str]
) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each task, curvature and response, and `correlations`, one for each seed.

    For each left-out point the predicted changes of the test losses (first order, Eq. 20) are correlated with
    the met ones, in three ways: over the test examples, for each point, then averaged over the points
    (`over_test`; judged); over the points, for each test example, then averaged; and over all pairs (`pooled`).
    The paper does not say which is its own. Over the points a change that all of them share, such as that of
    training for longer, cancels, and warm start would correlate as two stages do: not so in Table 8.

    Args:
        run: seeds, store.
        cfg: `tasks`, and for all of them or for one `seeds`, `num_points` and what `load_network` takes.
        responses: names, see `Decomposition.response`.
        curvatures: of the influence estimate.
        printed: the paper's table for each curvature.
    """
    found: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    seeds: set[int] = set()
    for name, settings in task_settings(cfg).items():
        own: list[dict[str, Any]] = []
        for seed in settings.seeds:
            network = load_network(run, name, settings, seed)
            points = Decomposition(network, settings.num_points)
            for curvature in curvatures:
                predicted = points.predicted_changes(curvature)
                for response in responses:
                    place = {"task": network.label, "seed": seed, "curvature": curvature, "response": response}
                    own += [
                        place | row for row in _correlations(predicted, points.loss_changes(response), run, seed)
                    ]
            seeds.add(seed)
        found += own
        rows += _rows(pd.DataFrame(own), settings, printed)
    run.note(seeds=sorted(seeds))
    return {"table": pd.DataFrame(rows), "correlations": pd.DataFrame(found)}


def _correlations(predicted: Tensor, met: Tensor, run: Run, seed: int) -> list[dict[str, Any]]:
    """Return each coefficient in each way, with a bootstrap over the points, of (num_test, K) changes."""
    x, y = predicted.double().numpy(), met.double().numpy()
    generator = np.random.default_rng([run.cfg.seed, seed])
    rows = []
    for coefficient in COEFFICIENTS:
        by_point = np.array([_correlation(coefficient, x[:, k], y[:, k]) for k in range(x.shape[1])])
        by_test = np.array([_correlation(coefficient, x[m], y[m]) for m in range(len(x))])
        values = {
            "over_test": float(np.nanmean(by_point)),
            "over_points": float(np.nanmean(by_test)),
            "pooled": _correlation(coefficient, x.ravel(), y.ravel()),
        }
        kept = by_point[np.isfinite(by_point)]
        interval = bootstrap_interval(kept, lambda sample: float(np.mean(sample)), generator=generator)
        for way in WAYS:
            row: dict[str, Any] = {"coefficient": coefficient, "way": way, "value": values[way]}
            if way == "over_test":
                row |= {"low": interval.low, "high": interval.high, "points": len(kept)}
            rows.append(row)
    return rows


def _correlation(coefficient: str, x: np.ndarray, y: np.ndarray) -> float:
    if x.std() == 0 or y.std() == 0:
        return float("nan")
    found = stats.pearsonr(x, y) if coefficient == "pearson" else stats.spearmanr(x, y)
    return float(found.statistic)


def _rows(own: pd.DataFrame, settings: DictConfig, printed: dict[str, str]) -> list[dict[str, Any]]:
    """Return means over seeds with t intervals, beside the paper's numbers."""
    paper, dataset = load_paper_numbers("pbrf", folder=FOLDER), (settings.paper_row or " ").split()[-1:]
    rows = []
    for (task, curvature, response), part in own.groupby(["task", "curvature", "response"], sort=False):
        row: dict[str, Any] = {"task": task, "curvature": curvature, "response": response}
        row["seeds"] = part.seed.nunique()
        for coefficient in COEFFICIENTS:
            for way in WAYS:
                values = part[(part.coefficient == coefficient) & (part.way == way)].value.to_numpy()
                row[f"{coefficient} {way}"] = float(values.mean())
                if way == "over_test":
                    interval = t_interval(values)
                    row |= {f"{coefficient} low": interval.low, f"{coefficient} high": interval.high}
            numbers = {(n.row, n.column): n.value for n in paper.in_table(printed.get(str(curvature), ""))}
            row[f"{coefficient} paper"] = numbers.get((dataset[0] if dataset else "", f"{response}_{coefficient}"))
        rows.append(row)
    return rows
