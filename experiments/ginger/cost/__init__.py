"""Cost and exactness of Ginger and QNG (Ginger 2024, Sec. 2, 3; the FLOPs and memory of Table 1).

make ginger-cost PRESET=smoke|embedded|laptop|paper ARGS="ranks=[1,8] stream.batch_size=128"

The gradients are those of labels sampled along a training run of SGD, recorded once for each seed: both
optimizers, their own targets and the common one see the same. `table` has the errors of both, each holding τ
vectors, against

- the common target α^τ I + G_t, G_t the moving average from 0: what Ginger with γ = α^τ approximates, and what
  QNG has beside its low-rank part after τ updates; this is the comparison at equal memory;
- their own: γI + G_t for Ginger, α^t I + G_t (Eq. 7 from G_0 = I) for QNG.

`exact` checks what the paper states without exception: Eq. 10, the optimality of the cut, Observation 1 (the
rank is τ, not 2τ), and the two misprints: Algorithm 1's α-factors do not fit each other, and the β_t of QNG
reduces to 1 - α. `precision` compares keeping the inverse, as the paper has it, with keeping the matrix, in
single precision: without rounding they are the same, because κ = σ/(γ(γ + σ)) is monotone in σ. `eigenvalues`
is Lemma 1 along a training by Ginger; `descent` and `convergence` are Lemma 2 and Theorem 1 on softmax
regression, with L and M_g in closed form. The proof of Lemma 2 takes the matrix to be independent of the step's
example, which Algorithm 1's order of updates does not give where one batch serves both; it is checked as it is
proved.

`flops` counts products of matrices and convolutions on the networks of Table 1 (CIFAR stem, one batch of 128):
2 for each multiply-add, nothing elementwise. The forward pass is shared (train mode, BatchNorm by the batch's
statistics, both gradients through it) or the sampled labels' own (eval mode, as in the published code). The
paper's column, from JAX's profiler, cannot be that: its 2.21e9 is less than one example's gradient (3.3e9), and
it grows by 5.1 from ResNet-18 to ResNet-50, where products grow by 2.3 and the entries of activations by 5.6.
An inference: XLA's count leaves out calls to cuDNN and cuBLAS, so the column is of elementwise operations. That
would also be why it grows linearly in τ although the text says quadratically; the column of T5 (Table 2, all
weights) does grow quadratically, by 2d for each τ², as the product U V does. `steps` measures whole steps,
`scaling` and `fits` update and step alone. Seconds are processor time of this process (elapsed on a GPU): others
on the machine lengthen elapsed time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pandas as pd
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from curvlab.lab import Run, Target
from curvlab.lab.data import DataSplits
from experiments.ginger.cost.claims import judge  # noqa: F401  this target's
from experiments.ginger.cost.exactness import exact_statements, precision_errors
from experiments.ginger.cost.matrices import ERRORS, approximation_errors
from experiments.ginger.cost.operations import beside_the_paper, counted_steps, fits, scaling_table, step_table
from experiments.ginger.cost.plot import draw  # noqa: F401  this target's
from experiments.ginger.cost.stream import Stream, StreamTask
from experiments.ginger.cost.theory import SoftmaxRegression, eigenvalue_bounds, followed

TARGET = Target(
    __name__,
    title="Cost and approximation error of Ginger and QNG",
    paper={
        "ranks": "1, 2, 4, 8, 16, 32",
        "decays": "0.99 (Sec. 4.1), 0.9 to 0.999 (Table 3)",
        "dampings": "not stated; 1e-5 in the published code",
        "seeds": "not stated",
        "stream.num_steps": "no such stream",
        "stream.batch_size": "128",
        "flops.csv:batch_size": "128",
        "steps.csv:network": "ResNet-18, ResNet-50",
        "scaling.csv:num_parameters": "11e6 and 24e6",
        "theory.lr": "sum diverges, sum of squares does not",
    },
    timings=("fits",),
)
GAUSSIANS = (20, 30)  # of the stream beside the real ones: updates, parameters


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return the tables that the docstring names; reads what conf/ginger/cost.yaml explains."""
    streams = [
        task.stream(seed)
        for task in StreamTask.each(run, cfg)
        for seed in run.progress(task.settings.seeds, f"gradients of {task.label}")
    ]
    table = _approximation(run, cfg, streams)
    by = ["task", "decay", "rank", "target", "damping", "optimizer"]
    summary = table.groupby(by, sort=False)[ERRORS].mean().assign(seeds=table.groupby(by).seed.nunique())
    scaling = scaling_table(run, cfg.scaling)
    run.note(seeds=list(cfg.seeds))
    return {
        "table": table,
        "summary": summary.reset_index(),
        "exact": _exact(run, cfg, [stream for stream in streams if stream.seed == cfg.seeds[0]]),
        "precision": _precision(run, cfg, streams),
        **_theory(run, cfg),
        "flops": beside_the_paper(_rows(run, "flops", counted_steps, {}, OmegaConf.to_container(cfg.flops))),
        "steps": step_table(run, cfg.steps),
        "scaling": scaling,
        "fits": fits(scaling),
    }


