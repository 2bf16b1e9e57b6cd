"""An open board of attribution: which score predicts retraining, by which protocol, and at what price?

make bench-board PRESET=smoke|embedded|laptop|paper ARGS="peers_python=DIR/bin/python"

Three networks of each task, of three initialisations and orders of the batches, are scored by every method: how
does each training example change the loss of each query? Judges are networks that were trained again on random
halves of the training set, kept in a bank (results/banks; docs/enter.md), by two protocols. *Single run*: from a
scored network's own start, in its order, for as many steps, which is twice the epochs of a half. *Standard*: from
other starts, in other orders, for as many epochs, mean of ten seeds. So there are three columns. "Same seed": a
network's scores against single runs from its own start and order. "Other seeds": against those of the other
networks. "Standard". A cell is the linear datamodelling score (LDS; Park et al. 2023): Spearman's correlation over
the halves of predicted with measured losses, mean over networks and queries. Intervals are 95 %, of a bootstrap
that draws networks, halves and queries anew. Of a method with a grid of dampings the best is shown, chosen by the
column itself: an advantage that ours, whose damping is the length of the retraining, do not have. Its price is
that of the whole grid.

The length of the retraining that one asks about is the damping: 1/(ηT) for halves that take as many steps, 1/(fηT)
for as many epochs of a fraction f. The unrolled derivative is that of one training, in one order from one start;
"over other seeds" it is averaged over trainings by which nothing is judged.

Beside influence stand scores without gradients (labels alone; nearness of inputs, or of what the last layer reads,
times agreement of labels; of texts BM25 in place of these; the example's own loss), influence by 50 leading
eigenvectors alone, and Bayesian influence, the covariance of losses over Langevin chains at the same damping.
EK-FAC as preconditioner of conjugate gradients changes the price of influence alone.

residuals.csv has influence by plain conjugate gradients, cut off at several residuals: is an exact solve worth it?
fractions.csv has subsets of other sizes: what is beyond the first order grows as they shrink.

Which score should I use? Influence with the damping of the retraining's length, or its filter at a seventh of
the price, solved to a residual of 0.03: on digits an exact solve adds 0.002. Limits: these are MLPs; SOURCE,
which needs checkpoints of the run, is above it on digits by the standard protocol; on diabetes EK-FAC at its
best is level with influence and above the filter; only the very training that was scored is predicted better by
its unrolled derivative; and of the five per cent ranked first, EK-FAC finds the more harmful ones on three of
the five tasks of bench-attribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from omegaconf import DictConfig
from torch import Tensor

from curvlab.influence import Retraining, influence, influence_scores, unrolled_response
from curvlab.influence.bank import (
    AGAINST,
    SAME_SEED,
    STANDARD,
    Array,
    BankScore,
    centred_ranks,
    lds_of_predictions,
)
from curvlab.lab import Computed, Run, Target, panels, task_settings
from curvlab.solvers import ConjugateGradient
from experiments.benchmarks.attribution.methods import (
    COSINE,
    DOT,
    EKFAC,
    FILTER,
    INFLUENCE,
    RUN_DAMPING,
    UNROLLED,
    Method,
    own_scores,
    peers,
)
from experiments.benchmarks.attribution.network import Network
from experiments.benchmarks.board.banks import bank_of
from experiments.benchmarks.board.more_scores import more_scores
from experiments.benchmarks.gauges import work_clock

TARGET = Target(
    __name__,
    title="An open board: which score predicts retraining, by two protocols, on three networks a task",
    paper={"num_queries": "", "num_subsets": "", "num_networks": "", "num_standard": "", "dampings": ""},
    timings=("cost",),
)
RUN_EPOCHS, FILTER_EPOCHS = "influence, as many epochs", "filter, as many epochs"
AVERAGED = "unrolled over other seeds"
PROTOCOLS = ("single run", "standard")


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return the tables.

    `table`: LDS of each method and damping, by each column. `best`: of each method at its best damping.
    `differences`: of two methods, paired. `ranks`: where each row of `best` puts each half. `cost`: of each
    method, its whole grid, in trainings. `residuals`: LDS against what the solve leaves; `fractions`: against the
    size of the subsets; both for tasks that ask.
    """
    found: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("table", "best", "differences", "residuals", "fractions", "cost")
    }
    ranks = []
    for name, settings in task_settings(cfg).items():
        board = _Board(run, Network(run, name, settings))
        for table, rows in board.rows().items():
            found[table] += rows
        ranks.append(board.ranks())
    return {name: pd.DataFrame(rows) for name, rows in found.items() if rows} | {"ranks": pd.concat(ranks)}


@dataclass(frozen=True)
class _Row:
    """A method at one damping, on every network that it scored.

    Attributes:
        name: of the method.
        damping: None where there is none to choose.
        status: "done", or why not.
        predicted: (K, S, M), changes of the losses.
        seconds: of one network's scores.
    """

    name: str
    damping: float | None
    status: str
    predicted: Array | None = None
    seconds: float = float("nan")


