"""Frobenius norm, and the largest eigenvalue by sketches and by Lanczos (Klochkov & Liu 2024, Table 3, App. C).

make lissa-tab3 PRESET=smoke|embedded|laptop|paper ARGS="task=mlp_64_64_digits data=mnist"

For each model: ‖G‖_F from pairs of products with two independent batches (App. C) and from products with all the
data, lambda_max from a dense Gaussian sketch and from the per-tensor ("concatenated") one with about as many rows,
by Lanczos with an error bound, and the squared ratio. For some models both sketches are repeated, which gives
their bias and spread. The paper's claim that concatenation reduces the variance of a sketched dot product is
checked on the gradients it is about. It saves random numbers, not products: the per-tensor sketch takes L d
products with G, and a dense one with L d rows has at most its variance.

A symmetric positive semi-definite matrix has ‖G‖_F <= tr(G) and ‖G‖_F² <= lambda_max tr(G). Every row of ours is
checked, and the paper's own: both ResNets break both (‖G‖_F of 2.55e4 and 2.67e4 against traces of 1.45e4 and
2.04e4 from Table 1), so that the two numbers cannot refer to the same parameters and examples. Which ours refer
to: see lissa-tab1, whose rows these are.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import DictConfig
from scipy import stats

from curvlab.lab import Computed, Run, Target, panels, plots, task_label, task_settings
from curvlab.lab.claims import Claim, ClaimResult, ClaimSheet, out_of_reach
from curvlab.lab.claims import judge as judge_claim
from curvlab.lab.claims.intervals import MIN_SAMPLES, Interval, bootstrap_interval
from curvlab.lab.names import reader_names
from experiments.lissa import sketches
from experiments.lissa.gradient_sketches import gradient_pairs
from experiments.lissa.tab1 import MODELS, paper_numbers
from experiments.shared import spectrum as units
from experiments.shared.task import Task, TrainedTask

TARGET = Target(
    __name__,
    title="Frobenius norm, and the largest eigenvalue by sketches and by Lanczos",
    paper={
        "tasks": ["ResNet-18", "ResNet-50", "OPT-1.3B", "Llama-7B", "Mistral-7B"],
        "table.csv:examples": "5000 images, 50 x 256 tokens a product, sampled",
        "table.csv:dense_rows": 5000,
        "frobenius.num_pairs": "not stated",
    },
    after=("lissa/tab1",),
)


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, one row for each task; `sketches`, for each repetition; `gradients`, for each pair.

    And `paper`, one row for each printed row, and `summary`, in the paper's columns.

    Args:
        run: seeds, store, device.
        cfg: `tasks`, and for all of them or for one: the settings of the units, `spectrum`, `sketch`, `frobenius`,
            `repeated` (num_products null: no repetitions), `gradients`.
    """
    rows, repeated, pairs = [], [], []
    for loaded in Task.each(run, cfg):
        task, own = loaded.trained(), loaded.settings
        rows.append(row(run, task, own))
        repeated += repeated_sketches(run, task, own)
        found = {key: value.double().numpy() for key, value in gradient_pairs(task, **own.gradients).items()}
        pairs.append(pd.DataFrame({"task": task.label, **found}))
    table, gradients = pd.DataFrame(rows), pd.concat(pairs, ignore_index=True)
    columns = ["task", "form", "rows", "repetition", "value", "lambda_max"]
    sketches = pd.DataFrame(repeated, columns=columns)
    run.note(seeds=[cfg.seed])
    return {
        "table": table,
        "sketches": sketches,
        "gradients": gradients,
        "paper": paper_table(),
        "summary": summary(table, sketches, gradients),
    }


