"""One task of the board: its networks scored by every method, and the scores judged by its bank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import DictConfig
from torch import Tensor

from curvlab.influence import Retraining, adam_times, influence, influence_scores, preconditioned_influence
from curvlab.influence.bank import (
    AGAINST,
    SAME_SEED,
    STANDARD,
    Array,
    Bank,
    BankScore,
    ceiling,
    centred_ranks,
    lds_of_predictions,
)
from curvlab.lab import Run, task_label, task_settings, unit
from curvlab.solvers import ConjugateGradient, Ekfac
from curvlab.training import AdamRule
from experiments.benchmarks.attribution import methods
from experiments.benchmarks.attribution.network import Network, Trained
from experiments.benchmarks.attribution.rest import columns
from experiments.benchmarks.board.banks import bank_of
from experiments.benchmarks.board.kept import Kept, label, with_edges
from experiments.benchmarks.board.more_scores import BAYESIAN, more_scores
from experiments.shared.stats import jackknife_error
from experiments.shared.task import Task

RUN_EPOCHS, FILTER_EPOCHS = "influence, as many epochs", "filter, as many epochs"
ADAM, ADAM_EPOCHS = "influence, a damping a parameter", "influence, a damping a parameter, as many epochs"
PRECONDITIONED = "influence by CG with EK-FAC"
AVERAGED, CEILING = "unrolled over other seeds", "ceiling"
PROTOCOLS = ("single run", "standard")


def compute(
    run: Run, cfg: DictConfig, published: Mapping[str, pd.DataFrame] | None = None, names: Collection[str] = ()
) -> dict[str, pd.DataFrame]:
    """Return the tables; with published ones only what they lack of the tasks of the banks `names` is computed.

    `best`: LDS of each method at its best damping, by each column; how far behind the column's best, paired, with
    what is as good; and whether that damping is the lowest or highest of its grid. `table`: the same without the
    comparison, and influence at every damping, Bayesian influence without each of its chains, and why a method has
    no scores. `differences`: of two methods, paired. `cost`: of each method, in trainings. `residuals`: LDS
    against what the solve leaves; `fractions`: against the size of the subsets; both for tasks that ask. `ranks`,
    `residual_ranks`, `fraction_ranks`: where every row of these puts each half, by network and query: all that an
    LDS is made of, with a bank; of subsets of other sizes the measured ranks, too.
    """
    found: dict[str, list[pd.DataFrame]] = {}
    for name, settings in task_settings(cfg).items():
        place = task_label(name)
        own = {table: rows[rows.task == place] for table, rows in (published or {}).items()}
        if published is None or settings.bank in names:
            kept = Kept(own) if len(own.get("best", ())) else None
            own = _Board(Network.of(Task.load(run, name, settings)), kept).tables()
        own["best"] = with_edges(own["best"], settings)
        for table, rows in own.items():
            if len(rows):
                found.setdefault(table, []).append(rows)
    return {name: pd.concat(parts, ignore_index=True) for name, parts in found.items()}


@dataclass(frozen=True)
class _Row:
    """A method at one damping, on every network that it scored.

    Attributes:
        name: of the method.
        damping: None where there is none to choose.
        status: "done", or why not.
        predicted: (K, S, M), changes of the losses.
        seconds: of one network's scores.
        without: chains of Bayesian influence: (C, K, S, M), predictions without one of them; of others None.
    """

    name: str
    damping: float | None
    status: str
    predicted: Array | None = None
    seconds: float = float("nan")
    without: Array | None = None


class _Board:
    """One task; `kept`: what is published of it, which is not computed again."""

    def __init__(self, network: Network, kept: Kept | None = None) -> None:
        self.network, self.settings, self.kept = network, network.settings, kept
        self.bank = bank_of(network, fraction=float(self.settings.fraction))
        self.trained = [network.at(k).trained(k) for k in range(int(self.settings.num_networks))]
        self.stopwatch = methods.Stopwatch(network.run.device)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the task's rows of every table."""
        lists = {"table": self._table(), "best": self._best_rows(), "differences": self._differences()}
        found = {name: pd.DataFrame(rows) for name, rows in (lists | {"cost": self._cost()}).items()}
        found["ranks"] = self._rank_table({label(row.name, row.damping): row.predicted for row in self._shown})
        found |= {} if self.kept else self._pictured()
        for rows in found.values():
            rows.insert(0, "task", self.network.label)
        return (dict(self.kept.tables) if self.kept else {}) | found

    def _pictured(self) -> dict[str, pd.DataFrame]:
        (residuals, ranks), (fractions, of_fractions) = self._residuals(), self._fractions()
        found = {"residuals": pd.DataFrame(residuals), "residual_ranks": self._rank_table(ranks)}
        return found | {"fractions": pd.DataFrame(fractions), "fraction_ranks": of_fractions}

    # ------------------------------------------------------------------------------- scores
    @cached_property
    def scored(self) -> list[_Row]:
        """Every method at every damping."""
        every = [[m for m in self._methods(own) if self._asked(m.name)] for own in self.trained]
        rows: list[_Row] = []
        numbers = Counter(method.name for method in every[0])
        for same in zip(*every, strict=True):
            if self.kept and self.kept.has(same[0].name, numbers[same[0].name]):
                rows += self._published(same[0].name, same[0].damping)
                continue
            results = [self._unit(own, method) for own, method in zip(self.trained, same, strict=True)]
            status = next((r["status"] for r in results if r["status"] != "done"), "done")
            row = _Row(same[0].name, same[0].damping, status)
            if status == "done":
                seconds = float(np.mean([r.get("cpu_seconds", r["seconds"]) for r in results]))
                predicted = self._predictions([r["scores"] for r in results])
                without = None
                if "per_chain" in results[0]:
                    chains = [r["per_chain"] for r in results]
                    rest = [[c for c in range(len(chains[0])) if c != out] for out in range(len(chains[0]))]
                    without = np.stack([self._predictions([own[some].mean(0) for own in chains]) for some in rest])
                row = _Row(row.name, row.damping, status, predicted, seconds, without)
            rows.append(row)
        if not self._asked(AVERAGED):
            return rows
        return [*rows, *(self._published(AVERAGED, None) or [self._averaged()])]

    def _published(self, name: str, damping: float | None) -> list[_Row]:
        """Return the row that is published, as ranks: an LDS asks for no more."""
        found = self.kept.predicted(self.bank, name, damping) if self.kept else None
        return [_Row(name, damping, "done", found[0], without=found[1])] if found else []

    def _asked(self, name: str) -> bool:
        only = self.settings.get("only")
        return only is None or name in only

    def _predictions(self, scores: list[Tensor]) -> Array:
        return self.bank.predictions(np.stack([own.double().cpu().numpy() for own in scores]))

    def _methods(self, trained: Trained) -> Iterator[methods.Method]:
        yield from (method for method in methods.own_scores(trained) if method.name != methods.COSINE)
        yield from more_scores(trained)
        rtol, fraction = float(self.settings.rtol), float(self.settings.fraction)
        for filtered in (False, True):
            yield self._for_epochs(trained, fraction, filtered=filtered)
        size = methods.ekfac_size(self.settings)
        solver = ConjugateGradient(rtol=rtol, preconditioner=Ekfac(**size))
        compute = partial(influence_scores, *trained.arguments, run=trained.length, solver=solver)
        yield methods.Method.of(PRECONDITIONED, compute, rtol=rtol, **size)
        if isinstance(
            trained.training.rule, AdamRule
        ):  # a damping for each parameter, for as many steps and epochs
            for name, share in ((ADAM, 1.0), (ADAM_EPOCHS, fraction)):
                compute = partial(_of_adam, trained, share=share, rtol=rtol)
                yield methods.Method.of(name, compute, share=share, rtol=rtol)
        if self.settings.get("peers"):
            yield from methods.peers(trained)

    def _for_epochs(self, trained: Trained, fraction: float, *, filtered: bool) -> methods.Method:
        """Return influence, or its filter, with the length of a retraining of as many epochs of a fraction."""
        rtol = float(self.settings.rtol)
        asked: dict[str, Any] = {"run": trained.length, "rtol": rtol, "filtered": filtered}
        asked["retraining"] = Retraining.as_many_epochs(fraction)
        compute = partial(influence_scores, *trained.arguments, **asked)
        name = FILTER_EPOCHS if filtered else RUN_EPOCHS
        return methods.Method.of(name, compute, fraction=fraction, rtol=rtol)

    def _unit(self, place: Network, method: methods.Method) -> dict[str, Any]:
        # Networks of other seeds are the same for each that is scored.
        return methods.scored(self.network if "networks" in method.key else place, self.stopwatch, method)

    def _averaged(self) -> _Row:
        """Return the unrolled derivative, averaged over starts and orders by which nothing is judged."""
        first, scores, seconds = len(self.trained), [], 0.0
        for seed in range(first, first + int(self.settings.num_averaged)):
            trained = self.network.at(seed).trained(seed)
            own = self._unit(trained, methods.Method.of(methods.UNROLLED, partial(methods.unrolled, trained)))
            scores.append(own["scores"].double())
            seconds += own["seconds"] + trained.seconds
        predicted = np.repeat(self._predictions([sum(scores) / len(scores)]), len(self.trained), axis=0)
        return _Row(AVERAGED, None, "done", predicted, seconds)

    # ------------------------------------------------------------------------------- tables
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

    @cached_property
    def _shown(self) -> list[_Row]:
        """The rows that are published: the best, influence at every damping, and fewer chains."""
        best = {id(row) for row in self._best.values()}
        shown = []
        for row in self.scored:
            if row.predicted is not None and (id(row) in best or row.name == methods.INFLUENCE):
                shown.append(row)
                chains = row.without if row.without is not None else ()
                shown += [_Row(f"{row.name}, not chain {c}", None, "done", own) for c, own in enumerate(chains)]
        return shown

    def _table(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for row in [*self._shown, *(row for row in self.scored if row.predicted is None)]:
            names = {"method": row.name, "damping": row.damping, "status": row.status}
            judged = AGAINST if row.predicted is not None else ()
            rows += [names | {"against": a} | columns(self._lds(row, a)) for a in judged] or [names]
        return rows

    def _best_rows(self) -> list[dict[str, Any]]:
        rows = []
        for against in AGAINST:
            own = {name: row for (name, column), row in self._best.items() if column == against}
            leader = max(own.values(), key=lambda row: self._lds(row, against).value)
            for name, row in own.items():
                pair = [leader.predicted, row.predicted]
                behind = lds_of_predictions(pair, self.bank, against=against)  # type: ignore[arg-type]
                found = {"method": name, "against": against, "damping": row.damping}
                found |= columns(self._lds(row, against)) | columns(behind, "behind")
                found |= {"networks": len(self.trained), "as good as the best": behind.low <= 0}
                rows.append(found | {"stderr over chains": self._over_chains(row, against)})
            if against != SAME_SEED:  # a single run of the same seed could be known exactly
                names: dict[str, Any] = {"method": CEILING, "against": against}
                rows.append(names | columns(ceiling(self.bank, against=against)))
        return rows

    def _over_chains(self, row: _Row, against: str) -> float | None:
        """Return the jackknife's standard error of an LDS over the chains of the scores; None without chains."""
        if row.name != BAYESIAN or row.without is None:
            return None
        values = [lds_of_predictions([own], self.bank, against=against).value for own in row.without]
        return jackknife_error(values)

    def _differences(self) -> list[dict[str, Any]]:
        """Return differences of two methods, each at its best where it has a grid."""
        rows = []
        for against in AGAINST:
            ours, filtered = methods.RUN_DAMPING, methods.FILTER
            if against == STANDARD:
                ours, filtered = RUN_EPOCHS, FILTER_EPOCHS
            names = [name for name, column in self._best if column == against]
            value = {name: self._lds(self._best[name, against], against).value for name in names}
            of_ekfac = [name for name in names if methods.EKFAC in name and name != PRECONDITIONED]
            ekfac = max(of_ekfac, key=value.__getitem__)
            for question, first, second in (
                ("damping", methods.INFLUENCE, ours),
                ("filter and EK-FAC", filtered, ekfac),
                ("influence and EK-FAC", ours, ekfac),
                ("unrolled and filter", methods.UNROLLED, filtered),
                ("averaged and filter", AVERAGED, filtered),
                ("averaged and influence", AVERAGED, ours),
                ("SOURCE and influence", methods.SEGMENTS, ours),
                ("best and influence", max(names, key=value.__getitem__), ours),
                ("length", RUN_EPOCHS, methods.RUN_DAMPING),
            ):
                if not {first, second} <= set(names):
                    continue
                pair = [self._best[name, against].predicted for name in (first, second)]
                found = lds_of_predictions(pair, self.bank, against=against)  # type: ignore[arg-type]
                asked = {"against": against, "question": question, "first": first, "second": second}
                rows.append(asked | columns(found, "difference") | {"networks": len(self.trained)})
        return rows

    def _rank_table(self, predicted: dict[str, Array | None]) -> pd.DataFrame:
        """Return the rank of each half among all, by query and network, for every row."""
        network, half, query = np.indices((len(self.trained), *self.bank.single_run.shape[1:])).reshape(3, -1)
        found = {name: _ranks(own) for name, own in predicted.items() if own is not None}
        places = {"network": network, "half": half, "query": query}
        return pd.DataFrame(places | found) if found else pd.DataFrame()

    def _cost(self) -> list[dict[str, Any]]:
        """Return what each method's scores of one network took, all dampings of its grid, and the retrainings."""
        done = [row for row in self.scored if row.predicted is not None]
        of_bank = self.bank.recipe["seconds"]
        # One training prices all rows of a task, those that are kept, too.
        training = self.kept.training() if self.kept else float(np.mean([own.seconds for own in self.trained]))
        grids = {row.name: [own.seconds for own in done if own.name == row.name] for row in done}
        grids |= {f"{len(self.bank.subsets)} subsets, {what}": [np.mean(of_bank[what])] for what in PROTOCOLS}
        rows: list[dict[str, Any]] = []
        for name, grid in grids.items():
            row = {"method": name, "dampings": len(grid), "seconds": float(sum(grid))}
            row |= {"trainings": float(sum(grid)) / training}
            rows.append(row | {"trainings of one damping": float(np.mean(grid)) / training})
        kept = {row.name for row in done if np.isnan(row.seconds)}  # published
        return [(self.kept and row["method"] in kept and self.kept.cost(row["method"])) or row for row in rows]

    # ----------------------------------------------------------------------------- pictures
    def _residuals(self) -> tuple[list[dict[str, Any]], dict[str, Array | None]]:
        """Return the LDS of influence by plain CG, cut off at each residual, and the predictions."""
        rows: list[dict[str, Any]] = []
        ranks: dict[str, Array | None] = {}
        for rtol in map(float, self.settings.rtols):
            asked = {"num_queries": self.settings.num_queries, "rtol": rtol}
            results = [_cut_off(trained, **asked, network=k) for k, trained in enumerate(self.trained)]
            predicted = self._predictions([r["scores"] for r in results])
            ranks[f"{rtol:g}"] = predicted
            products = float(np.mean([r["products"] for r in results])) / int(self.settings.num_queries)
            for against in AGAINST:
                found = lds_of_predictions([predicted], self.bank, against=against)
                rows.append({"residual": rtol, "products": products, "against": against} | columns(found))
        return rows, ranks

    def _fractions(self) -> tuple[list[dict[str, Any]], pd.DataFrame]:
        """Return the LDS against subsets of other sizes, and predicted and measured ranks.

        First order has the less to miss the larger the subsets are.
        """
        rows, parts, num = [], [], int(self.settings.num_standard_of_fractions)
        also, own = list(self.settings.also_fractions), self.settings.fraction
        for fraction in map(float, sorted([*also, own])) if also else ():
            bank = self.bank
            if fraction != own:
                bank = bank_of(self.network, fraction=fraction, num_standard=num)
            ranks = {f"measured, {against}": _measured(bank, against) for against in (SAME_SEED, STANDARD)}
            for name, against, asked, scores in self._scores_for(fraction):
                place = label(asked.name, asked.damping)
                ranks[place] = bank.predictions(np.stack([each.double().cpu().numpy() for each in scores]))
                found = lds_of_predictions([ranks[place]], bank, against=against)
                names = {"fraction": fraction, "method": name, "against": against, "scores": place}
                rows.append(names | columns(found))
            parts.append(self._rank_table(ranks).assign(fraction=fraction))  # type: ignore[arg-type]
        return rows, pd.concat(parts) if parts else pd.DataFrame()

    def _scores_for(self, fraction: float) -> Iterator[tuple[str, str, methods.Method, list[Tensor]]]:
        """Yield methods with the column that judges them, and their scores on every network."""
        for name in (methods.RUN_DAMPING, methods.FILTER, methods.EKFAC, methods.UNROLLED, methods.DOT):
            for against in (SAME_SEED, STANDARD):
                scores = []
                for trained in self.trained:
                    if against == STANDARD and name in (methods.RUN_DAMPING, methods.FILTER):
                        method = self._for_epochs(trained, fraction, filtered=name == methods.FILTER)
                    else:
                        best, every = self._best[name, against].damping, methods.own_scores(trained)
                        method = next(m for m in every if m.name == name and m.damping == best)
                    scores.append(self._unit(trained, method)["scores"])
                yield name, against, method, scores


def _of_adam(trained: Trained, *, share: float, rtol: float) -> Tensor:
    """Return influence with a damping for each parameter, 1/τ of Adam's run."""
    times = share * adam_times(trained.model, trained.loss, trained.train, trained.training)
    return preconditioned_influence(*trained.arguments, run=trained.training, times=times, rtol=rtol).scores


@unit("board/residual", version=1, about="influence of {seed_name} to a residual of {rtol:g}")
def _cut_off(trained: Trained, /, *, rtol: float, **_: Any) -> dict[str, Any]:
    """Return the scores of influence by plain CG, cut off at a residual, and the products."""
    asked: dict[str, Any] = {"run": trained.length, "solver": ConjugateGradient(rtol=rtol)}
    found = influence(*trained.arguments, **asked)
    return {"scores": found.scores, "products": found.solution.num_matvecs}


def _measured(bank: Bank, against: str) -> Array:
    return np.stack([bank.measured(against, k) for k in range(len(bank.single_run))])


def _ranks(values: Array) -> Array:
    """Return the ranks of the halves from 1 on, (K, S, M) -> (K S M,)."""
    return np.stack([centred_ranks(own) + (len(own) + 1) / 2 for own in values]).ravel()
