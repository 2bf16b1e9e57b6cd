"""Similarity of 20 sentences by gradients and by influence (Klochkov & Liu 2024, Sec. 5, Fig. 3, App. A).

make lissa-fig3 PRESET=smoke|embedded|laptop|paper ARGS="damping_ratio=0.05 model_seeds=[0,1,2,3]"

Ten facts, each written twice (experiments/papers/lissa/sentences.csv). For several trained models: the cosines of
the gradients of the sentences' losses, the same through (G + damping)⁻¹, and their difference, with the means of
its 10 × 10 squares; then how well each of them picks a sentence's other wording out of ten.

Where we differ from the paper: models trained here; `damping` is the paper's share of lambda_max, 5 / 780;
the systems are solved by block CG to a residual of `solver.rtol`, and LiSSA, with the paper's settings at our
scale (step_size · lambda_max, steps, sequences in a batch), is compared with that on `lissa_check.sentences` of
them. Of the caption's step size 0.003 two readings are run: as printed it is 2.3 / lambda_max, above
2 / lambda_max; as the `lr` of the authors' code, which is step size times damping (for damping > 1), it is 6e-4 =
0.47 / lambda_max.

Beside both stands the share of words that two sentences have in common, which needs no model.

The caption calls the right heat map "the difference between the former and the latter" (influence, gradient), the
text says that its values are positive because gradient similarity is higher: it is gradient - influence.
The squares' standard errors treat their 100 values as independent, as the paper does; 20 sentences are fewer, so
intervals of claims are over trained models, or over facts (jackknife) where there is one model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from hydra.utils import instantiate
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike
from omegaconf import DictConfig, OmegaConf
from scipy import stats
from torch import Tensor

from curvlab.curvature import GaussNewtonOperator
from curvlab.influence import directional_derivatives, per_example_gradients, similarities
from curvlab.lab import (
    Computed,
    ConfigurationError,
    Run,
    Target,
    load_paper_numbers,
    panels,
    plots,
    task_settings,
    unit,
)
from curvlab.lab.claims import Claim, ClaimResult, ClaimSheet, out_of_reach
from curvlab.lab.claims import judge as judge_claim
from curvlab.lab.claims.intervals import Interval, exact, t_interval
from curvlab.lab.data import TokenSplits
from curvlab.linalg import identity
from curvlab.problem import output_loss
from curvlab.solvers import DivergenceError, Lissa
from curvlab.solvers.lissa import LissaState
from curvlab.spectrum import top_eigenvalues
from experiments.lissa import sentence_similarity
from experiments.papers import FOLDER as PAPERS
from experiments.shared.task import Task, TrainedTask

TARGET = Target(
    __name__,
    title="Similarity of sentences by gradient and influence",
    paper={
        "tasks": "OPT 1.3B",
        "summary.csv:num_parameters": 1.3e9,
        "model_seeds": "one published model",
        "damping_ratio": "5 / 780",
        "summary.csv:damping": 5.0,
        "sequence_length": 512,
        "summary.csv:num_sequences": "4 in each of 1,000 steps",
        "solver._target_": "LiSSA",
    },
)


SENTENCES = PAPERS / "lissa" / "sentences.csv"
MEASURED_BY = ("damping", "damping_ratio", "spectrum", "solver", "columns")  # settings of the similarities
SEQUENCES_AT_A_TIME = 8  # memory of a product is linear in it, its time is not


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return the similarities of all pairs of sentences (`table`), and what follows from them.

    `squares`, `retrieval`: see `square_table` and `retrieval_table`. `summary`: one row for each trained model.
    `lissa`: one row for each reading of the caption's step size, see `_check_lissa`; only with `lissa_check`.

    Args:
        run: seeds, store, device.
        cfg: one task, `model_seeds`, `damping` (null: `damping_ratio` times the measured lambda_max), `spectrum`,
            `solver`, `columns`, `lissa_check`.
    """
    tasks = task_settings(cfg)
    if len(tasks) != 1:
        raise ConfigurationError(f"one language model at a time, got {', '.join(tasks)}; add task=NAME.")
    ((name, settings),) = tasks.items()
    sentences = pd.read_csv(SENTENCES)
    pairs, summary = {}, []
    lissa: list[dict[str, Any]] = []
    for seed in settings.model_seeds:
        own = OmegaConf.merge(settings, {"model_seed": seed})
        assert isinstance(own, DictConfig)
        task = Task.load(run, name, own).trained()
        found = _similarities(task, sentences=sentences.text.tolist(), **{name: own[name] for name in MEASURED_BY})
        pairs[seed] = sentence_similarity.pair_table(found["gradient"], found["influence"], sentences)
        summary.append({"model_seed": seed} | _summary(task, found, task.perplexities))
        if not lissa and settings.lissa_check is not None:
            lissa = _check_lissa(task, settings.lissa_check, sentences.text.tolist(), found)
    run.note(seeds=list(settings.model_seeds))
    table = pd.concat(pairs, names=["model_seed"]).reset_index("model_seed").reset_index(drop=True)
    tables = {
        "table": table,
        "squares": sentence_similarity.square_table(table),
        "retrieval": sentence_similarity.retrieval_table(table),
        "summary": pd.DataFrame(summary),
    }
    return tables | ({"lissa": pd.DataFrame(lissa)} if lissa else {})


