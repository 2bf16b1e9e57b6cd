"""Scores of the public libraries beside exact ones: correlation, seconds and memory of every method."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from curvlab.influence import linear_datamodelling_score
from curvlab.lab import Computed, Run, panels, plots
from experiments.benchmarks.attribution.libraries.own_matrix import (
    GAUSS_NEWTON,
    HESSIAN,
    NO_MATRIX,
    exact_scores,
    retrained,
    run_length,
)
from experiments.benchmarks.attribution.libraries.process import measure, stored_network
from experiments.shared.stats import correlation
from experiments.shared.task import Task, TrainedTask

COLUMNS = [
    "method",
    "library",
    "version",
    "matrix",
    "damping",
    "status",
    "pearson_mean",
    "pearson_worst",
    "reference_residual",
    "pearson_gauss_newton",
    "lds",
    "lds_low",
    "lds_high",
    "seconds",
    "seconds_ratio",
    "repeats",
    "peak_gib",
    "remark",
]


def compute(run: Run, tasks: Mapping[str, DictConfig]) -> dict[str, pd.DataFrame]:
    """Train, solve the references, measure every method at every damping; return one row for each.

    `pearson_mean` is against exact scores of the very matrix that the method inverts (of plain gradients: of the
    Gauss-Newton matrix), solved to `reference_residual`, and nan where that is above `largest_residual`;
    `pearson_gauss_newton` against those of the Gauss-Newton matrix, `lds` against retraining on halves.
    """
    if not tasks:
        return {}
    ((name, settings),) = tasks.items()
    task = Task.load(run, name, settings).trained()
    methods: dict[str, dict[str, Any]] = OmegaConf.to_container(settings.methods)  # type: ignore[assignment]  # a mapping
    at_run, rows = run_length(task).damping, []
    for damping in (float(settings.damping), *([at_run] if settings.at_run_damping else [])):
        network = _stored_network(run, task, settings) | {"damping": damping}
        key = task.key | {"num_queries": settings.num_queries, "damping": damping}
        halves = retrained(run, task, network, settings) if settings.num_subsets else None
        judged = _Judged(run, task, network, settings, key, halves)
        for method in run.progress(list(settings.only or methods), f"methods at damping {damping:.2g}"):
            options = methods[method] | {"num_threads": settings.num_threads}
            matrix, remark = options.pop("matrix"), options.pop("remark", "")
            results = _measured(run, str(method), network, options, key, settings)
            row = judged.row(str(method), matrix, options, results)
            rows.append(row | {"remark": "; ".join(filter(None, (row.get("remark"), remark)))})
    run.note(training_loss=round(task.train_loss, 4), run_damping=at_run)
    return {"libraries": _with_ratios(pd.DataFrame(rows), str(settings.compared_with))}


@dataclass
class _Judged:
    """One damping: exact scores by matrix, solved when a method asks for them, and the halves."""

    run: Run
    task: TrainedTask
    network: dict[str, Any]
    settings: DictConfig
    key: dict[str, Any]
    halves: tuple[Tensor, Tensor] | None
    references: dict[str, dict[str, Any]] = field(default_factory=dict)

    def exact(self, matrix: str) -> dict[str, Any]:
        """Return the exact scores, (M, N), and the largest residual of their solves."""
        if matrix not in self.references:
            key = self.key | {"matrix": matrix}
            if matrix == HESSIAN:
                own = ("hessian_dense", "hessian_rtol", "hessian_steps")
                key |= {name: self.settings[name] for name in own}
            solve = partial(exact_scores, self.network, self.task.loss, matrix, self.settings)
            about = f"exact scores, {matrix}"
            self.references[matrix] = self.run.unit(
                "influence_peers/reference", key, solve, version=2, about=about
            )
        return self.references[matrix]

    def row(
        self, name: str, matrix: str, options: dict[str, Any], results: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Return a method's row."""
        row = {"matrix": matrix, "damping": self.network["damping"]} | _row(name, options, results)
        if row["status"] != "done":
            return row
        scores = results[0]["scores"].double()
        reference = self.exact(GAUSS_NEWTON if matrix == NO_MATRIX else matrix)
        row["reference_residual"] = reference["residual"]
        if reference["residual"] <= self.settings.largest_residual:
            found = pearson(scores, reference["scores"])
            row |= {"pearson_mean": float(found.mean()), "pearson_worst": float(found.min())}
        row["pearson_gauss_newton"] = float(pearson(scores, self.exact(GAUSS_NEWTON)["scores"]).mean())
        if self.halves is not None:
            lds = linear_datamodelling_score(scores.nan_to_num(), *self.halves)
            row |= {"lds": lds.value, "lds_low": lds.low, "lds_high": lds.high}
        return row


