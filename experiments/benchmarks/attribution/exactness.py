"""Scores of the public libraries beside exact ones: correlation, seconds and memory of every method."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from curvlab.influence import linear_datamodelling_score
from curvlab.lab import Computed, Run, panels, plots, unit
from experiments.benchmarks.attribution.libraries import own_matrix
from experiments.benchmarks.attribution.libraries.own_matrix import GAUSS_NEWTON, HESSIAN, NO_MATRIX
from experiments.benchmarks.attribution.libraries.process import limits_of, measure, stored_network
from experiments.benchmarks.parts import tasks_of
from experiments.shared.stats import correlation
from experiments.shared.task import TrainedTask

QUALITY = ("pearson_mean", "pearson_worst", "reference_residual", "pearson_gauss_newton")
LDS = ("lds", "lds_low", "lds_high")
COSTS = ("seconds", "seconds_ratio", "repeats", "peak_gib", "remark")
COLUMNS = ("method", "library", "version", "matrix", "damping", "status", *QUALITY, *LDS, *COSTS)


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Train, solve the references, measure every method at every damping; return one row for each.

    `pearson_mean` is against exact scores of the very matrix that the method inverts (of plain gradients: of the
    Gauss-Newton matrix), solved to `reference_residual`, and nan where that is above `largest_residual`;
    `pearson_gauss_newton` against those of the Gauss-Newton matrix, `lds` against retraining on halves.
    """
    tasks = list(tasks_of(run, cfg, "libraries"))
    if not tasks:
        return {}
    (task,) = (each.trained() for each in tasks)
    settings, at_run, rows = task.settings, own_matrix.run_length(task).damping, []
    methods: dict[str, dict[str, Any]] = OmegaConf.to_container(settings.methods)  # type: ignore[assignment]  # a mapping
    for damping in (float(settings.damping), *([at_run] if settings.at_run_damping else [])):
        network = _stored_network(task) | {"damping": damping}
        exact = cache(partial(_exact, task, network))  # of a matrix
        halves = own_matrix.retrained(task, network) if settings.num_subsets else None
        for name in run.progress(list(settings.only or methods), f"methods at damping {damping:.2g}"):
            options = methods[name] | {"num_threads": settings.num_threads}
            matrix, remark = options.pop("matrix"), options.pop("remark", "")
            results = _measured(task, network, str(name), options)
            row = {"matrix": matrix, "damping": damping} | _row(str(name), options, results)
            if row["status"] == "done":
                scores, reference = results[0]["scores"].double(), GAUSS_NEWTON if matrix == NO_MATRIX else matrix
                row |= _agreement(scores, exact(reference), float(settings.largest_residual))
                row["pearson_gauss_newton"] = float(pearson(scores, exact(GAUSS_NEWTON)["scores"]).mean())
                if halves is not None:
                    lds = linear_datamodelling_score(scores.nan_to_num(), *halves)
                    row |= dict(zip(LDS, (lds.value, lds.low, lds.high), strict=True))
            rows.append(row | {"remark": "; ".join(filter(None, (row.get("remark"), remark)))})
    run.note(training_loss=round(task.train_loss, 4), run_damping=at_run)
    return {"libraries": _with_ratios(pd.DataFrame(rows), str(settings.compared_with))}


def _agreement(scores: Tensor, reference: dict[str, Any], largest_residual: float) -> dict[str, float]:
    """Return how scores agree with exact ones of their matrix, where these are exact."""
    row = {"reference_residual": reference["residual"]}
    if reference["residual"] > largest_residual:
        return row
    found = pearson(scores, reference["scores"])
    return row | {"pearson_mean": float(found.mean()), "pearson_worst": float(found.min())}


def _exact(task: TrainedTask, network: dict[str, Any], matrix: str) -> dict[str, Any]:
    """Return the exact scores, (M, N), and the largest residual of their solves."""
    own = ("num_queries", *(("hessian_dense", "hessian_rtol", "hessian_steps") if matrix == HESSIAN else ()))
    key = {name: task.settings[name] for name in own}
    return _reference(task, network, damping=network["damping"], matrix=matrix, **key)


@unit("influence_peers/reference", version=2, about="exact scores, {matrix}")
def _reference(task: TrainedTask, network: dict[str, Any], /, *, matrix: str, **_: Any) -> dict[str, Any]:
    return own_matrix.exact_scores(network, task.loss, matrix, task.settings)