def _summary(task: TrainedTask, found: dict[str, Any], perplexity: dict[str, float]) -> dict[str, Any]:
    """Return the row of a model; `largest_residual` is relative, `asymmetry` would be 0 for exact solutions."""
    return {
        "num_parameters": task.num_parameters,
        "num_sequences": task.num_train,
        "perplexity_train": perplexity["train"],
        "perplexity_test": perplexity["test"],
        **{
            column: found[column]
            for column in (
                "perplexity_sentences",
                "tokens_per_sentence",
                "lambda_max",
                "damping",
                "largest_residual",
                "asymmetry",
                "num_matvecs",
            )
        },
    }


@unit("lissa/fig3_similarity", version=1, about="similarities by {seed_name}, model seed {model_seed}")
def _similarities(
    task: TrainedTask, /, *, sentences: list[str], damping: float | None, damping_ratio: float, **how: Any
) -> dict[str, Any]:
    """Return the similarities of all sentences for one model.

    gradient, influence: (20, 20) cosines; influences: (20, 20), g_iᵀ (G + damping)⁻¹ g_j; and what `_summary`
    shows.
    """
    run = task.run
    points = _points(task, sentences)
    op = GaussNewtonOperator(task.model, task.loss, task.train, batch_size=SEQUENCES_AT_A_TIME)
    generator = run.generator("lissa/fig3", task.settings.model_seed)
    lambda_max, num_matvecs = math.nan, 0  # where nothing asks for it: a basis of a large model is dear
    if damping is None or task.settings.lissa_check is not None:
        top = top_eigenvalues(op, rtol=how["spectrum"].rtol, generator=generator)
        lambda_max, num_matvecs = float(top.values[0]), top.num_matvecs
    damping = damping_ratio * lambda_max if damping is None else float(damping)
    found = similarities(
        task.model,
        task.loss,
        points,
        op + damping * identity,
        solver=instantiate(how["solver"]),
        columns=how["columns"],
        generator=generator,
    )
    run.add_matvecs(num_matvecs + found.num_matvecs)
    counts = (points[1] != -100).sum(1)
    with torch.no_grad():
        own = output_loss(task.loss).own_loss
        inputs = {name: value.to(run.device) for name, value in points[0].items()}
        losses = own(task.model(**inputs).logits, points[1].to(run.device)).cpu()
    return {
        "perplexity_sentences": math.exp(float((losses * counts).sum() / counts.sum())),
        "tokens_per_sentence": float(counts.double().mean()),
        "gradient": found.gradient,
        "influence": found.influence,
        "influences": found.influences,
        "lambda_max": lambda_max,
        "damping": damping,
        "largest_residual": float(found.residual.max()),
        "asymmetry": found.asymmetry,
        "num_matvecs": found.num_matvecs,
    }


