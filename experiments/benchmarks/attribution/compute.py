"""Scores of every method, and what retraining says about them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig
from torch import Tensor

from curvlab import runs
from curvlab.influence import linear_datamodelling_score, random_halves, removal_weights, subset_weights
from curvlab.reporting import bootstrap_interval
from experiments.benchmarks.attribution.methods import Method, methods
from experiments.benchmarks.attribution.network import Network
from experiments.benchmarks.attribution.which_score import which_score
from experiments.benchmarks.timing import load_average, work_clock
from experiments.target import task_settings

SAME, OTHER = "same order", "other orders"


def compute(run: runs.Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return one row for each method and damping, one for each query of these, the seconds, and `which_score`."""
    found: dict[str, list[dict[str, Any]]] = {"table": [], "queries": [], "timing": []}
    for name, settings in task_settings(cfg).items():
        task = _Task(run, Network(run, name, settings))
        for table, rows in task.rows().items():
            found[table] += rows
    run.note(load_average=load_average(), threads=torch.get_num_threads())
    tables = {name: pd.DataFrame(rows) for name, rows in found.items()}
    answer = which_score(tables["table"], tables["timing"], cfg.paper_damping)
    return tables | {"which_score": answer}


class _Task:
    """One network: its halves retrained, and the methods judged by them."""

    def __init__(self, run: runs.Run, network: Network) -> None:
        self.run, self.network, self.settings = run, network, network.settings
        self.trained = network.trained(0)
        self.key = network.key | {"num_queries": self.settings.num_queries}
        generator = run.generator("halves", self.settings.seed_name)
        self.subsets = random_halves(network.num_train, self.settings.num_subsets, generator=generator)

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Return the rows of all tables."""
        halves = self._halves()
        losses = torch.stack([half["losses"] for half in halves])
        scored = [(method, self._scored(method)) for method in methods(self.network, self.trained)]
        measured = {
            index: self._predicted(result["scores"], losses)
            for index, (_, result) in enumerate(scored)
            if result["status"] == "done"
        }
        removed = self._removals(scored, measured)
        table, queries = [], []
        for index, (method, result) in enumerate(scored):
            row = {**self._names(method), "status": result["status"]}
            table.append(row | measured[index]["row"] | removed.get(index, {}) if index in measured else row)
            for order, values in measured[index]["queries"].items() if index in measured else ():
                queries += [
                    {**self._names(method), "orders": order, "query": query, "lds": value}
                    for query, value in enumerate(values.tolist())
                ]
        return {"table": table, "queries": queries, "timing": self._timing(scored, halves)}

    def _names(self, method: Method) -> dict[str, Any]:
        return {"task": self.network.label, "method": method.name, "damping": method.damping}

    def _halves(self) -> list[dict[str, Any]]:
        """Return the queries' losses on every half, once for each order of the batches."""
        weights = subset_weights(self.subsets)
        found = []
        for order in self.run.progress(list(range(self.settings.num_orders)), f"halves {self.network.label}"):
            key = self.key | {"num_subsets": len(weights), "order": order}
            retrain = partial(self.network.retrained_losses, weights, order)
            found.append(self.run.unit("attribution/halves", key, retrain, version=1))
        return found

    def _scored(self, method: Method) -> dict[str, Any]:
        def timed() -> dict[str, Any]:
            clock = work_clock(self.run.device)
            start = clock()
            result = method.compute()
            return {"seconds": clock() - start} | result

        key = self.key | {"method": method.name, "damping": method.damping} | method.key
        return self.run.unit("attribution/scores", key, timed, version=1)

    def _predicted(self, scores: Tensor, losses: Tensor) -> dict[str, Any]:
        """Return the columns of the table, and the correlation of each query."""
        columns: dict[str, float] = {}
        queries: dict[str, Tensor] = {}
        for prefix, order, some in (("lds", SAME, losses[:1]), ("lds_other", OTHER, losses[1:])):
            if not len(some):
                continue
            found = linear_datamodelling_score(scores, self.subsets, some)
            columns |= {prefix: found.value, f"{prefix}_low": found.low, f"{prefix}_high": found.high}
            queries[order] = found.per_measurement
        return {"row": columns, "queries": queries}

    def _removals(
        self, scored: list[tuple[Method, dict[str, Any]]], measured: dict[int, dict[str, Any]]
    ) -> dict[int, dict[str, float]]:
        """Return how much test losses rise without their top-ranked examples, for the best damping of a method."""
        best: dict[str, int] = {}
        for index in measured:
            name = scored[index][0].name
            if name not in best or measured[index]["row"]["lds"] > measured[best[name]]["row"]["lds"]:
                best[name] = index
        num = self.settings.num_removed_for
        cases = [(index, fraction) for index in best.values() for fraction in self.settings.fractions]
        weights = [removal_weights(scored[index][1]["scores"][:num], fraction) for index, fraction in cases]
        everything = torch.ones(1, self.network.num_train, dtype=torch.float64)
        removed = [[scored[i][0].name, scored[i][0].damping, scored[i][0].key, fraction] for i, fraction in cases]
        key = self.key | {"removed": removed, "num": num}
        retrain = partial(self.network.retrained_losses, torch.cat([everything, *weights]), 0)
        losses = self.run.unit("attribution/removals", key, retrain, version=1)["losses"]
        rises = (losses[1:].view(len(cases), num, -1) - losses[0])[:, torch.arange(num), torch.arange(num)]
        found: dict[int, dict[str, float]] = {index: {} for index in best.values()}
        generator = np.random.default_rng(0)
        for (index, fraction), rise in zip(cases, rises.double().cpu().numpy(), strict=True):
            interval = bootstrap_interval(rise, lambda values: float(np.mean(values)), generator=generator)
            name = f"removal_{100 * fraction:g}"
            found[index] |= {name: float(rise.mean()), f"{name}_low": interval.low, f"{name}_high": interval.high}
        return found

    def _timing(
        self, scored: list[tuple[Method, dict[str, Any]]], halves: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return seconds, and how many trainings they are."""
        training = self.trained.seconds
        rows = [{**self._names(Method("one training", None, {}, dict)), "seconds": training}]
        rows += [
            {
                **self._names(Method(f"{len(self.subsets)} halves together", None, {}, dict)),
                "seconds": h["seconds"],
            }
            for h in halves
        ]
        for method, result in scored:
            if result["status"] == "done":
                # Peers are measured in a process of their own.
                seconds = result.get("cpu_seconds", result["seconds"])
                rows.append({**self._names(method), "seconds": seconds})
        return [row | {"trainings": row["seconds"] / training} for row in rows]
