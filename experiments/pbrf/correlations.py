"""Changes of test losses, predicted by influence and met by retraining, and how far they correlate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import DictConfig
from scipy import stats
from torch import Tensor

from curvlab.lab import Run, bootstrap_interval, load_paper_numbers, task_settings
from experiments.papers import FOLDER
from experiments.pbrf.carried_on import REACHED, carried_on
from experiments.pbrf.correlation_interval import correlation_interval
from experiments.pbrf.decomposition import Decomposition
from experiments.pbrf.exact_influence import ExactDecomposition
from experiments.pbrf.networks import load_network
from experiments.pbrf.small_weight import linearised_minimum, small_weight

COEFFICIENTS = ("pearson", "spearman")
WAYS = ("over_test", "over_points", "pooled")
MIN_POINTS = 2  # at their minimum, for a correlation of theirs


def correlation_tables(
    run: Run,
    cfg: DictConfig,
    *,
    responses: Sequence[str],
    curvatures: Sequence[str],
    printed: dict[str, str],
    explained: bool = False,
) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each task, curvature and response, `correlations`, one for each seed, and more.

    For each left-out point the predicted changes of the test losses (first order, Eq. 20) are correlated with
    the met ones, in three ways: over the test examples, for each point, then averaged over the points
    (`over_test`; judged); over the points, for each test example, then averaged (`over_points`); and over all
    pairs (`pooled`). The paper does not say which is its own. Over the points a change that all of them share,
    such as that of training for longer, cancels, and warm start would correlate as two stages do: not so in
    Table 8.

    `networks` has a row for each task and seed: training and test loss, and of each curvature the residual of the
    influence estimate; of the Hessian how many of its eigenvalues lie below -λ, too. With `explained`, `points`
    has a row for each point: how near it came to a minimum, see `carried_on` and `small_weight`.

    Args:
        run: seeds, store.
        cfg: `tasks`, and for all of them or for one `seeds`, `num_points` and what `load_network` takes.
        responses: names, see `Decomposition.response`.
        curvatures: of the influence estimate.
        printed: the paper's table for each curvature.
        explained: also the responses that explain the PBRF's row: "carried_on", of these the points at their
            "minimum", "small_weight", "linearised_minimum".
    """
    found: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    states: list[dict[str, Any]] = []
    ends: list[pd.DataFrame] = []
    seeds: set[int] = set()
    for name, settings in task_settings(cfg).items():
        own: list[dict[str, Any]] = []
        for seed in settings.seeds:
            network = load_network(run, name, settings, seed)
            points = ExactDecomposition(network, settings.num_points)
            place = {"task": network.label, "seed": seed}
            met = [(response, points.loss_changes(response), slice(None)) for response in responses]
            if explained:
                ends.append(_ends(points).assign(**place))
                met += _explaining(points)
            for curvature in curvatures:
                predicted = points.predicted_changes(curvature)
                for response, changes, kept in met:
                    about = place | {"curvature": curvature, "response": response}
                    own += [about | row for row in _correlations(predicted[:, kept], changes[:, kept], run, seed)]
            states.append(place | _state(points, curvatures))
            seeds.add(seed)
        found += own
        rows += _rows(pd.DataFrame(own), settings, printed)
    run.note(seeds=sorted(seeds))
    tables = {"table": pd.DataFrame(rows), "correlations": pd.DataFrame(found), "networks": pd.DataFrame(states)}
    return tables | ({"points": pd.concat(ends)} if explained else {})


def _explaining(points: Decomposition) -> Iterator[tuple[str, Tensor, Any]]:
    """Yield name, changes of test losses (num_test, K) and the points that count."""
    if (further := carried_on(points)) is not None:
        yield "carried_on", further.changes, slice(None)
        reached = further.gradient_norm <= REACHED
        if int(reached.sum()) >= MIN_POINTS:
            yield "minimum", further.changes, reached
    if (small := small_weight(points)) is not None:
        yield "small_weight", small.changes, slice(None)
    yield "linearised_minimum", linearised_minimum(points), slice(None)


def _ends(points: Decomposition) -> pd.DataFrame:
    """Return how near each point came to a minimum, a row for each."""
    further, small = carried_on(points), small_weight(points)
    frame = pd.DataFrame({"point": points.points.tolist()})
    frame["weight over damping"] = 1 / (len(points.network.train[1]) * points.network.settings.damping)
    frame["carried_on gradient norm"] = np.nan if further is None else further.gradient_norm.numpy()
    frame["carried_on distance"] = np.nan if further is None else further.distance.numpy()
    frame["carried_on fall"] = np.nan if further is None else further.fall.numpy()
    frame["small_weight gradient norm"] = np.nan if small is None else small.gradient_norm.numpy()
    return frame


def _state(points: Decomposition, curvatures: Sequence[str]) -> dict[str, Any]:
    network = points.network
    state = points.base_state()
    found: dict[str, Any] = {"P": len(network.initial), "N": len(network.train[1]), "epochs": network.num_epochs}
    found |= {"learning rate": network.lr} | {
        key: state[key] for key in ("train_loss", "gradient_norm", "test_loss")
    }
    for curvature in curvatures:
        found[f"{curvature} residual"] = points.influence(curvature)[1]
    if "hessian" in curvatures:
        found |= points.hessian_spectrum()
    return found


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
    """Return means over seeds with intervals, see `correlation_interval`, beside the paper's numbers.

    With one seed the ends are those of the bootstrap over its points, where there is one: they say nothing of
    another seed, and decide nothing.
    """
    paper, dataset = load_paper_numbers("pbrf", folder=FOLDER), (settings.paper_row or " ").split()[-1:]
    rows = []
    for (task, curvature, response), part in own.groupby(["task", "curvature", "response"], sort=False):
        row: dict[str, Any] = {"task": task, "curvature": curvature, "response": response}
        row["seeds"] = part.seed.nunique()
        numbers = {(n.row, n.column): n.value for n in paper.in_table(printed.get(str(curvature), ""))}
        for coefficient in COEFFICIENTS:
            for way in WAYS:
                chosen = part[(part.coefficient == coefficient) & (part.way == way)]
                low, high = _ends_of(chosen)
                name = f"{coefficient} {way}"
                row |= {name: float(chosen.value.mean()), f"{name} low": low, f"{name} high": high}
            printed_column = f"{response}_{coefficient}"
            row[f"{coefficient} paper"] = numbers.get((dataset[0] if dataset else "", printed_column))
            same = [value for (_, column), value in numbers.items() if column == printed_column]
            row[f"{coefficient} paper low"] = min(same, default=None)
            row[f"{coefficient} paper high"] = max(same, default=None)
        rows.append(row)
    return rows


def _ends_of(chosen: pd.DataFrame) -> tuple[float, float]:
    if len(chosen) == 1 and "low" in chosen:
        return float(chosen.low.iloc[0]), float(chosen.high.iloc[0])
    interval = correlation_interval(chosen.value.to_numpy())
    return interval.low, interval.high