class _Board:
    """One task: its networks scored, and judged by its bank."""

    def __init__(self, run: Run, network: Network) -> None:
        self.run, self.network, self.settings = run, network, network.settings
        self.bank = bank_of(run, network, fraction=float(self.settings.fraction))
        self.places = [network.at(k) for k in range(int(self.settings.num_networks))]
        self.trained = [place.trained(k) for k, place in enumerate(self.places)]

    # ------------------------------------------------------------------------------- scores
    @cached_property
    def scored(self) -> list[_Row]:
        """Every method at every damping."""
        every = [list(self._methods(k)) for k in range(len(self.places))]
        rows = []
        for same in zip(*every, strict=True):
            results = [self._unit(k, method) for k, method in enumerate(same)]
            status = next((r["status"] for r in results if r["status"] != "done"), "done")
            row = _Row(same[0].name, same[0].damping, status)
            if status == "done":
                scores = np.stack([r["scores"].double().cpu().numpy() for r in results])
                seconds = np.mean([r.get("cpu_seconds", r["seconds"]) for r in results])
                row = _Row(row.name, row.damping, status, self.bank.predictions(scores), float(seconds))
            rows.append(row)
        return [*rows, self._averaged()]

    def _methods(self, k: int) -> Iterator[Method]:
        place, trained = self.places[k], self.trained[k]
        yield from (method for method in own_scores(place, trained) if method.name != COSINE)
        yield from more_scores(place, trained)
        arguments, rtol = (trained.model, place.loss, place.train, place.test), float(self.settings.rtol)
        fraction = float(self.settings.fraction)
        asked: dict[str, Any] = {"run": trained.run.length(), "rtol": rtol}
        asked["retraining"] = Retraining.as_many_epochs(fraction)
        for name, filtered in ((RUN_EPOCHS, False), (FILTER_EPOCHS, True)):
            compute = partial(influence_scores, *arguments, **asked, filtered=filtered)
            yield Method(name, None, {"fraction": fraction, "rtol": rtol}, _done(compute))
        if self.settings.get("peers"):
            yield from peers(place, trained)

    def _unit(self, k: int, method: Method) -> dict[str, Any]:
        def timed() -> dict[str, Any]:
            clock = work_clock(self.run.device)
            start = clock()
            result = method.compute()
            return {"seconds": clock() - start} | result

        key = self.places[k].key | {"num_queries": self.settings.num_queries}
        key |= {"method": method.name, "damping": method.damping} | method.key
        about = f"{method.name} of {self.network.label}, network {k}"
        return self.run.unit("attribution/scores", key, timed, version=1, about=about)

    def _averaged(self) -> _Row:
        """Return the unrolled derivative, averaged over starts and orders by which nothing is judged."""
        first, each = len(self.places), []
        for seed in range(first, first + int(self.settings.num_averaged)):
            place = self.network.at(seed)

            def compute(place: Network = place, seed: int = seed) -> Tensor:
                trained = place.trained(seed)
                return unrolled_response(
                    trained.model, place.loss, place.train, place.test, run=trained.run
                ).scores

            key = place.key | {"num_queries": self.settings.num_queries, "method": UNROLLED, "damping": None}
            each.append(self.run.unit("attribution/scores", key, _timed(self.run, compute), version=1))
        scores = torch.stack([own["scores"] for own in each]).double().mean(0).cpu().numpy()
        predicted = np.repeat(self.bank.predictions(scores), len(self.places), axis=0)
        return _Row(AVERAGED, None, "done", predicted, sum(own["seconds"] for own in each))

    # ------------------------------------------------------------------------------- tables
    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of all tables but the ranks."""
        table: list[dict[str, Any]] = []
        for row in self.scored:
            names: dict[str, Any] = {
                "task": self.network.label,
                "method": row.name,
                "damping": row.damping,
                "status": row.status,
            }
            table += (
                [names]
                if row.predicted is None
                else [names | {"against": against} | _columns(self._lds(row, against)) for against in AGAINST]
            )
        return {
            "table": table,
            "best": self._best_rows(),
            "differences": self._differences(),
            "residuals": self._residuals(),
            "fractions": self._fractions(),
            "cost": self._cost(),
        }

    def _lds(self, row: _Row, against: str) -> BankScore:
        assert row.predicted is not None
        return lds_of_predictions([row.predicted], self.bank, against=against)

    @cached_property
    def _best(self) -> dict[tuple[str, str], _Row]:
        """The row of each method with the highest LDS, by method and column."""
        best: dict[tuple[str, str], _Row] = {}
        for against in AGAINST:
            for row in self.scored:
                if row.predicted is None:
                    continue
                key, value = (row.name, against), self._lds(row, against).value
                if key not in best or value > self._lds(best[key], against).value:
                    best[key] = row
        return best

    def _best_rows(self) -> list[dict[str, Any]]:
        return [
            {
                "task": self.network.label,
                "method": name,
                "against": against,
                "damping": row.damping,
                **_columns(self._lds(row, against)),
            }
            for (name, against), row in self._best.items()
        ]

    def _differences(self) -> list[dict[str, Any]]:
        """Return differences of two methods, each at its best where it has a grid."""
        rows = []
        for against in AGAINST:
            ours, filtered = (RUN_EPOCHS, FILTER_EPOCHS) if against == STANDARD else (RUN_DAMPING, FILTER)
            rivals = [name for name, column in self._best if column == against and EKFAC in name]
            ekfac = max(rivals, key=lambda name: self._lds(self._best[name, against], against).value)
            for question, first, second in (
                ("damping", INFLUENCE, ours),
                ("filter and EK-FAC", filtered, ekfac),
                ("influence and EK-FAC", ours, ekfac),
                ("unrolled and filter", UNROLLED, filtered),
                ("averaged and filter", AVERAGED, filtered),
                ("length", RUN_EPOCHS, RUN_DAMPING),
            ):
                pair = [self._best[name, against].predicted for name in (first, second)]
                found = lds_of_predictions(pair, self.bank, against=against)  # type: ignore[arg-type]
                names = {"task": self.network.label, "against": against, "question": question}
                rows.append(names | {"first": first, "second": second} | _columns(found, "difference"))
        return rows

    def ranks(self) -> pd.DataFrame:
        """Return the rank of each half among all, by query and network, for every row of `best`."""
        rows = {_label(row): row for row in self._best.values()}
        network, half, query = np.indices((len(self.places), *self.bank.single_run.shape[1:])).reshape(3, -1)
        middle = (len(self.bank.subsets) + 1) / 2
        columns = {
            label: np.stack([centred_ranks(own) + middle for own in row.predicted]).ravel()
            for label, row in rows.items()
            if row.predicted is not None
        }
        return pd.DataFrame(
            {"task": self.network.label, "network": network, "half": half, "query": query} | columns
        )

    def _cost(self) -> list[dict[str, Any]]:
        """Return what each method's scores of one network took, all dampings of its grid, and the retrainings."""
        done = [row for row in self.scored if row.predicted is not None]
        of_bank = self.bank.recipe["seconds"]
        seconds = {row.name: sum(r.seconds for r in done if r.name == row.name) for row in done}
        seconds |= {f"{len(self.bank.subsets)} subsets, {what}": np.mean(of_bank[what]) for what in PROTOCOLS}
        training = float(np.mean([trained.seconds for trained in self.trained]))
        return [
            {"task": self.network.label, "method": name, "seconds": float(each), "trainings": each / training}
            for name, each in seconds.items()
        ]

    # ----------------------------------------------------------------------------- pictures
    def _residuals(self) -> list[dict[str, Any]]:
        """Return the LDS of influence by plain CG, cut off at each residual."""
        rows = []
        for rtol in self.settings.rtols:
            results = []
            for k, (place, trained) in enumerate(zip(self.places, self.trained, strict=True)):

                def solve(
                    place: Network = place, trained: Any = trained, rtol: float = float(rtol)
                ) -> dict[str, Any]:
                    asked = {"run": trained.run.length(), "solver": ConjugateGradient(rtol=rtol)}
                    found = influence(trained.model, place.loss, place.train, place.test, **asked)
                    return {"scores": found.scores, "products": found.solution.num_matvecs}

                key = place.key | {"num_queries": self.settings.num_queries, "rtol": float(rtol), "network": k}
                results.append(self.run.unit("board/residual", key, solve, version=1))
            predicted = self.bank.predictions(np.stack([r["scores"].double().cpu().numpy() for r in results]))
            products = float(np.mean([r["products"] for r in results])) / int(self.settings.num_queries)
            for against in AGAINST:
                found = lds_of_predictions([predicted], self.bank, against=against)
                names = {"task": self.network.label, "residual": float(rtol), "products": products}
                rows.append(names | {"against": against} | _columns(found))
        return rows

    def _fractions(self) -> list[dict[str, Any]]:
        """Return the LDS against subsets of other sizes: first order has the less to miss the larger they are."""
        if not self.settings.also_fractions:
            return []
        rows, num = [], int(self.settings.num_standard_of_fractions)
        for fraction in sorted([*self.settings.also_fractions, self.settings.fraction]):
            bank = self.bank
            if fraction != self.settings.fraction:
                bank = bank_of(self.run, self.network, fraction=float(fraction), num_standard=num)
            for name, against, scores in self._scores_for(float(fraction)):
                found = lds_of_predictions([bank.predictions(scores)], bank, against=against)
                names = {"task": self.network.label, "fraction": float(fraction), "method": name}
                rows.append(names | {"against": against} | _columns(found))
        return rows

    def _scores_for(self, fraction: float) -> Iterator[tuple[str, str, Array]]:
        """Yield methods with the column that judges them, and their scores on every network."""
        for name in (RUN_DAMPING, FILTER, EKFAC, UNROLLED, DOT):
            for against in (SAME_SEED, STANDARD):
                scores = []
                for k, (place, trained) in enumerate(zip(self.places, self.trained, strict=True)):
                    if against == STANDARD and name in (RUN_DAMPING, FILTER):
                        asked = {"run": trained.run.length(), "rtol": float(self.settings.rtol)}
                        asked |= {"retraining": Retraining.as_many_epochs(fraction), "filtered": name == FILTER}
                        compute = partial(
                            influence_scores, trained.model, place.loss, place.train, place.test, **asked
                        )
                        method = Method(f"{name} for epochs", None, {"fraction": fraction}, _done(compute))
                    else:
                        best = self._best[name, against].damping
                        method = next(
                            m for m in own_scores(place, trained) if m.name == name and m.damping == best
                        )
                    scores.append(self._unit(k, method)["scores"].double().cpu().numpy())
                yield name, against, np.stack(scores)


