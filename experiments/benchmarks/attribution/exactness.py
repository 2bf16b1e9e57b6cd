"""Scores of the public libraries beside exact ones: correlation, seconds and memory of every method."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from curvlab.influence import influence
from curvlab.lab import Computed, Run, plots
from curvlab.problem import stack
from curvlab.solvers import BlockConjugateGradient
from experiments.benchmarks.attribution.libraries.process import measure
from experiments.benchmarks.attribution.libraries.worker import TrainedNetwork
from experiments.shared.task import Task, TrainedTask

COLUMNS = [
    "method",
    "library",
    "status",
    "version",
    "pearson_mean",
    "pearson_worst",
    "seconds",
    "seconds_ratio",
    "repeats",
    "peak_gib",
    "remark",
]


def compute(run: Run, tasks: Mapping[str, DictConfig]) -> dict[str, pd.DataFrame]:
    """Train, solve the reference, measure every method; return one row for each."""
    if not tasks:
        return {}
    ((name, settings),) = tasks.items()
    task = Task.load(run, name, settings).trained()
    network = _stored_network(run, task, settings)
    key = task.key | {"num_queries": settings.num_queries, "damping": settings.damping}
    exact = partial(_reference, task, network, settings.damping)
    reference = run.unit("influence_peers/reference", key, exact, version=1, about="exact scores")
    methods: dict[str, dict[str, Any]] = OmegaConf.to_container(settings.methods)  # type: ignore[assignment]  # a mapping
    rows = []
    for method in run.progress(list(settings.only or methods), "methods"):
        options = methods[method] | {"num_threads": settings.num_threads}
        results = _measured(run, str(method), network, options, key, settings)
        rows.append(_row(str(method), options, results, reference["scores"]))
    run.note(
        training_loss=round(task.train_loss, 4),
        reference_residual=float(reference["residual"]),
    )
    return {"libraries": _with_ratios(pd.DataFrame(rows), str(settings.compared_with))}


def _stored_network(run: Run, task: TrainedTask, settings: DictConfig) -> dict[str, Any]:
    """Return weights and data as the workers read them."""
    test = task.splits.test
    order = torch.randperm(len(test), generator=run.generator("queries", task.splits.name))  # type: ignore[arg-type]
    inputs, targets = stack(test, order[: settings.num_queries].sort().values)
    train = stack(task.splits.train, task.train_indices)
    linear = [module for module in task.model.modules() if isinstance(module, nn.Linear)]
    return {
        "sizes": [linear[0].in_features, *(layer.out_features for layer in linear)],
        "parameters": [parameter.detach().cpu() for parameter in task.model.parameters()],
        "train_inputs": train[0].flatten(1).contiguous(),
        "train_targets": train[1],
        "test_inputs": inputs.flatten(1).contiguous(),
        "test_targets": targets,
        "damping": float(settings.damping),
    }


def _reference(task: TrainedTask, network: dict[str, Any], damping: float) -> dict[str, Any]:
    """Return scores in double precision, solved to 1e-6, and the largest residual."""
    found = influence(
        TrainedNetwork(network).model.double(),
        task.loss,
        (network["train_inputs"].double(), network["train_targets"]),
        (network["test_inputs"].double(), network["test_targets"]),
        damping=damping,
        solver=BlockConjugateGradient(rtol=1e-6),
    )
    return {"scores": found.scores, "residual": float(found.solution.residual.max())}


def _measured(  # noqa: PLR0917
    run: Run,
    method: str,
    network: dict[str, Any],
    options: dict[str, Any],
    key: dict[str, Any],
    settings: DictConfig,
) -> list[dict[str, Any]]:
    """Return one result for each repeat; a method that fails or is slow is not tried again."""
    # Where the peers' Python lies belongs to a machine, not to a result.
    peers_python = settings.peers_python or os.environ.get("CURVLAB_PEERS_PYTHON") or None
    limits = {"time_limit": settings.time_limit, "memory_limit": settings.memory_limit}
    unit = key | limits | {"method": options, "peers": peers_python is not None}
    once = partial(measure, network, options, peers_python=peers_python, **limits)
    results: list[dict[str, Any]] = []
    for repeat in range(settings.num_repeats):
        if results and (results[0]["status"] != "done" or results[0]["cpu_seconds"] > settings.repeat_below):
            break
        about = f"{method}, repeat {repeat}"
        results.append(run.unit("influence_peers/method", unit | {"repeat": repeat}, once, version=2, about=about))
    return results


def _row(name: str, options: dict[str, Any], results: list[dict[str, Any]], reference: Tensor) -> dict[str, Any]:
    row: dict[str, Any] = {"method": name, "library": options["library"], "status": results[0]["status"]}
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
    return table.reindex(columns=COLUMNS)


def draw(computed: Computed) -> dict[str, Figure]:
    """Return one bar for each method: mean over queries, the worst query marked; time and memory beside it."""
    table = computed["libraries"]
    done = table[table.status == "done"].iloc[::-1].reset_index(drop=True)
    figure, axes = plots.figure(
        1, 3, panel_size=(2.9, 0.8 + 0.32 * len(done)), sharey=True, width_ratios=[1.5, 1.0, 1.0]
    )
    colors = [plots.PALETTE[0] if library == "curvlab" else "#999999" for library in done.library]
    columns = ("pearson_mean", "seconds", "peak_gib")
    labels = ("Pearson correlation with exact scores", "processor time (s)", "peak memory (GiB)")
    for ax, column, label in zip(axes[0], columns, labels, strict=True):
        ax.barh(done.index, done[column], color=colors, height=0.6)
        ax.set_xlabel(label)
        ax.grid(axis="y", visible=False)
    axes[0, 0].scatter(
        done.pearson_worst, done.index, marker="|", s=70, color="black", zorder=3, label="worst query"
    )
    axes[0, 0].set_yticks(done.index, done.method)
    axes[0, 0].axvline(0, color="black", linewidth=0.8)
    axes[0, 0].set_xlim(min(-0.3, float(done.pearson_worst.min()) - 0.05) if len(done) else -0.3, 1.05)
    axes[0, 1].set_xscale("log")
    axes[0, 1].xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axes[0, 1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes[0, 1].xaxis.set_minor_formatter(NullFormatter())
    figure.legend(loc="outside lower center", fontsize=8, frameon=False)
    return {"figure_libraries.png": figure}
