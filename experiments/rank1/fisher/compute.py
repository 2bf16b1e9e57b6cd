"""The gap ‖∇²f - F‖ of networks, perceptrons and parabolas beside its bounds, and the rates."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor
from torch.nn import functional

from curvlab.lab import Run, task_label, task_settings
from curvlab.lab.data import DataSplits
from curvlab.lab.models import build_model
from curvlab.training import train
from experiments.rank1.fisher.objectives import (
    LOSSES,
    FisherObjective,
    fisher_objective,
    gap,
    parabola,
    perceptron,
)
from experiments.rank1.fisher.rates import rate_rows

Row = dict[str, Any]


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table` (curves), `bounds`, one row for each (model, state, seed), its `summary`, and `rates`.

    Args:
        run: seeds, store.
        cfg: `tasks` (networks), `scales` of perceptrons, κ of the `parabola`, `num_seeds`; `rate_objectives`,
            `max_steps` and `epsilons` of the rates.
    """
    networks = [
        row for name, task in task_settings(cfg).items() for row in network_rows(run, task_label(name), task)
    ]
    bounds = pd.DataFrame(networks + [row for kind in LOSSES for row in constructed_rows(run, cfg, kind)])
    curves, rates = rate_rows(run, cfg)
    run.note(seeds=list(range(cfg.num_seeds)))
    return {
        "table": pd.DataFrame(curves),
        "bounds": bounds,
        "rates": pd.DataFrame(rates),
        "summary": summary(bounds),
    }


def network_rows(run: Run, label: str, task: DictConfig) -> list[Row]:
    """Return the gap of a task's network, random and trained, for each seed."""
    splits: DataSplits = instantiate(task.data)
    run.record_data(splits.name, splits.checksum)
    if splits.task == "binary":
        raise ValueError(f"data={splits.name} has one output for two classes; softmax needs one for each class.")
    kind = "least squares" if splits.task == "regression" else "softmax"
    rows = []
    for seed in range(task.num_seeds):
        for state in ("random", "trained"):
            config = {
                "data": splits.checksum,
                **{name: task.get(name) for name in ("model", "training", "pooling", "seed_name")},
                "state": state,
                "number": seed,
            }
            compute = partial(_network_gap, run, splits, task, (kind, state, seed))
            about = f"gap of {label}, {state}, seed {seed}"
            rows.append({"model": label, **run.unit("rank1/fisher-gap", config, compute, version=1, about=about)})
    return rows


def _network_gap(run: Run, splits: DataSplits, task: DictConfig, what: tuple[str, str, int]) -> Row:
    kind, state, seed = what
    inputs, targets = _pooled(splits.train.tensors, task.get("pooling"))  # type: ignore[attr-defined]  # in memory
    model = build_model(
        partial(instantiate, task.model),
        input_shape=inputs.shape[1:],
        num_outputs=splits.num_outputs,
        generator=run.generator("network", task.seed_name, seed),
    )
    if state == "trained":
        settings = {str(name): value for name, value in task.training.items()}
        generator = run.generator("training", task.seed_name, seed)
        train(model, LOSSES[kind](), (inputs, targets), **settings, generator=generator)
    pair = (inputs.double(), targets.double() if targets.is_floating_point() else targets)
    return _row(fisher_objective(model.double(), kind, pair, name=kind), what)


def constructed_rows(run: Run, cfg: DictConfig, kind: str) -> list[Row]:
    """Return the gap of perceptrons for each seed, of the parabola, and of a model that is linear (L = 0)."""
    rows = []
    for seed in range(cfg.num_seeds):
        for scale in cfg.scales:
            generator = run.generator("perceptron", kind, seed)
            objective = perceptron(kind, scale=scale, activation="tanh", noise=0.5, generator=generator)
            for parameter in objective.parameters:
                parameter.data *= 3
            rows.append({"model": f"perceptron × {scale:g}, {kind}", **_row(objective, (kind, "random", seed))})
    objective = parabola(kind, curvature=cfg.parabola)
    rows.append({"model": f"parabola × {cfg.parabola:g}, {kind}", **_row(objective, (kind, "constructed", 0))})
    generator = run.generator("linear", kind)
    objective = perceptron(kind, scale=1.0, activation="identity", noise=0.5, generator=generator)
    return [*rows, {"model": f"linear, {kind}", **_row(objective, (kind, "random", 0))}]


def _row(objective: FisherObjective, what: tuple[str, str, int]) -> Row:
    """Return the gap beside the bounds; `squared` and `lemma` in the slides' scale."""
    (kind, state, seed), found = what, gap(objective)
    half = 0.5 if kind == "least squares" else 1.0
    count = len(objective.data[0])
    total = half * count  # slides' scale over that of the mean
    largest, ratio = found["smoothness"], 2 * found["loss"] ** (0.5 if kind == "least squares" else 1.0)
    return {
        "kind": kind,
        "state": state,
        "seed": seed,
        "n": objective.size,
        "S": count,
        **found,
        "one_norm_bound": largest * found["one_norm"],
        "loss_bound": largest * ratio,
        "loss_bound_without_L": ratio,
        "squared": (total * found["gap"]) ** 2,
        "lemma": total * largest * found["one_norm"],
    }


def _pooled(data: tuple[Tensor, Tensor], size: int | None) -> tuple[Tensor, Tensor]:
    """Return images averaged to (size, size) and flattened: few parameters, so that ∇²f can be dense."""
    inputs, targets = data
    return (inputs if size is None else functional.adaptive_avg_pool2d(inputs, size).flatten(1)), targets


def summary(bounds: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each (model, state): medians over seeds of the gap and its share of each bound."""
    shares = bounds.assign(
        gap_by_one_norm_bound=bounds.gap / bounds.one_norm_bound,
        gap_by_loss_bound=bounds.gap / bounds.loss_bound,
        gap_by_loss_bound_without_L=bounds.gap / bounds.loss_bound_without_L,
        squared_by_lemma=bounds.squared / bounds.lemma,
    )
    columns = ["n", "S", "loss", "gap", "smoothness", *[name for name in shares if "_by_" in str(name)]]
    return shares.groupby(["model", "state"], sort=False)[columns].median().reset_index()