def _check_lissa(
    task: TrainedTask, settings: DictConfig, sentences: list[str], exact: dict[str, Any]
) -> list[dict[str, Any]]:
    """Run LiSSA with the caption's settings at our scale, under both readings of its step size.

    scaled_step_size: step_size · lambda_max, the paper's; step_size: ours; batch_size: in sequences; steps_done:
    when it was stopped, or all; pearson, relative_error: of its influences on all sentences with the exact ones,
    nan if it diverged.
    """
    paper = load_paper_numbers("lissa", folder=PAPERS)
    step_size, damping = (paper.get("Fig. 3", "all", name).value for name in ("step_size", "damping"))
    lambda_max = paper.get("Table 1", "OPT", "lambda_max").value
    scaled = {"printed": step_size * lambda_max, "code": step_size / damping * lambda_max}
    number, rows = min(settings.sentences, len(sentences)), []
    for reading in settings.readings:
        setting = {
            "scaled_step_size": scaled[reading],
            "step_size": scaled[reading] / exact["lambda_max"],
            "num_steps": int(settings.num_steps),
            "batch_size": int(settings.batch_size),
        }
        what = {"sentences": sentences, "number": number, "damping": exact["damping"]}
        found = _lissa(task, exact["influences"], **what, **setting)
        rows.append({"reading": reading} | setting | found)
    return rows


@unit("lissa/fig3_lissa", version=1, about="LiSSA, {seed_name}, {num_steps} steps of {step_size:.3g}")
def _lissa(
    task: TrainedTask, influences: Tensor, /, *, sentences: list[str], number: int, damping: float, **setting: Any
) -> dict[str, Any]:
    run = task.run
    op = GaussNewtonOperator(task.model, task.loss, task.train, batch_size=SEQUENCES_AT_A_TIME)
    b = per_example_gradients(task.model, task.loss, _points(task, sentences[:number])).T
    steps_done = 0
    bar = run.progress(setting["num_steps"], "LiSSA")

    def count(state: LissaState) -> None:
        nonlocal steps_done
        steps_done = state.num_steps
        bar.update()

    solver = Lissa(
        setting["step_size"], setting["batch_size"], setting["num_steps"], check_residual=False, callback=count
    )
    outcome: dict[str, Any] = {"diverged": False, "pearson": math.nan, "relative_error": math.nan}
    try:
        solution = solver.solve(op + damping * identity, b, generator=run.generator("lissa/fig3", "LiSSA"))
        scores = directional_derivatives(
            task.model, task.loss, _points(task, sentences), solution.x, batch_size=32
        )
        ours, reference = scores.double().cpu(), influences[:, :number]
        outcome["pearson"] = float(np.corrcoef(ours.flatten(), reference.flatten())[0, 1])
        outcome["relative_error"] = float((ours - reference).norm() / reference.norm())
    except DivergenceError:
        outcome["diverged"] = True
    bar.close()
    run.add_matvecs(steps_done * b.shape[1])
    return outcome | {"steps_done": steps_done}


def _points(task: TrainedTask, sentences: list[str]) -> tuple[dict[str, Tensor], Tensor]:
    assert isinstance(task.splits, TokenSplits)
    return task.splits.sentences(sentences)


