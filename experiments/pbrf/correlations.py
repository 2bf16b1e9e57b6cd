"""Changes of test losses, predicted by influence and met by retraining, and how far they correlate: tab6 to tab8.

`estimate` says how influence was solved: "exact"; "LiSSA, σ = 25", the paper's, of depth 5,000, at every scaling
of its list; "own length", the filter of a descent as long as the PBRF's. The paper's claims are judged by LiSSA at
that scaling whose correlation with the PBRF is highest (the paper tunes it and prints none), exact ones are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import DictConfig
from torch import Tensor

from curvlab.lab import Run, load_paper_numbers, task_settings
from curvlab.lab.claims import (
    Claim,
    ClaimResult,
    ClaimSheet,
    Interval,
    bootstrap_interval,
    judge,
    out_of_reach,
    withheld,
)
from curvlab.lab.claims.claims import DIRECTION_ONLY, OUT_OF_REACH, REPRODUCED
from experiments.papers import FOLDER
from experiments.pbrf.gaps import arrived, explained
from experiments.pbrf.minima import MAX_DISTANCE, REACHED, carried_on, small_weight
from experiments.pbrf.networks import load_network
from experiments.pbrf.responses import EXACT, OWN_LENGTH, Decomposition
from experiments.pbrf.solvers import DEPTH, SCALES
from experiments.shared import stats

PAPER = {
    "num_points": "20, not stated here",
    "num_test": "not stated; of ours all there are, 103 of Concrete, 77 of Energy, 133 of diabetes",
    "seeds": "not stated",
    "networks.csv:epochs": 1000,
    "training.lr": "the best of 1, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001 by validation loss",
    "damping": 0.001,
    "bregman_lr_divisor": 10,
    "lissa.num_steps": DEPTH,
    "lissa.batch_size": "not stated; mean of 5 repeats. None: the exact mean of such runs, nothing repeated",
}  # settings of Tables 6 to 8, beside ours
COEFFICIENTS = {"pearson": False, "spearman": True}  # of ranks
WAYS = {"over_test": "over test examples", "over_points": "over points", "pooled": "over all pairs"}
NO_LISSA = "LiSSA is not computed at this preset; the value is the exact estimate's."
NO_EXACT = "The exact estimate is not computed at this preset."
WEAK = "So short a descent is nearly linear, and the filter is the closed form of a linear one: weak evidence."
MIN_POINTS = 2  # at their minimum, for a correlation of theirs
PBRF = "proximal_bregman"
CENTRAL = ("cold", "warm", PBRF, "linearised")  # responses of Tables 6 and 7
EXPLAINING = {
    "carried_on": "carried on at the undivided rate, all points",
    "minimum": "those at their minimum",
    "small_weight": "at the minimum for a small weight",
    "linearised": "linearised, by SGD",
    "linearised_minimum": "at the linearised minimum",
}


# ------------------------------------------------------------------------------------ compute
def correlation_tables(
    run: Run,
    cfg: DictConfig,
    *,
    printed: Mapping[str, str],
    responses: Sequence[str] = CENTRAL,
    explained: bool = True,
) -> dict[str, pd.DataFrame]:
    """Return `table`, a row for each task, curvature, estimate and response, `correlations` by seed, and more.

    For each left-out point the predicted changes of the test losses (first order, Eq. 20) are correlated with
    the met ones, in three ways: over the test examples, for each point, then averaged over the points
    (`over_test`; judged); over the points, for each test example, then averaged (`over_points`); and over all
    pairs (`pooled`). The paper does not say which is its own. Over the points a change that all of them share,
    such as that of training for longer, cancels, and warm start would correlate as two stages do: not so in
    Table 8.

    `networks` has a row for each task and seed: training and test loss, the length of the PBRF's descent, and of
    each curvature the residual of the exact influence estimate; of the Hessian how many of its eigenvalues lie
    below -λ, too. With `explained`, `points` has a row for each point: how near it came to a minimum, see
    `minima`.

    Args:
        run: seeds, store.
        cfg: `tasks`, and for all of them or for one `seeds`, `num_points` and what `load_network` takes.
        printed: the paper's table for each curvature of the influence estimate, "" where it has none.
        responses: names, see `Decomposition.displacement`.
        explained: also the responses that explain the PBRF's row, with the exact estimate: "carried_on", of these
            the points at their "minimum", "small_weight", "linearised_minimum".
    """
    found, rows, states, ends = [], [], [], []
    for name, settings in task_settings(cfg).items():
        own: list[dict[str, Any]] = []
        for seed in settings.seeds:
            points = Decomposition(load_network(run, name, settings, seed), settings.num_points)
            place = {"task": points.network.label, "seed": seed}
            met = [(response, points.loss_changes(response), slice(None)) for response in responses]
            if explained:
                ends.append(_ends(points).assign(**place))
            for curvature in printed:
                predicted = {EXACT: points.predicted_changes(curvature)} if points.is_solved(curvature) else {}
                predicted |= {name: own["predicted"] for name, own in points.truncated(curvature).items()}
                for estimate, changes in predicted.items():
                    more = list(_explaining(points)) if explained and estimate == EXACT else []
                    for response, other, kept in met + more:
                        about = {"curvature": curvature, "response": response}
                        of_seed = _correlations(changes[:, kept], other[:, kept], run, seed, estimate)
                        own += [place | about | row for row in of_seed]
            states.append(place | _state(points, printed))
        found += own
        rows += _rows(pd.DataFrame(own), settings, printed)
    networks = pd.DataFrame(states)
    run.note(seeds=sorted(set(networks.seed.tolist())))
    tables = {"table": pd.DataFrame(rows), "correlations": pd.DataFrame(found), "networks": networks}
    return tables | ({"points": pd.concat(ends)} if explained else {})


def _explaining(points: Decomposition) -> Iterator[tuple[str, Tensor, Any]]:
    """Yield name, changes of test losses (num_test, K) and the points that count."""
    if (further := carried_on(points)) is not None:
        yield "carried_on", further["changes"], slice(None)
        reached = further["gradient_norm"] <= REACHED
        if int(reached.sum()) >= MIN_POINTS:
            yield "minimum", further["changes"], reached
    if (small := small_weight(points)) is not None:
        yield "small_weight", small["changes"], slice(None)
    # The minimum of the linearised PBRF is the estimate with the Gauss-Newton matrix (Eq. 46): the changes differ
    # from the predicted ones in that the test losses are not linear in the parameters.
    yield "linearised_minimum", points.loss_changes("gauss_newton"), slice(None)


def _ends(points: Decomposition) -> pd.DataFrame:
    """Return how near each point came to a minimum, a row for each."""
    found = {"carried_on": carried_on(points), "small_weight": small_weight(points)}
    frame = pd.DataFrame({"point": points.points.tolist()})
    frame["weight over damping"] = 1 / (len(points.network.train[1]) * points.network.settings.damping)
    columns = ("carried_on gradient_norm", "carried_on distance", "carried_on fall", "small_weight gradient_norm")
    for which, _, name in (column.partition(" ") for column in columns):
        own = found[which]
        frame[f"{which} {name.replace('_', ' ')}"] = np.nan if own is None else own[name].numpy()
    return frame


def _state(points: Decomposition, curvatures: Iterable[str]) -> dict[str, Any]:
    network, state = points.network, points.base_state()
    found: dict[str, Any] = {"P": len(network.initial), "N": len(network.train[1]), "epochs": network.num_epochs}
    found |= {"learning rate": network.lr}
    found |= {key: state[key] for key in ("train_loss", "gradient_norm", "test_loss", "constant_loss")}
    found |= {"PBRF length": network.length(PBRF)}
    for curvature in curvatures:
        residual = points.influence(curvature)[1] if points.is_solved(curvature) else np.nan
        found |= {f"{curvature} residual": residual}
    return found | (points.hessian_spectrum() if "hessian" in curvatures else {})


def _correlations(predicted: Tensor, met: Tensor, run: Run, seed: int, estimate: str) -> list[dict[str, Any]]:
    """Return each coefficient in each way of (num_test, K) changes; of exact ones a bootstrap over the points."""
    x, y = predicted.double().numpy(), met.double().numpy()
    generator, rows = np.random.default_rng([run.cfg.seed, seed]), []
    for coefficient, ranked in COEFFICIENTS.items():
        pairs = ((x.T, y.T), (x, y), (x.reshape(1, -1), y.reshape(1, -1)))
        by_point, by_test, (pooled,) = (stats.row_correlations(*pair, ranked=ranked) for pair in pairs)
        values = {"over_test": _mean(by_point), "over_points": _mean(by_test), "pooled": pooled}
        kept = by_point[np.isfinite(by_point)]
        for way, value in values.items():
            row: dict[str, Any] = {"estimate": estimate, "coefficient": coefficient, "way": way, "value": value}
            if way == "over_test" and estimate == EXACT:
                interval = bootstrap_interval(kept, np.mean, generator=generator)
                row |= {"low": interval.low, "high": interval.high, "points": len(kept)}
            rows.append(row)
    return rows


def _mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def _rows(own: pd.DataFrame, settings: DictConfig, printed: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return means over seeds with t intervals, beside the paper's numbers.

    With one seed the ends are those of the bootstrap over its points, where there is one: they say nothing of
    another seed, and decide nothing.
    """
    paper, dataset = load_paper_numbers("pbrf", folder=FOLDER), (settings.paper_row or " ").split()[-1:]
    rows, names = [], ["task", "curvature", "estimate", "response"]
    for group, part in own.groupby(names, sort=False):
        row: dict[str, Any] = dict(zip(names, group, strict=True)) | {"seeds": part.seed.nunique()}
        numbers = {(n.row, n.column): n.value for n in paper.in_table(printed[row["curvature"]])}
        for coefficient in COEFFICIENTS:
            for way in WAYS:
                chosen = part[(part.coefficient == coefficient) & (part.way == way)]
                mean, interval = stats.mean_correlation(chosen.value)
                ends = (interval.low, interval.high)
                if len(chosen) == 1 and "low" in chosen:
                    ends = (float(chosen.low.iloc[0]), float(chosen.high.iloc[0]))
                name = f"{coefficient} {way}"
                row |= {name: mean, f"{name} low": ends[0], f"{name} high": ends[1]}
            column = f"{row['response']}_{coefficient}"
            same = [value for (_, other), value in numbers.items() if other == column]
            row[f"{coefficient} paper"] = numbers.get((dataset[0] if dataset else "", column))
            row |= {f"{coefficient} paper low": min(same, default=None)}
            row |= {f"{coefficient} paper high": max(same, default=None)}
        rows.append(row)
    return rows