def _done(scores: Callable[[], Tensor]) -> Callable[[], dict[str, Any]]:
    return lambda: {"status": "done", "scores": scores()}


def _timed(run: Run, scores: Callable[[], Tensor]) -> Callable[[], dict[str, Any]]:
    def timed() -> dict[str, Any]:
        clock = work_clock(run.device)
        start = clock()
        return {"status": "done", "scores": scores(), "seconds": clock() - start}

    return timed


def _label(row: _Row) -> str:
    return row.name if row.damping is None else f"{row.name} @ {row.damping:g}"


def _columns(found: BankScore, name: str = "lds") -> dict[str, float]:
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


# ---------------------------------------------------------------------------------------- draw
def draw(computed: Computed) -> dict[str, Figure]:
    """Return LDS against price, against the solve's residual and against the subsets' size."""
    best = computed["best"].merge(computed["cost"], on=["task", "method"])
    shown = best[~best.method.isin((RUN_EPOCHS, FILTER_EPOCHS)) | (best.against == STANDARD)]
    shown = shown[~shown.method.isin((RUN_DAMPING, FILTER)) | (shown.against != STANDARD)]
    figure, axes = panels.rows(shown, "task", columns=len(AGAINST), panel_size=(3.6, 3.0), sharey="row")
    styles = panels.styles_of(best.method.unique())
    for row, task, own in axes:
        for ax, against in zip(row, AGAINST, strict=True):
            points = own[own.against == against]
            for method, each in points.groupby("method", sort=False):
                errors = np.clip([each.lds - each.lds_low, each.lds_high - each.lds], 0, None)
                look = styles[method]
                label = "influence, best of a grid" if method == INFLUENCE else str(method)
                ax.errorbar(each.trainings, each.lds, yerr=errors, linestyle="none", label=label, **look)
            front = points.sort_values("trainings")
            front = front[front.lds >= front.lds.cummax()]
            ax.step(front.trainings, front.lds, where="post", color="#888888", linewidth=0.8, zorder=0.9)
            title = f"{task}: {against}" if against == AGAINST[0] else against
            panels.frame(
                ax,
                x="price (trainings)",
                y="LDS (rank correlation)" if against == AGAINST[0] else "",
                title=title,
                log="x",
            )
    panels.legend(
        figure,
        columns=3,
        title="Line: what no cheaper score reaches. Price: of the whole grid, where there is one.",
    )
    figures = {"figure.png": figure}
    for name, x, by in (("residuals", "residual", "against"), ("fractions", "fraction", "method")):
        if name in computed:
            figures[f"{name}.png"] = _curves(computed[name], x, by)
    return figures


def _curves(table: pd.DataFrame, x: str, by: str) -> Figure:
    """Return LDS over a setting, a panel for each column, or one with a line for each."""
    columns = ["lds"] if by == "against" else table.against.unique().tolist()
    figure, axes = panels.rows(table, "task", columns=len(columns), panel_size=(4.2, 3.0), sharey="row")
    for row, task, own in axes:
        for ax, against in zip(row, columns, strict=True):
            part = (own if by == "against" else own[own.against == against]).sort_values(x)
            panels.lines(ax, part, x=x, y="lds", by=by, low="lds_low", high="lds_high")
            told = {"residual": "residual of the solve", "fraction": "share of the data in a subset"}[x]
            title = task if by == "against" else f"{task}: {against}"
            panels.frame(ax, x=told, y="LDS", title=title, log="x" if x == "residual" else "")
    panels.legend(figure, columns=3)
    return figure