# ------------------------------------------------------------------------------------ judge
MIN_MODELS = 3
READINGS = {"printed": "the step size", "code": "the code's lr, step size times damping"}


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every claim: over trained models, with fewer than three of them over facts."""
    table, retrieval, results = computed["table"], computed["retrieval"], []
    apart = sentence_similarity.unrelated(table).groupby("model_seed")[["gradient", "influence"]].mean()
    means = f"Mean similarity of unrelated sentences by model: {_listed(apart, 3)}."
    for name, statistic in (
        ("unrelated-lower", sentence_similarity.mean_difference),
        ("mostly-positive", sentence_similarity.positive_share),
    ):
        by_model = [statistic(own) for _, own in table.groupby("model_seed")]
        results.append(_judge(claims.claim(name), by_model, partial(_jackknife, table, statistic), why=means))
    influence = retrieval[retrieval.method == "influence"]
    ranks = ", ".join(
        f"{rank} ({count} times)" for rank, count in influence["rank"].value_counts().sort_index().items()
    )
    pairs = margins(retrieval)
    own = f"Mean margins by model: {_listed(pairs.groupby('model_seed')[['gradient', 'influence']].mean(), 1)}."
    lexical = f"Mean margins: influence {pairs.influence.mean():.1f}, shared words {pairs.words.mean():.1f}."
    for name, rows, why in (
        ("paraphrase-stands-out", influence.assign(value=influence["rank"] == 1), f"Ranks of ten: {ranks}."),
        ("stands-out-more", pairs.assign(value=pairs.influence - pairs.gradient), own),
        ("above-shared-words", pairs.assign(value=pairs.influence - pairs.words), lexical),
    ):
        # Over facts, both directions of each are averaged: they share their sentences.
        values = rows.value.astype(float)
        by_fact = partial(t_interval, values.groupby(rows.fact).mean(), unit="facts")
        results.append(_judge(claims.claim(name), values.groupby(rows.model_seed).mean(), by_fact, why=why))
    return [*results, *(_step_size(claims, computed.get("lissa"), reading) for reading in READINGS)]


def margins(retrieval: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each model, direction and fact, with the margin by method and by `words` as columns."""
    places = ["model_seed", "direction", "fact"]
    found = retrieval.pivot_table(index=places, columns="method", values="margin").reset_index()
    words = pd.DataFrame(
        sentence_similarity.retrieved(sentence_similarity.shared_words(pd.read_csv(SENTENCES).text.tolist()))
    )
    return found.merge(words.rename(columns={"margin": "words"})[["direction", "fact", "words"]])


def _judge(claim: Claim, by_model: ArrayLike, over_facts: Callable[[], Interval], *, why: str) -> ClaimResult:
    values = np.asarray(by_model, dtype=float)
    interval = t_interval(values, unit="models") if len(values) >= MIN_MODELS else over_facts()
    return judge_claim(claim, float(values.mean()), interval, if_not_reproduced=why)


def _jackknife(table: pd.DataFrame, statistic: Callable[[pd.DataFrame], float]) -> Interval:
    stderr, count = sentence_similarity.jackknife_facts(table, statistic)
    half, value = stats.t.ppf(0.975, count - 1) * stderr, statistic(table)
    return Interval(value - half, value + half, f"jackknife 95 %, {count} facts", count)


def _listed(means: pd.DataFrame, digits: int) -> str:
    lines = zip(means.index, means.gradient, means.influence, strict=True)
    return "; ".join(
        f"{seed}: gradient {own:.{digits}f}, influence {other:.{digits}f}" for seed, own, other in lines
    )


def _step_size(claims: ClaimSheet, lissa: pd.DataFrame | None, reading: str) -> ClaimResult:
    claim = claims.claim("step-size", of=reading, meaning=READINGS[reading])
    if lissa is None or reading not in set(lissa.reading):
        return out_of_reach(claim, "This preset does not run LiSSA beside the exact solution with these settings.")
    own = lissa[lissa.reading == reading]
    row = own.iloc[0]
    reason = (
        f"step_size · lambda_max is {row.scaled_step_size:.2f}, and LiSSA needs less than 2: it diverged, noticed "
        f"after step {row.steps_done}."
        if row.diverged
        else f"After {row.steps_done} steps the relative error is {row.relative_error:.2f}."
    )
    values = own.pearson.where(~own.diverged, 0.0)
    interval = t_interval(values, unit="orders")
    if row.diverged and row.scaled_step_size > 2:  # the mean of LiSSA diverges, whatever the batches
        interval = exact(0.0, kind="deterministic: step size times lambda_max is above 2")
    return judge_claim(claim, float(values.mean()), interval, if_not_reproduced=reason)


# ------------------------------------------------------------------------------------ draw
PANELS = ("influence", "gradient", "difference")  # as in the paper, from left to right
TITLES = {
    "influence": "influence similarity",
    "gradient": "gradient similarity",
    "difference": "gradient - influence",
}


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the paper's three heat maps, one row of them for each model; and the margins."""
    table = computed["table"]
    return {
        "figure.png": _heat_maps(table, computed["squares"]),
        "figure_more.png": _margins(table, computed["retrieval"]),
    }