# ------------------------------------------------------------------------------------ judge
def chosen_lissa(means: Mapping[Any, float], *, smallest: bool = False) -> str | None:
    """Return LiSSA at the scaling of the highest mean correlation, or at the smallest; None where none is finite.

    `means`: by the name of an estimate, also of others.
    """
    finite = {name: mean for name, mean in means.items() if name.startswith("LiSSA") and np.isfinite(mean)}
    if smallest:
        return min(finite, key=lambda name: float(name.rpartition("= ")[2]), default=None)
    return max(finite, key=lambda name: finite[name], default=None)


@dataclass(frozen=True)
class Judged:
    """The correlations of one task with one matrix, and how their claims are judged.

    Attributes:
        tables: computed.
        claims: of the target.
        task: label.
        curvature: of the influence estimate.
    """

    tables: Mapping[str, pd.DataFrame]
    claims: ClaimSheet
    task: str
    curvature: str

    @cached_property
    def estimates(self) -> list[str]:
        """The names of the task's estimates."""
        table = self.tables["correlations"].query("task == @self.task and curvature == @self.curvature")
        return table.estimate.unique().tolist()

    def lissa(self, *, smallest: bool = False) -> str | None:
        """Return LiSSA at the scaling of the highest mean correlation with the PBRF, or at the smallest scaling.

        Of those at which it is finite; None where there is none.
        """
        means = {name: self.values(PBRF, estimate=name).mean(skipna=False) for name in self.estimates}
        return chosen_lissa(means, smallest=smallest)

    def values(
        self, response: str, coefficient: str = "pearson", way: str = "over_test", *, estimate: str = EXACT
    ) -> pd.Series:
        """Return one correlation, by seed."""
        return self._by_seed.get((estimate, response, coefficient, way), pd.Series(dtype=float))

    @cached_property
    def _by_seed(self) -> dict[tuple[Hashable, ...], pd.Series]:
        table = self.tables["correlations"].query("task == @self.task and curvature == @self.curvature")
        groups = table.groupby(["estimate", "response", "coefficient", "way"])
        return {place: own.set_index("seed").value.sort_index() for place, own in groups}

    def correlation(
        self,
        name: str,
        response: str,
        coefficient: str = "pearson",
        *,
        estimate: str | None = None,
        judged: str = "over_test",
    ) -> ClaimResult:
        """Judge the mean over seeds of one correlation, `judged` of `WAYS`; by LiSSA unless another is named."""

        def values(of: str, way: str = judged) -> pd.Series:
            return self.values(response, coefficient, way, estimate=of)

        cells_of = response.removeprefix("slow_")  # the paper has one cell, and does not state its rate
        place = f"task == @self.task and curvature == @self.curvature and response == {cells_of!r}"
        cell = self.tables["table"].query(place)[f"{coefficient} paper"].dropna()  # the criterion is of all cells
        text = f"The paper's cell: {cell.iloc[0]:g}. " if len(cell) else ""
        return self.result(
            name, values, stats.mean_correlation, responses=(response,), estimate=estimate, cell=text
        )

    def difference(self, name: str, first: str, second: str, *, estimate: str | None = None) -> ClaimResult:
        """Judge how much more influence correlates with the first response than with the second, seed by seed."""

        def values(of: str, way: str = "over_test") -> pd.Series:
            return self.values(first, way=way, estimate=of) - self.values(second, way=way, estimate=of)

        return self.result(name, values, stats.mean, estimate=estimate, responses=(first, second))

    def result(
        self,
        name: str,
        values: Callable[..., pd.Series],
        statistic: Callable[..., tuple[float, Interval]],
        *,
        responses: Collection[str],
        estimate: str | None = None,
        cell: str = "",
    ) -> ClaimResult:
        """Judge a statistic over seeds of `values(estimate, way)` of `responses`; the note has all, and `cell`."""
        claim, chosen, missing = self.claims.claim(name, of=self.task), estimate or self.lissa(), ""
        if EXACT not in self.estimates and chosen in (None, EXACT):
            return out_of_reach(claim, NO_EXACT if chosen else arrived(is_exact=False, residual=np.nan))
        if chosen is None:  # the value is the exact estimate's then, and decides nothing
            known = any(other.startswith("LiSSA") for other in self.estimates)
            missing = arrived(is_exact=False, residual=np.nan) if known else NO_LISSA
            chosen = EXACT
        found = values(chosen)
        ways = ", ".join(f"{text} {values(chosen, way).mean():.2f}" for way, text in WAYS.items())
        others = ", ".join(
            f"{other} {values(other, 'over_test').mean(skipna=False):.2f}" for other in self.estimates
        )
        short = self.too_short(chosen) if PBRF in responses else ""
        few = " With one seed nothing is decided." if len(found) == 1 else ""
        why = f"{cell}By {chosen}: {ways}. Over test examples by {others}.{few}{short} {self.solved()}"
        result = judge(claim, *statistic(found), if_not_reproduced=why)
        if missing:
            return replace(result, verdict=OUT_OF_REACH, explanation=f"{missing} {why}")
        return self.reachable(result, chosen, why)

    def reachable(self, result: ClaimResult, estimate: str, why: str) -> ClaimResult:
        """Return the result with its explanation; out of reach where the network decides nothing (`arrived`).

        How far the retraining has got is not asked, as it is of pbrf-tab5's claims: those compare sizes with the
        exact estimate, which a short one is far from; here what predicts one that is cut off is the question.
        """
        own = self.networks
        learned = bool((own.train_loss < own.constant_loss).all())
        is_exact = estimate == EXACT
        residual = self.largest_residual if is_exact else 0.0
        reason = arrived(curvature=self.curvature, learned=learned, is_exact=is_exact, residual=residual)
        if reason:
            return replace(result, verdict=OUT_OF_REACH, explanation=f"{reason} {why}")
        return explained(result, why)

    @cached_property
    def networks(self) -> pd.DataFrame:
        """The task's networks, a row for each seed."""
        return self.tables["networks"].query("task == @self.task")

    @property
    def largest_residual(self) -> float:
        """The largest relative residual of the exact influence solves, of the seeds that have one."""
        has_one = self.networks.seed.isin(self.values(PBRF, estimate=EXACT).index)
        return float(self.networks[has_one][f"{self.curvature} residual"].max(skipna=False))

    def too_short(self, estimate: str) -> str:
        """Say so where the PBRF's descent is shorter than every LiSSA of the list; not of the exact estimate."""
        length, shortest = float(self.networks["PBRF length"].mean()), DEPTH / max(SCALES)
        if estimate == EXACT or not length < shortest:
            return ""
        text = f" The PBRF's length, {length:.2g}, is below that of every LiSSA of the list, {shortest:g} or more."
        return f"{text} {WEAK}" if estimate == OWN_LENGTH else text

    def solved(self) -> str:
        """Say how well the exact estimate was solved, and of the Hessian, what its matrix is."""
        own = self.networks
        residual = f"Residual of the exact solve: at most {self.largest_residual:.1g}."
        text = residual if EXACT in self.estimates else NO_EXACT
        if self.curvature != "hessian" or not np.isfinite(own.num_below).any():
            return text
        nearest = own.nearest.min()
        near = f", and min |μ + λ| is {nearest:.1g}" if np.isfinite(nearest) else ""
        return (
            f"{text} H + λI is at a saddle: {own.num_below.min():.0f} to {own.num_below.max():.0f} of "
            f"{own.P.iloc[0]} eigenvalues of H lie below -λ{near}: directions that no objective singles out "
            "dominate its inverse."
        )

    def otherwise(self) -> str:
        """Say what the exact estimate gives when the PBRF is carried on, and where its minimum is."""
        means = {text: self.values(response) for response, text in EXPLAINING.items()}
        parts = [f"{text}: {values.mean():.2f}" for text, values in means.items() if len(values)]
        own = self.tables["points"].query("task == @self.task")
        norms = own["carried_on gradient norm"].to_numpy()
        text = f"The PBRF otherwise (Pearson, over test examples): {'; '.join(parts)}."
        if not np.isfinite(norms).any():
            return f"{text} The PBRF was not carried on at this preset."
        distance, fall = own["carried_on distance"].to_numpy(), own["carried_on fall"].to_numpy()
        weight, num_reached = own["weight over damping"].iloc[0], int((norms <= REACHED).sum())
        return (
            f"{text} Of {len(own)} points carried on for a weight of 1/N ({weight:.2g} times the damping), "
            f"{num_reached} came to a gradient of at most {REACHED:g} of the first. They ended at "
            f"{np.nanmedian(distance):.2g} times the distance of their influence estimates (median; "
            f"{int((distance > MAX_DISTANCE).sum())} beyond {MAX_DISTANCE:g}), the objective down by "
            f"{np.nanmedian(fall):.2g} times what its linearisation can fall. With linear outputs and squared "
            "error both would be 1/(1 - h), h the leverage of the point: only their ratio speaks of more than "
            f"that ({np.nanmedian(fall / distance):.2g})."
        )

    def minimum(self, name: str, response: str) -> ClaimResult:
        """Judge the exact estimate's correlation with the PBRF at its minimum."""
        claim: Claim = self.claims.claim(name, of=self.task)
        values, seeds = self.values(response), self.networks.seed.nunique()
        came_from = "carried_on" if response == "minimum" else response
        norms = self.tables["points"].query("task == @self.task")[f"{came_from} gradient norm"]
        if not len(values) and not np.isfinite(norms).any():
            return out_of_reach(claim, "Not computed at this preset.")
        if len(values) < seeds:
            return out_of_reach(
                claim, f"Points at their minimum in {len(values)} of {seeds} seeds. {self.otherwise()}"
            )
        why = f"{self.otherwise()} {self.solved()}"
        return self.reachable(judge(claim, *stats.mean_correlation(values), if_not_reproduced=why), EXACT, why)