def _stored_network(run: Run, task: TrainedTask, settings: DictConfig) -> dict[str, Any]:
    """Return weights and data as the workers read them."""
    order = torch.randperm(len(task.splits.test), generator=run.generator("queries", task.splits.name))  # type: ignore[arg-type]
    queries = task.pair("test", order[: settings.num_queries].sort().values)
    return stored_network(task.model, settings, task.pair("train", task.train_indices), queries)


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


def _row(name: str, options: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"method": name, "library": options["library"], "status": results[0]["status"]}
    if row["status"] != "done":
        return row
    return row | {
        "version": results[0]["version"],
        "seconds": float(np.median([result["cpu_seconds"] for result in results])),
        "repeats": len(results),
        "peak_gib": max(result["peak_bytes"] for result in results) / 2**30,
        "remark": results[0]["remark"],
    }


def pearson(scores: Tensor, reference: Tensor) -> Tensor:
    """Return the correlation of each row, (M, N) -> (M,); 0 where scores are constant or not finite."""
    return correlation(scores.T, reference.T)


def _with_ratios(table: pd.DataFrame, compared_with: str) -> pd.DataFrame:
    """Add the time over that of one method in the same run."""
    known = table.loc[table.method == compared_with].get("seconds")
    base = float(known.iloc[0]) if known is not None and len(known) else float("nan")
    table["seconds_ratio"] = table["seconds"] / base
    return table.reindex(columns=COLUMNS)


def draw(computed: Computed) -> dict[str, Figure]:
    """Return one bar for each method: mean over queries, the worst query marked; time and memory beside it."""
    table, settings = computed["libraries"], computed.config["libraries"]
    named = "matrix" in table  # else computed before each library had its own
    first = table[table.damping == table.damping.iloc[0]] if named else table
    done = first[first.status == "done"].iloc[::-1].reset_index(drop=True)
    figure, axes = plots.figure(
        1, 3, panel_size=(2.9, 0.8 + 0.32 * len(done)), sharey=True, width_ratios=[1.5, 1.0, 1.0]
    )
    ours, theirs = plots.shades(2)
    colors = [ours if library == "curvlab" else theirs for library in done.library]
    columns = ("pearson_mean", "seconds", "peak_gib")
    of = "its matrix" if named else "the Gauss-Newton matrix"
    labels = (f"correlation with exact\nscores of {of}", "processor time (s)", "peak memory (GiB)")
    for ax, column, label in zip(axes[0], columns, labels, strict=True):
        ax.barh(done.index, done[column], color=colors, height=0.6)
        ax.set_xlabel(label)
        ax.grid(axis="y", visible=False)
    axes[0, 0].scatter(
        done.pearson_worst, done.index, marker="|", s=70, color="black", zorder=3, label="worst query"
    )
    axes[0, 0].set_yticks(done.index, done.method + " (" + done.matrix + ")" if named else done.method)
    axes[0, 0].axvline(0, color="black", linewidth=0.8)
    axes[0, 0].set_xlim(min(-0.3, float(done.pearson_worst.min()) - 0.05) if len(done) else -0.3, 1.05)
    axes[0, 1].set_xscale("log")
    axes[0, 1].xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axes[0, 1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes[0, 1].xaxis.set_minor_formatter(NullFormatter())
    axes[0, 0].set_title(f"damping {settings['damping']:g}, {settings['num_queries']} queries", loc="left")
    panels.legend(figure, title="\n".join(_notes(table, first)))
    return {"figure_more.png": figure}


def _notes(table: pd.DataFrame, first: pd.DataFrame) -> list[str]:
    """Return what the bars lack: methods without one, plain gradients' matrix, and the LDS of ours by damping."""
    failed = first[first.status != "done"]
    notes = [f"no bar: {own.method}, {own.status}" for own in failed.itertuples()]
    unknown = first[(first.status == "done") & first.pearson_mean.isna()].method
    notes += [f"no exact scores: {', '.join(unknown)}"] * bool(len(unknown))
    if "matrix" in table and first.matrix.eq(NO_MATRIX).any():
        notes.append("plain gradients: against the Gauss-Newton matrix")
    if "lds" not in table or not (table.library == "curvlab").any():
        return notes
    ours = table[table.library == "curvlab"].drop_duplicates("damping")
    best = ours.sort_values("lds").iloc[-1]
    others = first[(first.library != "curvlab") & first.lds.notna()]
    overlap = int(((others.lds_low <= best.lds_high) & (others.lds_high >= best.lds_low)).sum())
    lds = [
        f"{own.lds:.3f} ({own.lds_low:.2f} to {own.lds_high:.2f}) at {own.damping:.2g}"
        for own in ours.itertuples()
    ]
    return [
        *notes,
        f"LDS of curvlab by damping: {', '.join(lds)}",
        f"intervals of {overlap} of {len(others)} other methods' LDS overlap the larger one's",
    ]
