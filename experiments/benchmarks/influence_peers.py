"""Influence scores of the public libraries against exact ones: correlation, time, memory.

make bench-influence-peers PRESET=smoke|embedded|laptop|paper [ARGS="peers_python=DIR/bin/python"]

The influence of all training digits on some test digits, -∇l(test)ᵀ (G + damping I)⁻¹ ∇l(point), with an MLP that
is trained to a small loss. The reference is solved in double precision to a residual of 1e-6. Every method runs in
a process of its own, one thread, and is measured from the trained model to the scores. Time is processor time: the
seconds on an idle machine, whatever else runs. Correlation is Pearson's over the training digits, query by query:
a library may scale its scores as it likes.

Libraries whose dependencies exclude ours (pyDVL wants numpy below 2) live in an environment of their own, the
extra `peers`; its Python is the setting `peers_python` or the environment variable CURVLAB_PEERS_PYTHON. Without
one their rows say "not installed".
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from curvlab import runs
from curvlab.data import stack
from curvlab.influence import influence
from curvlab.reporting import save_claims
from curvlab.solvers import BlockConjugateGradient
from experiments.benchmarks.influence_peers_plot import draw
from experiments.benchmarks.influence_peers_process import measure
from experiments.task import Task, build_task

# Of how a library is called: stored results of other versions do not count.
WORKER_VERSIONS = {"curvlab": 3, "pydvl": 3, "dattri": 3}


@runs.main("benchmarks/influence_peers")
def main(cfg: DictConfig) -> None:
    """Train, solve the reference, measure every method, tabulate, draw."""
    title = "Influence scores of the public libraries"
    with runs.start(cfg, paper="benchmarks", item="influence_peers", title=title) as run:
        task = build_task(run, cfg)
        problem = _problem(run, task, cfg)
        key = {**task.key, "num_queries": cfg.num_queries, "damping": cfg.damping, "version": 1}
        reference = run.unit("influence_peers/reference", key, partial(_reference, task, problem, cfg.damping))
        rows = []
        for name in run.progress(list(cfg.only or cfg.methods), "methods"):
            settings = {**_plain(cfg.methods[name]), "num_threads": cfg.num_threads}
            results = _measured(run, problem, settings, key, cfg)
            rows.append(_row(str(name), settings, results, reference["scores"]))
        table = _with_ratios(pd.DataFrame(rows), str(cfg.compared_with))
        save_claims(run.folder, [])  # no paper compares these
        run.save_table(table)
        run.save_figure(draw(table))
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
        run.note(
            scale={
                "training digits": task.num_train,
                "queries": cfg.num_queries,
                "training loss": round(task.train_loss, 4),
                "threads": cfg.num_threads,
                "repeats": cfg.num_repeats,
                "load of the machine": round(load, 1),
                "reference residual": float(reference["residual"]),
            }
        )
        _print(table)


def _problem(run: runs.Run, task: Task, cfg: DictConfig) -> dict[str, Any]:
    """Return weights and data as the workers read them."""
    test = task.splits.test
    order = torch.randperm(len(test), generator=run.generator("queries", task.splits.name))  # type: ignore[arg-type]
    inputs, targets = stack(test, order[: cfg.num_queries].sort().values)
    train = stack(task.splits.train, task.train_indices)
    linear = [module for module in task.model.modules() if isinstance(module, nn.Linear)]
    return {
        "sizes": [linear[0].in_features, *(layer.out_features for layer in linear)],
        "parameters": [parameter.detach().cpu() for parameter in task.model.parameters()],
        "train_inputs": train[0].flatten(1).contiguous(),
        "train_targets": train[1],
        "test_inputs": inputs.flatten(1).contiguous(),
        "test_targets": targets,
        "damping": float(cfg.damping),
    }


def _reference(task: Task, problem: dict[str, Any], damping: float) -> dict[str, Any]:
    """Return scores in double precision, solved to 1e-6, and the largest residual."""
    from experiments.benchmarks.influence_peers_worker import Problem

    doubled = Problem(problem)
    found = influence(
        doubled.model.double(),
        task.loss,
        (problem["train_inputs"].double(), problem["train_targets"]),
        (problem["test_inputs"].double(), problem["test_targets"]),
        damping=damping,
        solver=BlockConjugateGradient(rtol=1e-6),
    )
    return {"scores": found.scores, "residual": float(found.solution.residual.max())}


def _measured(
    run: runs.Run, problem: dict[str, Any], settings: dict[str, Any], key: dict[str, Any], cfg: DictConfig
) -> list[dict[str, Any]]:
    """Return one result a repeat; a method that fails or is slow is not tried again."""
    results: list[dict[str, Any]] = []
    compute = partial(
        measure,
        problem,
        settings,
        peers_python=_peers_python(cfg),
        time_limit=cfg.time_limit,
        memory_limit=cfg.memory_limit,
    )
    for repeat in range(cfg.num_repeats):
        if results and (results[0]["status"] != "done" or results[0]["cpu_seconds"] > cfg.repeat_below):
            break
        unit = {**key, "method": settings, "repeat": repeat, "limits": [cfg.time_limit, cfg.memory_limit]}
        worker = WORKER_VERSIONS.get(settings["library"], 2)
        unit |= {"worker": worker, "peers": _peers_python(cfg) is not None}
        results.append(run.unit("influence_peers/method", unit, compute))
    return results


def _row(name: str, settings: dict[str, Any], results: list[dict[str, Any]], reference: Tensor) -> dict[str, Any]:
    row: dict[str, Any] = {"method": name, "library": settings["library"], "status": results[0]["status"]}
    if row["status"] != "done":
        return row
    correlation = pearson(results[0]["scores"].double(), reference)
    return row | {
        "version": results[0]["version"],
        "pearson_mean": float(correlation.mean()),
        "pearson_worst": float(correlation.min()),
        "seconds": float(np.median([result["cpu_seconds"] for result in results])),
        "repeats": len(results),
        "peak_gib": max(result["peak_bytes"] for result in results) / 2**30,
        "remark": results[0]["remark"],
    }


def pearson(scores: Tensor, reference: Tensor) -> Tensor:
    """Return the correlation of each row, (M, N) -> (M,); 0 where scores are constant or not finite."""
    centred, wanted = (x - x.mean(1, keepdim=True) for x in (scores, reference))
    correlation = (centred * wanted).sum(1) / (centred.norm(dim=1) * wanted.norm(dim=1))
    return torch.nan_to_num(correlation, nan=0.0)


def _with_ratios(table: pd.DataFrame, compared_with: str) -> pd.DataFrame:
    """Add the time over that of one method in the same run."""
    known = table.loc[table.method == compared_with].get("seconds")
    base = float(known.iloc[0]) if known is not None and len(known) else float("nan")
    table["seconds_ratio"] = table["seconds"] / base
    columns = [
        "version",
        "pearson_mean",
        "pearson_worst",
        "seconds",
        "seconds_ratio",
        "repeats",
        "peak_gib",
        "remark",
    ]
    return table.reindex(columns=["method", "library", "status", *columns])


def _peers_python(cfg: DictConfig) -> str | None:
    """Return the config's, or the environment's: where it lies belongs to a machine, not to a result."""
    return cfg.peers_python or os.environ.get("CURVLAB_PEERS_PYTHON") or None


def _plain(node: Any) -> dict[str, Any]:
    return {str(key): value for key, value in OmegaConf.to_container(node, resolve=True).items()}  # type: ignore[union-attr]


def _print(table: pd.DataFrame) -> None:
    columns = ["method", "status", "pearson_mean", "pearson_worst", "seconds", "seconds_ratio", "peak_gib"]
    print(table[columns].to_string(index=False, float_format=lambda value: f"{value:.3g}", na_rep=""))


if __name__ == "__main__":
    main()