def _rows(run: Run, name: str, function: Callable[..., Any], key: dict[str, Any], settings: Any) -> pd.DataFrame:
    """Return the rows of a function of plain settings, a unit of work; `key` identifies what it is bound to."""
    found = run.unit(
        f"ginger/{name}", key | settings, lambda: {"rows": function(**settings)}, version=2, about=f"ginger {name}"
    )
    return pd.DataFrame(found["rows"])


def _approximation(run: Run, cfg: DictConfig, streams: Iterable[Stream]) -> pd.DataFrame:
    parts = []
    cells = [(stream, decay, rank) for stream in streams for decay in cfg.decays for rank in cfg.ranks]
    for stream, decay, rank in run.progress(cells, "approximation"):
        settings = {"decay": decay, "rank": rank, "dampings": list(cfg.dampings)}
        rows = _rows(run, "approximation", partial(approximation_errors, stream), {"stream": stream.key}, settings)
        place = {"task": stream.name, "seed": stream.seed, "num_parameters": stream.num_parameters}
        parts.append(pd.DataFrame([place | {"decay": decay, "rank": rank}] * len(rows)).join(rows))
    return pd.concat(parts, ignore_index=True)


def _exact(run: Run, cfg: DictConfig, streams: Iterable[Stream]) -> pd.DataFrame:
    cases = [(stream.name, stream.key, stream.sampled, stream.losses[-1], cfg.decays) for stream in streams]
    generator = run.generator("gaussians")
    gaussians = torch.randn(GAUSSIANS[0] + 1, GAUSSIANS[1], dtype=torch.float64, generator=generator)
    key = {"gaussians": list(GAUSSIANS), "generator": "gaussians"}
    cases.append(("gaussians", key, gaussians[:-1], gaussians[-1], [cfg.gaussian_decay]))
    parts = []
    for name, key, vectors, gradient, decays in cases:
        for decay in decays:
            settings = {"decay": decay, "num": cfg.exact.num_updates}
            settings |= {"dampings": list(cfg.exact.dampings), "ranks": list(cfg.exact.ranks)}
            rows = _rows(run, "exact", partial(exact_statements, vectors, gradient), {"stream": key}, settings)
            rows.insert(0, "stream", name)
            parts.append(rows)
    return pd.concat(parts, ignore_index=True)


def _precision(run: Run, cfg: DictConfig, streams: Iterable[Stream]) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []
    for stream in streams:
        for damping in cfg.exact.precision_dampings:
            settings = {"decay": cfg.decays[-1], "damping": damping, "rank": cfg.exact.precision_rank}
            errors = partial(precision_errors, stream.sampled, stream.losses[-1], **settings)
            about = f"single precision on {stream.name}, seed {stream.seed}, γ = {damping:g}"
            found = run.unit(
                "ginger/precision", {"stream": stream.key, **settings}, errors, version=2, about=about
            )
            rows.append({"stream": stream.name, "seed": stream.seed, **settings, **found})
    return pd.DataFrame(rows)


def _theory(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    splits: DataSplits = instantiate(cfg.theory.data)
    run.record_data(splits.name, splits.checksum)
    lemma_1 = []
    for changes in cfg.lemma_1.dampings:
        settings = OmegaConf.merge(cfg.lemma_1, {"ginger": changes})
        bounds = partial(eigenvalue_bounds, run, splits, settings)
        key = {"data": splits.checksum, "settings": settings}
        found = run.unit("ginger/eigenvalues", key, bounds, version=2, about=f"Lemma 1, {changes}")
        lemma_1 += found["rows"]
    problem = SoftmaxRegression.of(splits)
    tables: dict[str, list[dict[str, Any]]] = {"descent": [], "convergence": []}
    for damping in cfg.theory.dampings:
        for seed in run.progress(cfg.theory.seeds, "softmax regression"):
            key = {"data": splits.checksum, "theory": cfg.theory}
            found = followed(run, problem, cfg.theory, **key, damping=damping, repeat=seed)
            for name, rows in tables.items():
                rows += [{"damping": damping, "seed": seed} | row for row in found[name]]
    return {"eigenvalues": pd.DataFrame(lemma_1)} | {name: pd.DataFrame(rows) for name, rows in tables.items()}
