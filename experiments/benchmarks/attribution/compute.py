"""Scores of every method, and what retraining says about them."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig
from torch import Tensor

from curvlab.influence import linear_datamodelling_score, random_halves, subset_weights
from curvlab.lab import Run, bootstrap_interval
from experiments.benchmarks.attribution import removal
from experiments.benchmarks.attribution.methods import PBRF, Method, Stopwatch, methods, scored
from experiments.benchmarks.attribution.network import Network, halves, part_way
from experiments.benchmarks.attribution.ranks import OTHER, SAME, predicted_changes, rank_table
from experiments.benchmarks.attribution.rest import NEEDED, columns, prediction_score, rest_rows
from experiments.benchmarks.attribution.which_score import RESPONSES, which_score
from experiments.benchmarks.parts import tasks_of
from experiments.shared.stats import row_correlations

QUALITY = ("gradient_norm", "gradient_norm_90", "remark")  # of PBRF; of a peer: which of the parameters it sees
Scored = list[tuple[Method, dict[str, Any]]]


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return the tables.

    `table`: a row for each method and damping. `queries`: its rank correlation for each query, with what `orders`
    names. `ranks`: where each method, at its best damping, puts each half, and where retraining does, query by
    query. `removals`: how much each query's loss rises. `timing`: seconds. `rest`: what is missed, and why;
    `part_way`: over the way to the halves. `which_score`: the answer.
    """
    names = ("table", "queries", "removals", "timing", "rest", "part_way")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    ranks = []
    for task in tasks_of(run, cfg, "scores"):
        network = Network.of(task)
        own = _Scores(network)
        for table, rows in own.rows().items():
            found[table] += rows
        ranks.append(own.ranks())
        for num_epochs in network.settings.also_after:
            changed = {"training": {"num_epochs": num_epochs}, "part_way": [min(network.settings.part_way)]}
            found["rest"] += _Scores(network.changed(**changed)).rest()[0]
    if not ranks:
        return {}
    tables = {name: pd.DataFrame(rows) for name, rows in found.items()} | {"ranks": pd.concat(ranks)}
    return tables | {"which_score": which_score(tables, run.cfg.paper_damping)}