def _heat_maps(table: pd.DataFrame, squares: pd.DataFrame) -> Figure:
    """Draw the paper's maps of the first model, and what they differ by."""
    seed = table.model_seed.min()
    figure, axes = plots.figure(1, 3, panel_size=(2.66, 3.6))
    maps = sentence_similarity.matrices(table, seed)
    maps["difference"] = maps["gradient"] - maps["influence"]
    apart = ~np.kron(np.ones((2, 2)), np.eye(10)).astype(bool)
    limit = float(np.abs(maps["difference"][apart]).max())
    for ax, name in zip(axes[0], PANELS, strict=True):
        scale = (-limit, limit) if name == "difference" else (-1.0, 1.0)
        image = ax.imshow(maps[name], cmap="RdBu_r", vmin=scale[0], vmax=scale[1], interpolation="nearest")
        ends = "both" if name == "difference" else "neither"
        figure.colorbar(
            image, ax=ax, location="bottom", shrink=0.7, extend=ends, ticks=[scale[0], 0, scale[1]], format="%.2g"
        )
        ax.set_title(TITLES[name])
        _frame(ax)
        own = squares[(squares.model_seed == seed) & (squares["heat_map"] == name)]
        cells = own.set_index(["rows", "columns"])
        kinds = sentence_similarity.KINDS
        told = [
            [f"{cells['mean'][row, column]:.3f} ± {cells.stderr[row, column]:.3f}" for column in kinds]
            for row in kinds
        ]
        ax.set_xlabel("\n".join("    ".join(each) for each in told), fontsize=8.5)
    number, mean = table.model_seed.nunique(), sentence_similarity.mean_difference(table)
    note = (
        "a model's 20 sentences in the order of the paper's App. A; below: each quarter's mean ± standard error\n"
    )
    note += f"gradient - influence over the pairs of different facts, mean over {number} such models: {mean:.3f}"
    figure.supxlabel(note, fontsize=8.5)
    return figure


def _frame(ax: Axes) -> None:
    ax.grid(False)
    ax.axhline(9.5, color="black", linewidth=0.8)
    ax.axvline(9.5, color="black", linewidth=0.8)
    ax.set_xticks([4.5, 14.5], ["original", "paraphrased"])
    ax.set_yticks([4.5, 14.5], ["original", "paraphrased"], rotation=90, va="center")
    ax.tick_params(length=0)


def _margins(table: pd.DataFrame, retrieval: pd.DataFrame) -> Figure:
    """Draw similarities of the same fact beside those of different facts, and the margins of the former."""
    figure, axes = plots.figure(1, 2, panel_size=(4.6, 3.4))
    left, right = axes[0]
    across = table[table.first_kind != table.second_kind]
    same, looks = across.first_fact == across.second_fact, panels.styles_of(sentence_similarity.METHODS)
    bins = np.linspace(-0.3, 1.0, 53).tolist()
    for method in sentence_similarity.METHODS:
        for facts, name, line in ((~same, "different facts", "-"), (same, "same fact", "--")):
            own = across[facts]
            label = f"{method}, {name} {own[method].mean():.3f}"
            panels.histogram(
                left, own, value=method, bins=bins, label=label, styles={label: looks[method]}, linestyle=line
            )
    left.set_ylim(top=1.5 * left.get_ylim()[1])  # room for the legend
    left.legend(fontsize=7, frameon=False, title="mean", title_fontsize=7, loc="upper right")
    panels.frame(left, x="similarity of an original and a paraphrased sentence", y="density over pairs and models")
    pairs = margins(retrieval).assign(model=lambda own: "model " + own.model_seed.astype(str))
    panels.scatter(right, pairs, x="gradient", y="influence", by="model")
    panels.rule(right, y=pairs.words.mean(), label="shared words, mean")
    top = (retrieval["rank"] == 1).groupby(retrieval.method).mean()
    right.set_xlabel(f"margin by gradient (standard deviations); top-1 {top['gradient']:.0%}")
    right.set_ylabel(f"margin by influence; top-1 {top['influence']:.0%}")
    right.set_title("other wording over nine unrelated sentences")
    right.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3)
    return figure