def _stored_network(task: TrainedTask) -> dict[str, Any]:
    """Return weights and data as the workers read them."""
    generator = task.run.generator("queries", task.splits.name)
    order = torch.randperm(len(task.splits.test), generator=generator)  # type: ignore[arg-type]  # map-style
    queries = task.pair("test", order[: task.settings.num_queries].sort().values)
    return stored_network(task.model, task.settings, task.pair("train", task.train_indices), queries)


def _measured(
    task: TrainedTask, network: dict[str, Any], method: str, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return one result for each repeat; a method that fails or is slow is not tried again."""
    settings, (python, limits) = task.settings, limits_of(task.settings)
    key = {"num_queries": settings.num_queries, "damping": network["damping"]} | limits
    key |= {"method": options, "peers": python is not None}
    results: list[dict[str, Any]] = []
    for repeat in range(settings.num_repeats):
        if results and (results[0]["status"] != "done" or results[0]["cpu_seconds"] > settings.repeat_below):
            break
        results.append(_once(task, network, limits | {"peers_python": python}, **key, repeat=repeat))
    return results


@unit("influence_peers/method", version=2, about="{method[library]}, repeat {repeat}")
def _once(task: TrainedTask, network: dict[str, Any], limits: dict[str, Any], /, **key: Any) -> dict[str, Any]:
    return measure(network, key["method"], **limits)


def _row(name: str, options: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"method": name, "library": options["library"], "status": results[0]["status"]}
    if row["status"] != "done":
        return row
    row |= {name: results[0][name] for name in ("version", "remark")} | {"repeats": len(results)}
    row["seconds"] = float(np.median([result["cpu_seconds"] for result in results]))
    return row | {"peak_gib": max(result["peak_bytes"] for result in results) / 2**30}


def pearson(scores: Tensor, reference: Tensor) -> Tensor:
    """Return the correlation of each row, (M, N) -> (M,); 0 where scores are constant or not finite."""
    return correlation(scores.T, reference.T)


def _with_ratios(table: pd.DataFrame, compared_with: str) -> pd.DataFrame:
    """Add the time over that of one method in the same run."""
    known = table.loc[table.method == compared_with].get("seconds")
    base = float(known.iloc[0]) if known is not None and len(known) else float("nan")
    table["seconds_ratio"] = table["seconds"] / base
    return table.reindex(columns=list(COLUMNS))


def draw(computed: Computed) -> dict[str, Figure]:
    """Return one bar for each method: mean over queries, the worst query marked; time and memory beside it."""
    table, settings = computed["libraries"], computed.config["libraries"]
    named = "matrix" in table  # else computed before each library had its own
    first = table[table.damping == table.damping.iloc[0]] if named else table
    done = first[first.status == "done"].iloc[::-1].reset_index(drop=True)
    size, ratios = (2.9, 0.8 + 0.32 * len(done)), [1.5, 1.0, 1.0]
    figure, axes = plots.figure(1, 3, panel_size=size, sharey=True, width_ratios=ratios)
    ours, theirs = plots.shades(2)
    colors = [ours if library == "curvlab" else theirs for library in done.library]
    columns = ("pearson_mean", "seconds", "peak_gib")
    of = "its matrix" if named else "the Gauss-Newton matrix"
    labels = (f"correlation with exact\nscores of {of}", "processor time (s)", "peak memory (GiB)")
    for ax, column, label in zip(axes[0], columns, labels, strict=True):
        ax.barh(done.index, done[column], color=colors, height=0.6)
        ax.set_xlabel(label)
        ax.grid(axis="y", visible=False)
    first_ax, seconds, _ = axes[0]
    look = {"marker": "|", "s": 70, "color": "black", "zorder": 3, "label": "worst query"}
    first_ax.scatter(done.pearson_worst, done.index, **look)
    first_ax.set_yticks(done.index, done.method + " (" + done.matrix + ")" if named else done.method)
    first_ax.axvline(0, color="black", linewidth=0.8)
    first_ax.set_xlim(min(-0.3, float(done.pearson_worst.min()) - 0.05) if len(done) else -0.3, 1.05)
    first_ax.set_title(f"damping {settings['damping']:g}, {settings['num_queries']} queries", loc="left")
    seconds.set_xscale("log")
    seconds.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    seconds.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    seconds.xaxis.set_minor_formatter(NullFormatter())
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
    rows = ours[["lds", "lds_low", "lds_high", "damping"]].to_numpy()
    lds = ", ".join(f"{own:.3f} ({low:.2f} to {high:.2f}) at {damping:.2g}" for own, low, high, damping in rows)
    notes.append(f"LDS of curvlab by damping: {lds}")
    return [*notes, f"intervals of {overlap} of {len(others)} other methods' LDS overlap the larger one's"]
