"""All tables of the target: approximation, exact statements, theory, cost."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from curvlab.lab import Run, task_settings
from curvlab.lab.data import DataSplits
from experiments.ginger.cost.approximation import ERRORS, approximation_errors
from experiments.ginger.cost.convergence import SoftmaxRegression, follow, theorem_1
from experiments.ginger.cost.counted import beside_the_paper, counted_steps
from experiments.ginger.cost.eigenvalues import eigenvalue_bounds
from experiments.ginger.cost.exactness import exact_statements, precision_errors
from experiments.ginger.cost.scaling import fits, scaling_table
from experiments.ginger.cost.stream import Stream, gradient_stream
from experiments.ginger.cost.training_steps import step_table

GAUSSIANS = (20, 30)  # of the stream beside the real ones: updates, parameters


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return the tables that the target's docstring names.

    Args:
        run: seeds, store, device.
        cfg: see conf/ginger/cost/target.yaml.
    """
    streams = [
        gradient_stream(run, name, settings, seed)
        for name, settings in task_settings(cfg).items()
        for seed in run.progress(settings.seeds, f"gradients of {name}")
    ]
    first = [stream for stream in streams if stream.seed == cfg.seeds[0]]
    table = _approximation(run, cfg, streams)
    descents, convergence = _theory(run, cfg)
    scaling = scaling_table(run, cfg.scaling)
    run.note(seeds=list(cfg.seeds))
    return {
        "table": table,
        "summary": summary_table(table),
        "exact": _exact(run, cfg, first),
        "precision": _precision(run, cfg, streams),
        "eigenvalues": _eigenvalues(run, cfg),
        "descent": descents,
        "convergence": convergence,
        "flops": _flops(run, cfg),
        "steps": step_table(run, cfg.steps),
        "scaling": scaling,
        "fits": fits(scaling),
    }


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True)


def _approximation(run: Run, cfg: DictConfig, streams: Sequence[Stream]) -> pd.DataFrame:
    parts: list[dict[str, Any]] = []
    cells = [(stream, decay, rank) for stream in streams for decay in cfg.decays for rank in cfg.ranks]
    for stream, decay, rank in run.progress(cells, "approximation"):
        settings = {"decay": decay, "rank": rank, "dampings": list(cfg.dampings)}
        compute = partial(_rows_of, approximation_errors, stream, **settings)
        found = run.unit(
            "ginger/approximation",
            {"stream": stream.key, **settings},
            compute,
            version=1,
            about=f"errors on {stream.name}, seed {stream.seed}: α = {decay:g}, τ = {rank}",
        )
        place = {"task": stream.name, "seed": stream.seed, "num_parameters": stream.num_parameters}
        parts += [place | {"decay": decay, "rank": rank} | row for row in found["rows"]]
    return pd.DataFrame(parts)


def _rows_of(function: Any, *args: Any, **settings: Any) -> dict[str, Any]:
    return {"rows": function(*args, **settings)}


