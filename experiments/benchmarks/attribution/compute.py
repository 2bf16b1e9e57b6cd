"""Scores of every method, and what retraining says about them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from curvlab.influence import linear_datamodelling_score, random_halves, subset_weights
from curvlab.lab import Run, bootstrap_interval
from experiments.benchmarks.attribution import removal
from experiments.benchmarks.attribution.methods import PBRF, Method, Stopwatch, methods
from experiments.benchmarks.attribution.network import Network
from experiments.benchmarks.attribution.ranks import OTHER, SAME, predicted_changes, rank_table
from experiments.benchmarks.attribution.rest import NEEDED, columns, prediction_score, rest_rows
from experiments.benchmarks.attribution.which_score import RESPONSES, which_score
from experiments.shared.stats import row_correlations

QUALITY = ("gradient_norm", "gradient_norm_90", "remark")  # of PBRF; of a peer: which of the parameters it sees
Scored = list[tuple[Method, dict[str, Any]]]


def compute(run: Run, tasks: Mapping[str, DictConfig]) -> dict[str, pd.DataFrame]:
    """Return the tables.

    `table`: a row for each method and damping. `queries`: its rank correlation for each query, with what `orders`
    names. `ranks`: where each method, at its best damping, puts each half, and where retraining does, query by
    query. `removals`: how much each query's loss rises. `timing`: seconds. `rest`: what is missed, and why;
    `part_way`: over the way to the halves. `which_score`: the answer.
    """
    found: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("table", "queries", "removals", "timing", "rest", "part_way")
    }
    ranks = []
    if not tasks:
        return {}
    for name, settings in tasks.items():
        task = _Task(run, Network(run, name, settings))
        for table, rows in task.rows().items():
            found[table] += rows
        ranks.append(task.ranks())
        for num_epochs in settings.also_after:
            changed = {"training": {"num_epochs": num_epochs}, "part_way": [min(settings.part_way)]}
            shorter = OmegaConf.merge(settings, changed)
            assert isinstance(shorter, DictConfig)
            found["rest"] += _Task(run, Network(run, name, shorter)).rest()[0]
    tables = {name: pd.DataFrame(rows) for name, rows in found.items()} | {"ranks": pd.concat(ranks)}
    answer = which_score(tables, run.cfg.paper_damping)
    return tables | {"which_score": answer}


class _Task:
    """One network: its halves retrained, and the methods judged by them."""

    def __init__(self, run: Run, network: Network) -> None:
        self.run, self.network, self.settings = run, network, network.settings
        self.trained, self.stopwatch = network.trained(0), Stopwatch(run.device)
        self.key = network.key | {"num_queries": self.settings.num_queries}
        generator = run.generator("halves", self.settings.seed_name)
        self.subsets = random_halves(network.num_train, self.settings.num_subsets, generator=generator)

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of all tables but that of the ranks."""
        scored, measured = self._scored_methods, self._measured
        removed, removals = self._removals()
        table, queries = [], []
        for index, (method, result) in enumerate(scored):
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
        rest, part_way = self.rest(scored)
        return {
            "table": table,
            "queries": queries,
            "removals": removals,
            "timing": self._timing(scored),
            "rest": rest,
            "part_way": part_way,
        }

    def ranks(self) -> pd.DataFrame:
        """Return the ranks of the halves, by every method at its best damping and by retraining."""
        measured = {SAME: self._losses[0]}
        if len(self._losses) > 1:
            measured[OTHER] = self._losses[1:].mean(0)
        predicted = {
            name: predicted_changes(self._scored_methods[index][1], self.subsets)
            for name, index in self._best.items()
        }
        return rank_table(self.network.label, measured, predicted)

    def rest(self, scored: Scored | None = None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return what is missed of a retraining; the methods that it needs are scored unless they are given."""
        if scored is None:
            every = methods(self.network, self.trained, self.subsets)
            scored = [(method, self._scored(method)) for method in every if method.name in NEEDED]
        scores: dict[str, list[Tensor]] = {}
        for method, result in scored:
            if method.name in NEEDED:
                scores.setdefault(method.name, []).append(result["scores"])
        part_way = {float(share): self._part_way(float(share)) for share in self.settings.part_way}
        described = {
            "task": self.network.label,
            "num_epochs": self.settings.training.num_epochs,
            "num_steps": self.trained.run.num_steps,
            "train_loss": self.trained.train_loss,
        }
        rows, way = rest_rows(scores, self.subsets, self._losses, part_way)
        return [described | row for row in rows], [described | row for row in way]

    def _part_way(self, share: float) -> Tensor:
        """Return the queries' losses after retraining a share of the way to the halves, (S, M)."""
        weights = 1 + share * (subset_weights(self.subsets) - 1)
        key = self.key | {"num_subsets": len(weights), "order": 0, "share": share}
        retrain = partial(self.network.retrained_losses, weights, 0)
        losses: Tensor = self.run.unit("attribution/part_way", key, retrain, version=1)["losses"]
        return losses

    def _names(self, method: Method) -> dict[str, Any]:
        return self._label(method.name, method.damping)

    def _label(self, method: str, damping: float | None = None) -> dict[str, Any]:
        return {"task": self.network.label, "method": method, "damping": damping}

    @cached_property
    def _scored_methods(self) -> Scored:
        return [(method, self._scored(method)) for method in methods(self.network, self.trained, self.subsets)]

    @cached_property
    def _measured(self) -> dict[int, dict[str, Any]]:
        """What the halves say of each method, by its index."""
        responses = next(r["scores"] for method, r in self._scored_methods if method.name == PBRF)
        return {
            index: self._predicted(method.name, result, responses)
            for index, (method, result) in enumerate(self._scored_methods)
            if result["status"] == "done"
        }

    @cached_property
    def _best(self) -> dict[str, int]:
        """The index of each method at the damping whose LDS is highest."""
        best: dict[str, int] = {}
        for index, found in self._measured.items():
            name = self._scored_methods[index][0].name
            if name not in best or found["row"]["lds"] > self._measured[best[name]]["row"]["lds"]:
                best[name] = index
        return best

    @cached_property
    def _halves(self) -> list[dict[str, Any]]:
        """The queries' losses on every half, once for each order of the batches."""
        weights = subset_weights(self.subsets)
        found = []
        for order in self.run.progress(list(range(self.settings.num_orders)), f"halves {self.network.label}"):
            key = self.key | {"num_subsets": len(weights), "order": order}
            retrain = partial(self.network.retrained_losses, weights, order)
            found.append(self.run.unit("attribution/halves", key, retrain, version=1))
        return found

    @cached_property
    def _losses(self) -> Tensor:
        """(orders, S, M)."""
        return torch.stack([half["losses"] for half in self._halves])

    @cached_property
    def _random_rises(self) -> dict[float, Tensor]:
        return removal.rises_at_random(self.network, self.key)

    def _scored(self, method: Method) -> dict[str, Any]:
        key = self.key | {"method": method.name, "damping": method.damping} | method.key
        return self.run.unit("attribution/scores", key, partial(self.stopwatch, method), version=2)

    def _predicted(self, name: str, result: dict[str, Any], responses: Tensor) -> dict[str, Any]:
        """Return the columns of the table, and the correlation of each query."""
        row: dict[str, float] = {}
        queries: dict[str, Tensor] = {}
        losses = self._losses
        for prefix, order, some in (("lds", SAME, losses[:1]), ("lds_other", OTHER, losses[1:])):
            if not len(some):
                continue
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
        scored = self._scored_methods
        # A method that answers for whole subsets ranks no example.
        best = {name: index for name, index in self._best.items() if "scores" in scored[index][1]}
        ranked = [
            {"scores": result["scores"], "method": method.name, "damping": method.damping, "key": method.key}
            for method, result in (scored[index] for index in best.values())
        ]
        rises = removal.rises_when_ranked(self.network, self.key, ranked)
        columns = {index: removal.ranked_columns(rises, row) for row, index in enumerate(best.values())}
        rows = [
            {**self._names(scored[index][0]), "fraction": fraction, "query": query, "rise": rise, "random": usual}
            for row, index in enumerate(best.values())
            for fraction, each in rises.items()
            for query, (rise, usual) in enumerate(
                zip(each[row].tolist(), self._random_rises[fraction].mean(0).tolist(), strict=True)
            )
        ]
        return columns, rows

    def _timing(self, scored: Scored) -> list[dict[str, Any]]:
        """Return seconds, and how many trainings they are."""
        training = self.trained.seconds
        rows = [{**self._label("one training"), "seconds": training}]
        together = self._label(f"{len(self.subsets)} halves together")
        rows += [{**together, "seconds": half["seconds"]} for half in self._halves]
        for method, result in scored:
            if result["status"] == "done":
                # Peers are measured in a process of their own, and some work is done in parts.
                seconds = result.get("cpu_seconds", result["seconds"])
                rows.append({**self._names(method), "seconds": seconds})
        return [row | {"trainings": row["seconds"] / training} for row in rows]