def only_if(result: ClaimResult, condition: ClaimResult, reason: str) -> ClaimResult:
    """Return the result, out of reach unless the condition holds at least in direction."""
    if condition.verdict in (REPRODUCED, DIRECTION_ONLY) or result.verdict == OUT_OF_REACH:
        return result
    return withheld(result, reason)


def judge_central(computed: Mapping[str, pd.DataFrame], claims: ClaimSheet) -> list[ClaimResult]:
    """Judge tab6 and tab7, of one curvature: influence answers what the PBRF asks, not what retraining asks."""
    tables, results = dict(computed), []  # read once, not at every look
    (curvature,) = tables["table"].curvature.unique()
    for task in tables["table"].task.unique():
        own = Judged(tables, claims, str(task), str(curvature))
        pbrf = own.correlation("pbrf", PBRF)
        results += [pbrf, own.correlation("pbrf-ranks", PBRF, "spearman")]
        for response in ("cold", "warm"):
            results.append(own.difference(f"above-{response}", PBRF, response))
            reason = (
                "That influence predicts the PBRF is not shown (first claim): a small correlation says little."
            )
            results.append(only_if(own.correlation(response, response), pbrf, reason))
        results.append(own.correlation("smallest-scaling", PBRF, estimate=own.lissa(smallest=True)))
        if "over-points" in claims.entries:
            results.append(own.correlation("over-points", "warm", judged="over_points"))
        exact = own.correlation("exact", PBRF, estimate=EXACT)
        results.append(replace(exact, explanation=f"{exact.explanation} {own.otherwise()}"))
        if OWN_LENGTH in own.estimates:
            results.append(own.correlation("own-length", PBRF, estimate=OWN_LENGTH))
        else:
            claim = claims.claim("own-length", of=str(task))
            results.append(out_of_reach(claim, "The PBRF is no descent of a known length at this preset."))
        for name, response in (("minimum", "minimum"), ("small-weight", "small_weight")):
            if name in claims.entries:
                results.append(own.minimum(name, response))
    return results