def summary_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each task, decay, rank, optimizer and target: means over the seeds of all errors."""
    by = ["task", "decay", "rank", "target", "damping", "optimizer"]
    means = table.groupby(by, sort=False)[ERRORS].mean()
    return means.assign(seeds=table.groupby(by, sort=False).seed.nunique()).reset_index()


def _exact(run: Run, cfg: DictConfig, streams: Sequence[Stream]) -> pd.DataFrame:
    cases = [(stream.name, stream.key, stream.sampled, stream.losses[-1], cfg.decays) for stream in streams]
    generator = run.generator("gaussians")
    gaussians = torch.randn(GAUSSIANS[0] + 1, GAUSSIANS[1], dtype=torch.float64, generator=generator)
    key = {"gaussians": list(GAUSSIANS), "generator": "gaussians"}
    cases.append(("gaussians", key, gaussians[:-1], gaussians[-1], [cfg.gaussian_decay]))
    rows: list[dict[str, Any]] = []
    for name, key, vectors, gradient, decays in cases:
        for decay in decays:
            settings: dict[str, Any] = {"decay": decay, "num": cfg.exact.num_updates}
            settings |= {"dampings": list(cfg.exact.dampings), "ranks": list(cfg.exact.ranks)}
            compute = partial(_rows_of, exact_statements, vectors, gradient, **settings)
            found = run.unit(
                "ginger/exact",
                {"stream": key, **settings},
                compute,
                version=1,
                about=f"exact statements on {name}, α = {decay:g}",
            )
            rows += [{"stream": name} | row for row in found["rows"]]
    return pd.DataFrame(rows)


def _precision(run: Run, cfg: DictConfig, streams: Sequence[Stream]) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []
    for stream in streams:
        for damping in cfg.exact.precision_dampings:
            settings = {"decay": cfg.decays[-1], "damping": damping, "rank": cfg.exact.precision_rank}
            compute = partial(precision_errors, stream.sampled, stream.losses[-1], **settings)
            found = run.unit(
                "ginger/precision",
                {"stream": stream.key, **settings},
                compute,
                version=1,
                about=f"single precision on {stream.name}, seed {stream.seed}, γ = {damping:g}",
            )
            rows.append({"stream": stream.name, "seed": stream.seed, **settings, **found})
    return pd.DataFrame(rows)


def _eigenvalues(run: Run, cfg: DictConfig) -> pd.DataFrame:
    splits: DataSplits = instantiate(cfg.theory.data)
    run.record_data(splits.name, splits.checksum)
    rows: list[dict[str, Any]] = []
    for changes in cfg.lemma_1.dampings:
        settings = OmegaConf.merge(cfg.lemma_1, {"ginger": changes})
        key = {"data": splits.checksum, "settings": _plain(settings)}
        compute = partial(_rows_of, eigenvalue_bounds, run, splits, settings)
        about = f"Lemma 1, γ = {settings.ginger.damping:g}"
        rows += run.unit("ginger/eigenvalues", key, compute, version=1, about=about)["rows"]
    return pd.DataFrame(rows)


def _theory(run: Run, cfg: DictConfig) -> tuple[pd.DataFrame, pd.DataFrame]:
    splits: DataSplits = instantiate(cfg.theory.data)
    run.record_data(splits.name, splits.checksum)
    problem = SoftmaxRegression.of(splits)
    descents: list[dict[str, Any]] = []
    convergence: list[dict[str, Any]] = []
    for damping in cfg.theory.dampings:
        for seed in run.progress(cfg.theory.seeds, "softmax regression"):
            key = {"data": splits.checksum, "theory": _plain(cfg.theory), "damping": damping, "repeat": seed}
            compute = partial(_followed, run, problem, cfg.theory, damping, seed)
            about = f"softmax regression, γ = {damping:g}, seed {seed}"
            found = run.unit("ginger/convergence", key, compute, version=1, about=about)
            place = {"damping": damping, "seed": seed}
            descents += [place | row for row in found["descents"]]
            convergence += [place | row for row in found["convergence"]]
    return pd.DataFrame(descents), pd.DataFrame(convergence)


def _followed(
    run: Run, problem: SoftmaxRegression, theory: DictConfig, damping: float, seed: int
) -> dict[str, Any]:
    path = follow(
        problem,
        lr=theory.lr * damping,
        num_steps=theory.num_steps[-1],
        checkpoints=list(theory.checkpoints),
        generator=run.generator("softmax regression", seed),
        rank=theory.rank,
        decay=theory.decay,
        damping=damping,
    )
    rows = theorem_1(problem, path, damping, list(theory.num_steps))
    return {"descents": path.descents, "convergence": rows}


def _flops(run: Run, cfg: DictConfig) -> pd.DataFrame:
    settings = {"batch_size": cfg.flops.batch_size, "ranks": list(cfg.flops.ranks)}
    compute = partial(_rows_of, counted_steps, **settings)
    found = run.unit("ginger/flops", settings, compute, version=1, about="operations of Table 1's networks")
    return beside_the_paper(pd.DataFrame(found["rows"]))
