"""Fig. 3: similarities of the sentences for every trained model, and LiSSA beside the exact ones."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from curvlab.curvature import GaussNewtonOperator
from curvlab.influence import directional_derivatives, per_example_gradients, similarities
from curvlab.lab import ConfigurationError, Run, load_paper_numbers, task_settings
from curvlab.lab.data import TokenSplits
from curvlab.linalg import identity
from curvlab.problem import output_loss
from curvlab.solvers import DivergenceError, Lissa
from curvlab.solvers.lissa import LissaState
from curvlab.spectrum import top_eigenvalues
from experiments.lissa.fig3.statistics import pair_table, retrieval_table, square_table
from experiments.papers import FOLDER as PAPERS
from experiments.shared.task import Task, TrainedTask

SENTENCES = PAPERS / "lissa" / "sentences.csv"
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
        found = _similarities(run, task, own, sentences.text.tolist())
        pairs[seed] = pair_table(found["gradient"], found["influence"], sentences)
        summary.append({"model_seed": seed} | _summary(task, found, task.perplexities))
        if not lissa and settings.lissa_check is not None:
            lissa = _check_lissa(run, task, settings.lissa_check, sentences.text.tolist(), found)
    run.note(seeds=list(settings.model_seeds))
    table = pd.concat(pairs, names=["model_seed"]).reset_index("model_seed").reset_index(drop=True)
    tables = {
        "table": table,
        "squares": square_table(table),
        "retrieval": retrieval_table(table),
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


def _similarities(run: Run, task: TrainedTask, settings: DictConfig, sentences: list[str]) -> dict[str, Any]:
    """Return the similarities of all sentences for one model, from the store if they are there.

    gradient, influence: (20, 20) cosines; influences: (20, 20), g_iᵀ (G + damping)⁻¹ g_j; and what `_summary`
    shows.
    """
    key = task.key | {
        "sentences": sentences,
        "damping": settings.damping,
        "damping_ratio": settings.damping_ratio,
        "spectrum": OmegaConf.to_container(settings.spectrum),
        "solver": OmegaConf.to_container(settings.solver, resolve=True),
        "columns": settings.columns,
    }
    about = f"similarities of {task.label}, model seed {settings.model_seed}"
    measure = partial(_measured, run, task, settings, sentences)
    return run.unit("lissa/fig3_similarity", key, measure, version=1, about=about)


def _measured(run: Run, task: TrainedTask, settings: DictConfig, sentences: list[str]) -> dict[str, Any]:
    points = _points(task, sentences)
    op = GaussNewtonOperator(task.model, task.loss, task.train, batch_size=SEQUENCES_AT_A_TIME)
    generator = run.generator("lissa/fig3", settings.model_seed)
    lambda_max, num_matvecs = math.nan, 0  # where nothing asks for it: a basis of a large model is dear
    if settings.damping is None or settings.lissa_check is not None:
        top = top_eigenvalues(op, rtol=settings.spectrum.rtol, generator=generator)
        lambda_max, num_matvecs = float(top.values[0]), top.num_matvecs
    damping = settings.damping_ratio * lambda_max if settings.damping is None else float(settings.damping)
    found = similarities(
        task.model,
        task.loss,
        points,
        op + damping * identity,
        solver=instantiate(settings.solver),
        columns=settings.columns,
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
    run: Run, task: TrainedTask, settings: DictConfig, sentences: list[str], exact: dict[str, Any]
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
    chosen, rows = sentences[: settings.sentences], []
    for reading in settings.readings:
        setting = {
            "scaled_step_size": scaled[reading],
            "step_size": scaled[reading] / exact["lambda_max"],
            "num_steps": int(settings.num_steps),
            "batch_size": int(settings.batch_size),
        }
        key = task.key | setting | {"sentences": sentences, "number": len(chosen), "damping": exact["damping"]}
        measure = partial(_lissa, run, task, sentences, len(chosen), exact, setting)
        about = f"LiSSA {task.label}, step size as {reading}"
        found = run.unit("lissa/fig3_lissa", key, measure, version=1, about=about)
        rows.append({"reading": reading} | setting | found)
    return rows


def _lissa(  # noqa: PLR0917
    run: Run,
    task: TrainedTask,
    sentences: list[str],
    num_chosen: int,
    exact: dict[str, Any],
    setting: dict[str, Any],
) -> dict[str, Any]:
    op = GaussNewtonOperator(task.model, task.loss, task.train, batch_size=SEQUENCES_AT_A_TIME)
    b = per_example_gradients(task.model, task.loss, _points(task, sentences[:num_chosen])).T
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
        solution = solver.solve(
            op + exact["damping"] * identity, b, generator=run.generator("lissa/fig3", "LiSSA")
        )
        scores = directional_derivatives(
            task.model, task.loss, _points(task, sentences), solution.x, batch_size=32
        )
        ours, reference = scores.double().cpu(), exact["influences"][:, :num_chosen]
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
