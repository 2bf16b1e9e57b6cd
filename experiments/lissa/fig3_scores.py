"""Fig. 3, computation: similarities of the sentences for one trained model, and LiSSA beside the exact ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from curvlab.curvature import GaussNewtonOperator, output_loss
from curvlab.data import TokenSplits
from curvlab.influence import directional_derivatives, per_example_gradients, similarities
from curvlab.linalg import identity
from curvlab.reporting import load_paper_numbers
from curvlab.runs import Run
from curvlab.solvers import DivergenceError, Lissa
from curvlab.spectrum import top_eigenvalues
from experiments.papers import FOLDER as PAPERS
from experiments.task import Task

VERSION = 1  # raise it when the meaning of a unit changes
SEQUENCES_AT_A_TIME = 8  # memory of a product is linear in it, its time is not


@dataclass(frozen=True)
class Measured:
    """What one trained model says about the sentences.

    Attributes:
        model_seed: of the trained model.
        num_parameters: P.
        num_sequences: that the curvature is the mean over.
        perplexity: on "train" and "test" text.
        sentence_perplexity: exp of the mean loss a token of the sentences.
        tokens_per_sentence: mean number.
        gradient: (20, 20) similarities.
        influence: (20, 20) similarities.
        influences: (20, 20), g_iᵀ (G + damping)⁻¹ g_j.
        largest_eigenvalue: of G.
        damping: absolute.
        residual: largest relative one.
        asymmetry: of the influences, 0 for exact solutions.
        num_matvecs: products with G.
    """

    model_seed: int
    num_parameters: int
    num_sequences: int
    perplexity: dict[str, float]
    sentence_perplexity: float
    tokens_per_sentence: float
    gradient: Tensor
    influence: Tensor
    influences: Tensor
    largest_eigenvalue: float
    damping: float
    residual: float
    asymmetry: float
    num_matvecs: int


@dataclass(frozen=True)
class LissaCheck:
    """LiSSA under one reading of the caption's step size, on a few sentences of the first model.

    Attributes:
        reading: "printed" (0.003 is the step size) or "code" (0.003 is step size times damping).
        scaled_step_size: step_size · lambda_max, the paper's.
        step_size: ours.
        num_steps: asked for.
        batch_size: sequences.
        diverged: whether it blew up.
        steps_done: when it was stopped, or all.
        pearson: correlation of its influences on all sentences with the exact ones; nan if it diverged.
        relative_error: of them.
    """

    reading: str
    scaled_step_size: float
    step_size: float
    num_steps: int
    batch_size: int
    diverged: bool
    steps_done: int
    pearson: float
    relative_error: float


def measure(run: Run, task: Task, cfg: DictConfig, sentences: list[str], perplexity: dict[str, float]) -> Measured:
    """Return the similarities of all sentences for one model, from the store if they are there."""
    key = task.key | {
        "sentences": sentences,
        "damping": cfg.damping,
        "damping_ratio": cfg.damping_ratio,
        "spectrum": OmegaConf.to_container(cfg.spectrum),
        "solver": OmegaConf.to_container(cfg.solver, resolve=True),
        "columns": cfg.columns,
        "version": VERSION,
    }
    stored = run.unit("lissa/fig3_similarity", key, partial(_measured, run, task, cfg, sentences))
    return Measured(
        model_seed=cfg.model_seed,
        num_parameters=task.num_parameters,
        num_sequences=task.num_train,
        perplexity=perplexity,
        **stored,
    )


def _measured(run: Run, task: Task, cfg: DictConfig, sentences: list[str]) -> dict[str, Any]:
    points = _points(task, sentences)
    op = GaussNewtonOperator(task.model, task.loss, task.train, batch_size=SEQUENCES_AT_A_TIME)
    generator = run.generator("lissa/fig3", cfg.model_seed)
    top = top_eigenvalues(op, rtol=cfg.spectrum.rtol, generator=generator)
    largest = float(top.values[0])
    damping = float(cfg.damping) if cfg.damping is not None else cfg.damping_ratio * largest
    found = similarities(
        task.model,
        task.loss,
        points,
        op + damping * identity,
        solver=instantiate(cfg.solver),
        columns=cfg.columns,
        generator=generator,
    )
    run.add_matvecs(top.num_matvecs + found.num_matvecs)
    counts = (points[1] != -100).sum(1)
    with torch.no_grad():
        own = output_loss(task.loss).own_loss
        inputs = {name: value.to(run.device) for name, value in points[0].items()}
        losses = own(task.model(**inputs).logits, points[1].to(run.device)).cpu()
    return {
        "sentence_perplexity": math.exp(float((losses * counts).sum() / counts.sum())),
        "tokens_per_sentence": float(counts.double().mean()),
        "gradient": found.gradient,
        "influence": found.influence,
        "influences": found.influences,
        "largest_eigenvalue": largest,
        "damping": damping,
        "residual": float(found.residual.max()),
        "asymmetry": found.asymmetry,
        "num_matvecs": found.num_matvecs,
    }


def check_lissa(run: Run, task: Task, cfg: DictConfig, sentences: list[str], exact: Measured) -> list[LissaCheck]:
    """Run LiSSA with the caption's settings at our scale, under both readings of its step size."""
    paper = load_paper_numbers("lissa", folder=PAPERS)
    step_size, damping = (paper.get("Fig. 3", "all", name).value for name in ("step_size", "damping"))
    largest = paper.get("Table 1", "OPT", "lambda_max").value
    checks = []
    readings = {"code": step_size / damping * largest, "printed": step_size * largest}
    for reading in cfg.lissa_check.readings:
        scaled = readings[reading]
        setting: dict[str, Any] = {
            "scaled_step_size": scaled,
            "step_size": scaled / exact.largest_eigenvalue,
            "num_steps": int(cfg.lissa_check.num_steps),
            "batch_size": int(cfg.lissa_check.batch_size),
        }
        key = (
            task.key | setting | {"sentences": sentences, "number": cfg.lissa_check.sentences, "version": VERSION}
        )
        key |= {"damping": exact.damping}
        found = run.unit(
            "lissa/fig3_lissa",
            key,
            partial(_lissa, run, task, sentences[: cfg.lissa_check.sentences], sentences, exact, setting),
        )
        checks.append(LissaCheck(reading=reading, **setting, **found))
    return checks