def row(run: Run, task: TrainedTask, cfg: DictConfig) -> dict[str, Any]:
    """Return what Table 3 has about one model, both sketches, and the two inequalities."""
    spectrum = units.spectrum(task, cfg)
    num_tensors = len(task.tensor_sizes)
    chunk_size = cfg.sketch.get("chunk_size", sketches.SKETCH_CHUNK)
    dense = sketches.sketch(task, size=cfg.sketch.size, chunk_size=chunk_size)
    size = math.ceil(cfg.sketch.size / num_tensors)
    per_tensor = sketches.sketch(task, size=size, per_tensor=True, chunk_size=chunk_size)
    pairs = cfg.frobenius
    norm = sketches.frobenius(task, num_pairs=pairs.num_pairs, batch_size=pairs.batch_size)
    columns = pairs.get("chunk_size", units.TRACE_CHUNK)
    full = sketches.frobenius(task, num_pairs=pairs.num_probes, batch_size=None, chunk_size=columns)
    trace, largest = spectrum["trace"], spectrum["largest_eigenvalue"]
    return {
        "task": task.label,
        "unit": "tokens" if task.is_language else "images",
        "parameters": task.num_parameters,
        "tensors": num_tensors,
        "examples": task.num_train,
        "trace": trace,
        "trace_stderr": spectrum["trace_stderr"],
        "frobenius": norm["value"],
        "frobenius_stderr": norm["stderr"],
        "pairs": pairs.num_pairs,
        "examples_per_batch": pairs.batch_size,
        "frobenius_full": full["value"],
        "frobenius_full_stderr": full["stderr"],
        "lambda_max": largest,
        "lambda_max_error": spectrum["largest_eigenvalue_error"],
        **{f"dense_{name}": value for name, value in dense.items()},
        **{f"per_tensor_{name}": value for name, value in per_tensor.items()},
        "squared_ratio": (full["value"] / largest) ** 2,
        "norm_over_trace": full["value"] / trace,
        "square_over_product": full["value"] ** 2 / (largest * trace),
        "batch_norm_over_trace": norm["value"] / trace,
        "batch_square_over_product": norm["value"] ** 2 / (largest * trace),
    }


def repeated_sketches(run: Run, task: TrainedTask, cfg: DictConfig) -> list[dict[str, Any]]:
    """Return one row for each sketch: dense and per-tensor with equally many products, several of each."""
    if cfg.repeated.num_products is None:
        return []
    largest = units.spectrum(task, cfg)["largest_eigenvalue"]
    num_tensors = len(task.tensor_sizes)
    sizes = {"dense": cfg.repeated.num_products, "per tensor": math.ceil(cfg.repeated.num_products / num_tensors)}
    rows = []
    repetitions = range(1, cfg.repeated.num_repetitions + 1)
    for form, size in sizes.items():
        for repetition in run.progress(repetitions, f"{form} sketches {task.label}"):
            found = sketches.sketch(task, size=size, per_tensor=form == "per tensor", repetition=repetition)
            place = {"task": task.label, "form": form, "rows": found["rows"], "repetition": repetition}
            rows.append({**place, "value": found["value"], "lambda_max": largest})
    return rows


def paper_table() -> pd.DataFrame:
    """Return the paper's Table 3 beside tr and λmax of Table 1, and the two inequalities."""
    numbers = paper_numbers()
    rows = []
    for name in MODELS:
        norm = numbers.get("Table 3", name, "frobenius_norm").value
        largest = numbers.get("Table 3", name, "lambda_max").value
        size = numbers.get("Table 1", name, "num_parameters").value
        trace = size * numbers.get("Table 1", name, "trace_per_parameter").value
        rows.append(
            {
                "row": name,
                "trace": trace,
                "frobenius": norm,
                "lambda_max": largest,
                "squared_ratio": numbers.get("Table 3", name, "squared_ratio").value,
                "norm_over_trace": norm / trace,
                "square_over_product": norm**2 / (largest * trace),
                "error_over_lambda_max": norm
                / numbers.get("Table 3", "all", "sketch_size").value ** 0.5
                / largest,
            }
        )
    return pd.DataFrame(rows)


def summary(table: pd.DataFrame, sketches: pd.DataFrame, gradients: pd.DataFrame) -> pd.DataFrame:
    """Return the columns of the paper's table, both sketches, and the checks."""
    found = pd.DataFrame(
        {
            "task": table.task,
            "‖G‖_F, two batches": table.frobenius,
            "s.e.": table.frobenius_stderr,
            "‖G‖_F, all data": table.frobenius_full,
            "s.e. of it": table.frobenius_full_stderr,
            "lambda_max, Lanczos": table.lambda_max,
            "dense sketch": table.dense_value,
            "rows": table.dense_rows,
            "per-tensor sketch": table.per_tensor_value,
            "rows of it": table.per_tensor_rows,
            "(‖G‖_F / lambda_max)²": table.squared_ratio,
            "‖G‖_F / tr": table.norm_over_trace,
            "‖G‖_F² / (lambda_max tr)": table.square_over_product,
        }
    )
    for form in ("dense", "per tensor"):
        own = sketches[sketches.form == form]
        relative = (own.value / own.lambda_max - 1).groupby(own.task)
        found[f"bias, {form}"] = table.task.map(relative.mean())
        found[f"spread, {form}"] = table.task.map(relative.std())
    ratios = (gradients.per_tensor_exact / gradients.dense_exact).groupby(gradients.task).mean()
    return found.assign(**{"variance per tensor / dense": table.task.map(ratios), "1 / L": 1 / table.tensors})