class _Scores:
    """What every method scores on one network, and how the network's halves, retrained, judge it."""

    def __init__(self, network: Network) -> None:
        self.network, self.settings, self.trained = network, network.settings, network.trained(0)
        self.stopwatch = Stopwatch(network.run.device)
        self.subsets = random_halves(
            network.num_train, self.settings.num_subsets, generator=network.generator("halves")
        )

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of all tables but that of the ranks."""
        measured = self._measured
        removed, removals = self._removals()
        table, queries = [], []
        for index, (method, result) in enumerate(self._scored):
            quality = {name: result[name] for name in QUALITY if result.get(name) not in {None, ""}}
            row = {**self._names(method), "run_damping": self.trained.length.damping}
            row |= {"status": result["status"]} | quality
            table.append(row | measured[index]["row"] | removed.get(index, {}) if index in measured else row)
            for order, values in measured[index]["queries"].items() if index in measured else ():
                queries += [
                    {**self._names(method), "orders": order, "query": query, "lds": value}
                    for query, value in enumerate(values.tolist())
                ]
        at_random = removal.random_columns(self._random_rises)
        table.append({**self._label(removal.RANDOM), "status": "done"} | at_random)
        rest, way = self.rest(self._scored)
        found = {"table": table, "queries": queries, "removals": removals}
        return found | {"timing": self._timing(), "rest": rest, "part_way": way}

    def ranks(self) -> pd.DataFrame:
        """Return the ranks of the halves, by every method at its best damping and by retraining."""
        measured = {SAME: self._losses[0]}
        if len(self._losses) > 1:
            measured[OTHER] = self._losses[1:].mean(0)
        predicted = {
            name: predicted_changes(self._scored[index][1], self.subsets) for name, index in self._best.items()
        }
        return rank_table(self.network.label, measured, predicted)

    def rest(self, every: Scored | None = None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return what is missed of a retraining; the methods that it needs are scored unless they are given."""
        scores: dict[str, list[Tensor]] = {}
        for method, result in every or self._score(NEEDED):
            if method.name in NEEDED:
                scores.setdefault(method.name, []).append(result["scores"])
        ways = {float(share): self._part_way(float(share)) for share in self.settings.part_way}
        described = {"task": self.network.label, "num_epochs": self.settings.training.num_epochs}
        described |= {"num_steps": self.trained.training.num_steps, "train_loss": self.trained.train_loss}
        rows, way = rest_rows(scores, self.subsets, self._losses, ways)
        return [described | row for row in rows], [described | row for row in way]

    def _part_way(self, share: float) -> Tensor:
        """Return the queries' losses after retraining a share of the way to the halves, (S, M)."""
        weights = 1 + share * (subset_weights(self.subsets) - 1)
        sizes = {"num_queries": self.settings.num_queries, "num_subsets": len(weights)}
        losses: Tensor = part_way(self.network, weights, **sizes, order=0, share=share)["losses"]
        return losses

    def _names(self, method: Method) -> dict[str, Any]:
        return self._label(method.name, method.damping)

    def _label(self, method: str, damping: float | None = None) -> dict[str, Any]:
        return {"task": self.network.label, "method": method, "damping": damping}

    def _score(self, names: Collection[str] = ()) -> Scored:
        """Return the methods of these names, or all, with what they do."""
        every = [each for each in methods(self.trained, self.subsets) if not names or each.name in names]
        return [(method, scored(self.network, self.stopwatch, method)) for method in every]

    @cached_property
    def _scored(self) -> Scored:
        return self._score()

    @cached_property
    def _measured(self) -> dict[int, dict[str, Any]]:
        """What the halves say of each method, by its index."""
        responses = next(r["scores"] for method, r in self._scored if method.name == PBRF)
        done = [(index, *each) for index, each in enumerate(self._scored) if each[1]["status"] == "done"]
        return {index: self._predicted(method.name, result, responses) for index, method, result in done}

    @cached_property
    def _best(self) -> dict[str, int]:
        """The index of each method at the damping whose LDS is highest."""
        best: dict[str, int] = {}
        for index, found in self._measured.items():
            name = self._scored[index][0].name
            if name not in best or found["row"]["lds"] > self._measured[best[name]]["row"]["lds"]:
                best[name] = index
        return best

    @cached_property
    def _halves(self) -> list[dict[str, Any]]:
        """The queries' losses on every half, once for each order of the batches."""
        weights, orders = subset_weights(self.subsets), list(range(self.settings.num_orders))
        sizes = {"num_queries": self.settings.num_queries, "num_subsets": len(weights)}
        orders = self.network.run.progress(orders, f"halves {self.network.label}")
        return [halves(self.network, weights, **sizes, order=order) for order in orders]

    @cached_property
    def _losses(self) -> Tensor:
        """(orders, S, M)."""
        return torch.stack([half["losses"] for half in self._halves])

    @cached_property
    def _random_rises(self) -> dict[float, Tensor]:
        return removal.rises_at_random(self.network)

    def _predicted(self, name: str, result: dict[str, Any], responses: Tensor) -> dict[str, Any]:
        """Return the columns of the table, and the correlation of each query."""
        row: dict[str, float] = {}
        queries: dict[str, Tensor] = {}
        losses = self._losses
        orders = (("lds", SAME, losses[:1]), ("lds_other", OTHER, losses[1:]))
        for prefix, order, some in orders[: len(losses)]:
            if "scores" in result:
                found = linear_datamodelling_score(result["scores"], self.subsets, some)
            else:
                found = prediction_score(result["predicted"], some)
            row |= columns(found, prefix)
            queries[order] = found.per_measurement
        if "scores" in result and name != PBRF:
            pair = (own.double().cpu().numpy() for own in (result["scores"], responses))
            values = np.nan_to_num(row_correlations(*pair, ranked=True))
            generator = np.random.default_rng(0)
            interval = bootstrap_interval(values, np.mean, generator=generator)
            row |= {"pbrf": float(values.mean()), "pbrf_low": interval.low, "pbrf_high": interval.high}
            queries[RESPONSES] = torch.from_numpy(values)
        return {"row": row, "queries": queries}

    def _removals(self) -> tuple[dict[int, dict[str, float]], list[dict[str, Any]]]:
        """Return how much test losses rise without top-ranked examples, at the best damping of each method.

        Columns of the table by the method's index, and rows of `removals` with the mean of the random removals of
        as many examples beside each.
        """
        # A method that answers for whole subsets ranks no example.
        best = {name: index for name, index in self._best.items() if "scores" in self._scored[index][1]}
        ranked = [
            {"scores": result["scores"], "method": method.name, "damping": method.damping, "key": method.key}
            for method, result in (self._scored[index] for index in best.values())
        ]
        rises = removal.rises_when_ranked(self.network, ranked)
        columns = {index: removal.ranked_columns(rises, row) for row, index in enumerate(best.values())}
        rows = []
        for row, index in enumerate(best.values()):
            for fraction, each in rises.items():
                names = self._names(self._scored[index][0]) | {"fraction": fraction}
                pairs = zip(each[row].tolist(), self._random_rises[fraction].mean(0).tolist(), strict=True)
                for query, (rise, usual) in enumerate(pairs):
                    rows.append(names | {"query": query, "rise": rise, "random": usual})
        return columns, rows

    def _timing(self) -> list[dict[str, Any]]:
        """Return seconds, and how many trainings they are."""
        training = self.trained.seconds
        rows = [{**self._label("one training"), "seconds": training}]
        together = self._label(f"{len(self.subsets)} halves together")
        rows += [{**together, "seconds": half["seconds"]} for half in self._halves]
        for method, result in self._scored:
            if result["status"] == "done":
                # Peers are measured in a process of their own, and some work is done in parts.
                seconds = result.get("cpu_seconds", result["seconds"])
                rows.append({**self._names(method), "seconds": seconds})
        return [row | {"trainings": row["seconds"] / training} for row in rows]