def _lissa(  # noqa: PLR0917
    run: Run, task: Task, chosen: list[str], sentences: list[str], exact: Measured, setting: dict[str, Any]
) -> dict[str, Any]:
    op = GaussNewtonOperator(task.model, task.loss, task.train, batch_size=SEQUENCES_AT_A_TIME)
    b = per_example_gradients(task.model, task.loss, _points(task, chosen)).T
    steps_done = 0
    bar = run.progress(setting["num_steps"], "LiSSA")

    def count(step: int, iterate: Tensor) -> None:
        nonlocal steps_done
        steps_done = step
        bar.update()

    solver = Lissa(
        setting["step_size"],
        setting["batch_size"],
        setting["num_steps"],
        check_residual=False,
        callback=count,
    )
    outcome: dict[str, Any] = {"diverged": False, "pearson": math.nan, "relative_error": math.nan}
    try:
        solution = solver.solve(op + exact.damping * identity, b, generator=run.generator("lissa/fig3", "LiSSA"))
        scores = directional_derivatives(
            task.model, task.loss, _points(task, sentences), solution.x, batch_size=32
        )
        ours, reference = scores.double().cpu(), exact.influences[:, : len(chosen)]
        outcome["pearson"] = float(np.corrcoef(ours.flatten(), reference.flatten())[0, 1])
        outcome["relative_error"] = float((ours - reference).norm() / reference.norm())
    except DivergenceError:
        outcome["diverged"] = True
    bar.close()
    run.add_matvecs(steps_done * b.shape[1])
    return outcome | {"steps_done": steps_done}


def _points(task: Task, sentences: list[str]) -> tuple[dict[str, Tensor], Tensor]:
    assert isinstance(task.splits, TokenSplits)
    return task.splits.sentences(sentences)