# ------------------------------------------------------------------------------------ judge
ENOUGH_ROWS = 200  # of a dense sketch: even that of a matrix of rank one has a standard error of √(2/d), here 0.1
FORMS = {"dense": "dense", "per tensor": "per_tensor"}  # of a sketch, and the prefix of its columns in the table
PRINTED_RATIOS = {"images": "3.2e3 and 8.9e3 (vision)", "tokens": "5.4, 14 and 20 (language)"}
TWO_BATCHES = (
    "Its square is unbiased, but where few examples carry the curvature it is heavy-tailed: most pairs of batches "
    "miss them, and the standard error with them."
)
MASSES = (
    "The squared norms are not spread evenly over the tensors (exact variances: gradients.csv). And it saves "
    "random numbers only: the concatenated sketch takes L d products with G."
)


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge for each model the claims about sketches; those about printed rows say their value themselves."""
    results = []
    settings = {task_label(name): own for name, own in task_settings(computed.config).items()}
    for _, row in computed["table"].iterrows():
        of, tensors = str(row.task), int(row.tensors)
        own = computed["gradients"][lambda table, of=of: table.task == of]
        sketches = computed["sketches"][lambda table, of=of: table.task == of]
        repeated = {form: sketches[sketches.form == form] for form in FORMS}
        norms = [row.frobenius_stderr / row.frobenius, row.frobenius_full_stderr / row.frobenius_full]
        pairs = claims.claim("two-batches", of=of, pairs=int(row.pairs))
        ratio = claims.claim("squared-ratio", of=of, printed=PRINTED_RATIOS[row.unit])
        variance = claims.claim("variance", of=of, tensors=tensors)
        equivalent = claims.claim("equivalent-rows", of=of, tensors=tensors)
        aligned = claims.claim("dot-products", of=of)
        results += [
            _sketch(claims.claim("sketch", of=of, rows=int(row.dense_rows)), row, repeated["dense"]),
            _concatenated(claims, row, repeated),
            _with_error(
                pairs,
                row.frobenius / row.frobenius_full,
                math.hypot(*norms),
                (row.pairs, "pairs"),
                TWO_BATCHES,
                truth=1.0,
            ),
            _squared_ratio(ratio, row, (settings[of].frobenius.num_probes, "probes")),
            _ratio_of_means(variance, own.per_tensor, own.dense, MASSES),
            _ratio_of_means(equivalent, own.dense / tensors, own.per_tensor, MASSES),
            _ratio_of_means(aligned, own.cosine_squared, 1 + 0 * own.dense, "These gradients are aligned."),
        ]
    return results


def _with_error(
    claim: Claim, value: float, relative: float, draws: tuple[float, str], why: str, *, truth: float | None = None
) -> ClaimResult:
    """Judge a value with its relative standard error over draws; `truth`: what it is were the claim true."""
    low, high = 1 - 1.96 * relative, 1 + 1.96 * relative
    forecast = None if truth is None else (truth * low, truth * high)
    number, unit = int(draws[0]), draws[1]
    kind = f"95 %, to first order, {number} {unit}"
    interval = Interval(value * low, value * high, kind, number, forecast)
    return judge_claim(claim, float(value), interval, if_not_reproduced=why)


def _sketch(claim: Claim, row: pd.Series, repeated: pd.DataFrame) -> ClaimResult:
    """Judge λmax by one dense sketch; `repeated`: others."""
    rows, value = int(row.dense_rows), row.dense_value / row.lambda_max
    if rows < ENOUGH_ROWS:
        return out_of_reach(
            claim,
            f"{rows} rows are too few: √(2/d) = {(2 / rows) ** 0.5:.2g} is the error of a dense sketch at rank "
            f"one; {ENOUGH_ROWS} would do. These gave {row.dense_value:.3g} ± {row.dense_stderr:.2g}, Lanczos "
            f"{row.lambda_max:.4g}.",
        )
    push = row.frobenius_full / (rows**0.5 * row.lambda_max)
    why = f"Neighbours push it up by up to ‖G‖_F / (√d lambda_max) = {push:.2g}."
    if len(repeated):
        relative = repeated.value / repeated.lambda_max - 1
        why += (
            f" {len(repeated)} sketches with d = {repeated.rows.iloc[0]}: bias {relative.mean():+.2g}, spread "
            f"{relative.std():.2g}."
        )
    return _with_error(claim, value, row.dense_stderr / row.dense_value, (rows, "rows"), why)


def _concatenated(claims: ClaimSheet, row: pd.Series, repeated: dict[str, pd.DataFrame]) -> ClaimResult:
    """Judge the error of concatenated sketches over that of dense ones, at equal rows.

    Repeated: the ratio of mean squares of n and m sketches, by quantiles of F(n, m); the forecast is of
    errors that are alike. One of each decides nothing.
    """
    why = (
        "To first order the squared error of D rows is 2/D of a dense sketch and 2 L/D Σ ‖v_l‖⁴ of a concatenated "
        "one, v_l the part of the eigenvector in tensor l: never less, and L times as much where one tensor holds "
        f"it all. The table's single sketches: dense {row.dense_value:.3g} ± {row.dense_stderr:.2g} "
        f"({row.dense_rows:.0f} rows), concatenated {row.per_tensor_value:.3g} ± {row.per_tensor_stderr:.2g} "
        f"({row.per_tensor_rows:.0f} rows, {row.per_tensor_rows / row.tensors:.0f} for each tensor; a bias of "
        f"{row.per_tensor_bias:.3g} is taken off), Lanczos {row.lambda_max:.4g}."
    )
    of, numbers = str(row.task), {form: len(own) for form, own in repeated.items()}
    if min(numbers.values()) >= MIN_SAMPLES:
        squares = {
            form: float(((own.value / own.lambda_max - 1) ** 2 * own.rows).mean())
            for form, own in repeated.items()
        }
        value = (squares["per tensor"] / squares["dense"]) ** 0.5
        chance = [float(stats.f.ppf(q, numbers["per tensor"], numbers["dense"])) ** 0.5 for q in (0.975, 0.025)]
        kind = f"F 95 %, {numbers['per tensor']} and {numbers['dense']} sketches"
        alike = (1 / chance[0], 1 / chance[1])
        interval = Interval(value / chance[0], value / chance[1], kind, min(numbers.values()), alike)
        rows = int(repeated["dense"].rows.iloc[0])
        return judge_claim(claims.claim("concatenated", of=of, rows=rows), value, interval, if_not_reproduced=why)
    off, error = {}, {}
    for form, prefix in FORMS.items():
        scale = row[f"{prefix}_rows"] ** 0.5 / row.lambda_max
        off[form] = abs(row[f"{prefix}_value"] - row.lambda_max) * scale
        error[form] = row[f"{prefix}_stderr"] * scale
    dense, concatenated = off["dense"], off["per tensor"]
    value = math.hypot(concatenated, error["per tensor"]) / math.hypot(dense, error["dense"])
    claim = claims.claim("concatenated", of=of, rows=int(row.per_tensor_rows))
    interval = Interval(math.nan, math.nan, "one sketch of each", 1)
    return judge_claim(claim, value, interval, if_not_reproduced=why)


def _squared_ratio(claim: Claim, row: pd.Series, draws: tuple[float, str]) -> ClaimResult:
    limit = f"tr / lambda_max = {row.trace / row.lambda_max:.3g}"
    if row.unit != "tokens":
        return out_of_reach(
            claim,
            f"No positive semi-definite matrix of this trace and lambda_max exceeds {limit}: a network this small "
            f"cannot have thousands; it has {row.squared_ratio:.2g}. The printed rows cannot either, by their own "
            "trace (printed-square-below-product).",
        )
    relative = 2 * row.frobenius_full_stderr / row.frobenius_full
    why = f"It lies between 1 and {limit} for any such matrix."
    return _with_error(claim, row.squared_ratio, relative, draws, why)


def _ratio_of_means(claim: Claim, numerator: pd.Series, denominator: pd.Series, why: str) -> ClaimResult:
    """Judge the ratio of means over pairs with its bootstrap interval."""
    columns = numerator.to_numpy(), denominator.to_numpy()

    def statistic(above: np.ndarray, below: np.ndarray) -> float:
        return float(above.mean() / below.mean())

    interval = bootstrap_interval(columns, statistic, unit="pairs", generator=np.random.default_rng(0))
    return judge_claim(claim, statistic(*columns), interval, if_not_reproduced=why)


# ------------------------------------------------------------------------------------ draw
def draw(computed: Computed) -> dict[str, Figure]:
    """Return what no positive semi-definite matrix can have, and how far the sketches can be trusted."""
    table, paper = computed["table"], computed["paper"]
    names = reader_names(table.task, whole=True)
    table = table.assign(task=table.task.map(names))
    figure, axes = plots.figure(panel_size=(8, 0.32 * (len(table) + len(paper)) + 1.2))
    _inequalities(axes[0, 0], table, paper)
    panels.legend(figure, title="printed: the paper's Table 3; ours: one network a row")
    more, axes = plots.figure(2, 1, panel_size=(8, 0.6 * len(table) + 2))
    _sketches(axes[0, 0], table, computed["sketches"].replace({"task": names}))
    _variances(axes[1, 0], table, computed["gradients"].replace({"task": names}))
    for ax in axes[:, 0]:
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return {"figure.png": figure, "figure_more.png": more}


def _inequalities(ax: Axes, table: pd.DataFrame, paper: pd.DataFrame) -> None:
    both = pd.concat([paper.assign(task=paper["row"] + ", printed"), table.assign(task=table.task + ", ours")])
    columns = {"square_over_product": "‖G‖_F² / (λmax tr)", "norm_over_trace": "‖G‖_F / tr"}
    points = pd.concat([both.assign(ratio=both[column], bound=label) for column, label in columns.items()])
    panels.forest(ax, points, name="task", value="ratio", low="ratio", high="ratio", by="bound")
    ax.axvspan(1, 1000, color=panels.GREY, alpha=0.15, linewidth=0, label="impossible for G ⪰ 0: above 1")
    panels.frame(ax, x="over its upper bound for G ⪰ 0", log="x")
    ax.set_xlim(right=1000)


def _sketches(ax: Axes, table: pd.DataFrame, sketches: pd.DataFrame) -> None:
    styles, parts = panels.styles_of(FORMS), []
    for form, prefix in FORMS.items():
        value, half = (table[f"{prefix}_{name}"] / table.lambda_max for name in ("value", "stderr"))
        ends = {"low": (value - 1.96 * half).clip(lower=0), "high": value + 1.96 * half}  # of an eigenvalue
        few = table[f"{prefix}_rows"] < ENOUGH_ROWS
        parts.append(pd.DataFrame({"task": table.task, "form": form, "value": value, "few": few} | ends))
        own = sketches[sketches.form == form]
        places = own.task.map(dict(zip(table.task, range(len(table)), strict=True)))
        shown = own.assign(ratio=own.value / own.lambda_max, place=places + (-0.35, 0.35)[form != "dense"])
        if len(own):
            label = f"{form}, {'/'.join(str(count) for count in own.rows.unique())} rows each"
            look: dict[str, Any] = {"identity": False, "size": 8, "alpha": 0.6, "styles": {label: styles[form]}}
            panels.scatter(ax, shown, x="ratio", y="place", label=label, **look)
    shared: dict[str, Any] = {"low": "low", "high": "high", "by": "form", "hollow": "few", "styles": styles}
    panels.forest(ax, pd.concat(parts), name="task", value="value", **shared)
    panels.rule(ax, x=1, label=f"Lanczos (rings: below {ENOUGH_ROWS} rows)")
    sizes = zip(table.task, table.dense_rows, table.per_tensor_rows, strict=True)
    labels = [f"{task}\n{dense} rows dense, {parts} per tensor" for task, dense, parts in sizes]
    ax.set_yticks(range(len(table)), labels)
    panels.frame(ax, x="λmax by a sketch / by Lanczos")


def _variances(ax: Axes, table: pd.DataFrame, gradients: pd.DataFrame) -> None:
    places = np.arange(len(table))[::-1]
    spread = gradients.groupby("task").cumcount() / gradients.groupby("task").task.transform("size").sub(1)
    heights = gradients.task.map(dict(zip(table.task, places, strict=True))) - 0.2 + 0.4 * spread.fillna(0)
    points = gradients.assign(ratio=gradients.per_tensor / gradients.dense, place=heights)
    look: dict[str, Any] = {"identity": False, "size": 10, "alpha": 0.6, "label": "pairs of gradients"}
    panels.scatter(ax, points, x="ratio", y="place", **look)
    exact = table.task.map((gradients.per_tensor_exact / gradients.dense_exact).groupby(gradients.task).median())
    ends = places - 0.35, places + 0.35
    ax.vlines(exact, *ends, color="black", linewidth=1.2, label="median, exact")
    ax.vlines(1 / table.tensors, *ends, color="black", linestyle=":", linewidth=1.2, label="1/L, equal norms")
    ax.axvline(1, color=panels.GREY, linestyle="--", linewidth=1, label="no gain")
    ax.set_xscale("log")
    sizes = zip(table.task, table.tensors, strict=True)
    ax.set_yticks(places, [f"{task}\n{number} tensors (L)" for task, number in sizes])
    ax.set_ylim(-0.6, len(table) - 0.4)
    ax.set_xlabel("variance of gᵀGg by a sketch, per tensor / dense")
