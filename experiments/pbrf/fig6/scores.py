"""Suspicions by every method: the higher, the earlier an example is inspected."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from curvlab.influence import (
    confident_learning_scores,
    estimated_self_influence,
    loss_response,
    margins,
    self_influence,
)
from curvlab.influence.retraining import LeftOut, ProximalBregmanCost, SharedBatches, proximal_bregman_warm_optimum
from curvlab.training import TrainingDivergedError, shuffled_batches
from experiments.pbrf.fig6.network import CorruptedTask

PBRF, INFLUENCE = "PBRF", "influence"
PBRF_TOTAL, INFLUENCE_TOTAL = "PBRF, total loss", "influence, total loss"
LOSS, MARGIN, AREA = "loss", "margin", "area under the margin"
CONFIDENT, RANDOM = "confident learning", "random order"
METHODS = (PBRF, INFLUENCE, PBRF_TOTAL, INFLUENCE_TOTAL, LOSS, MARGIN, AREA, CONFIDENT, RANDOM)


def all_scores(task: CorruptedTask) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return every method's scores, (N,) each, and how well PBRF and influence were computed."""
    influence = _influence(task)
    scores = {INFLUENCE: influence["own"], INFLUENCE_TOTAL: influence["total"]} | _everyday(task)
    quality = {"influence residual": float(influence["residual"])}
    if task.settings.descent is not None:
        pbrf = _pbrf(task)
        scores |= {PBRF: pbrf["own"], PBRF_TOTAL: pbrf["total"]}
        norms = pbrf["gradient_norm"].double()
        quality |= {
            "PBRF gradient norm, median": float(norms.quantile(0.5)),
            "PBRF gradient norm, 90 %": float(norms.quantile(0.9)),
            "PBRF share below 0.1": float((norms < 0.1).double().mean()),
            "PBRF share that grew": float((norms > 1).double().mean()),
            "PBRF diverged": float((~pbrf["own"].isfinite()).sum()),
        }
    return {name: scores[name].cpu() for name in METHODS if name in scores}, quality


def _everyday(task: CorruptedTask) -> dict[str, Tensor]:
    labels = task.corrupted.labels
    return {
        LOSS: nn.functional.cross_entropy(task.outputs, labels, reduction="none"),
        MARGIN: -margins(task.outputs, labels),
        AREA: -task.trained["area_under_margin"],
        CONFIDENT: confident_learning_scores(task.cross_validated, labels),
        RANDOM: torch.rand(task.num_train, generator=task.generator("random order")),
    }


def _chunks(task: CorruptedTask) -> list[Tensor]:
    return list(torch.arange(task.num_train).split(task.settings.points_at_once))


# ------------------------------------------------------------------------------------- influence
def _influence(task: CorruptedTask) -> dict[str, Any]:
    """Return `own` and `total`, (N,), in units of some points, or of some probes, so that little is lost."""
    settings = task.settings
    probes, at_once = settings.influence.num_probes, settings.points_at_once
    key = task.key | {"damping": settings.damping, "rtol": settings.influence.rtol}
    parts = len(_chunks(task)) if probes is None else math.ceil(probes / at_once)
    name = "fig6/influence" if probes is None else "fig6/influence_probes"
    found = []
    for part in task.run.progress(range(parts), f"influence {task.label}, seed {task.seed}"):
        compute = partial(_influence_of_points if probes is None else _influence_by_probes, task, part)
        unit = key | {"part": part, "at_once": at_once, "num_probes": probes}
        about = f"influence of {task.label}, seed {task.seed}, part {part + 1} of {parts}"
        found.append(task.run.unit(name, unit, compute, version=1, about=about))
    residual = max(part["residual"] for part in found)
    if probes is None:
        return {n: torch.cat([part[n] for part in found]) for n in ("own", "total")} | {"residual": residual}
    weights = [part["num_probes"] for part in found]
    own = sum(weight * part["own"] for weight, part in zip(weights, found, strict=True)) / sum(weights)
    return {"own": own, "total": found[0]["total"], "residual": residual}


def _influence_of_points(task: CorruptedTask, part: int) -> dict[str, Any]:
    settings = task.settings
    found = self_influence(
        task.model,
        task.loss,
        task.train_data,
        points=_chunks(task)[part],
        damping=settings.damping,
        columns=settings.points_at_once,
        rtol=settings.influence.rtol,
        generator=task.generator(f"influence {part}"),
    )
    task.run.add_matvecs(found.num_matvecs)
    return {"own": found.own, "total": found.total, "residual": found.residual}


def _influence_by_probes(task: CorruptedTask, part: int) -> dict[str, Any]:
    settings = task.settings
    done = part * settings.points_at_once
    count = min(settings.points_at_once, settings.influence.num_probes - done)
    found = estimated_self_influence(
        task.model,
        task.loss,
        task.train_data,
        damping=settings.damping,
        num_probes=count,
        columns=settings.points_at_once,
        rtol=settings.influence.rtol,
        generator=task.generator(f"influence {part}"),
    )
    task.run.add_matvecs(found.num_matvecs)
    return {"own": found.own, "total": found.total, "residual": found.residual, "num_probes": count}


# ------------------------------------------------------------------------------------------ PBRF
def _pbrf(task: CorruptedTask) -> dict[str, Tensor]:
    """Return `own`, `total` and `gradient_norm`, (N,), in units of some points."""
    settings, chunks, found = task.settings, _chunks(task), []
    key = task.key | {"damping": settings.damping, "descent": dict(settings.descent)}
    for part, points in enumerate(task.run.progress(chunks, f"PBRF {task.label}, seed {task.seed}")):
        unit = key | {"part": part, "at_once": settings.points_at_once}
        about = f"PBRF of {task.label}, seed {task.seed}, part {part + 1} of {len(chunks)}"
        compute = partial(_responses, task, points)
        found.append(task.run.unit("fig6/pbrf", unit, compute, version=1, about=about))
    return {name: torch.cat([part[name] for part in found]) for name in found[0]}


def _responses(task: CorruptedTask, points: Tensor) -> dict[str, Any]:
    """Return what leaving out each point does; a point whose descent overflows has infinite effects."""
    try:
        return _descended(task, points)
    except TrainingDivergedError:
        if len(points) == 1:
            return {name: torch.full((1,), torch.inf) for name in ("own", "total", "gradient_norm")}
    halves = [_responses(task, half) for half in points.tensor_split(2)]
    return {name: torch.cat([half[name] for half in halves]) for name in halves[0]}


def _descended(task: CorruptedTask, points: Tensor) -> dict[str, Any]:
    descent, everything = task.settings.descent, torch.arange(task.num_train)
    left_out = LeftOut(
        task.model, task.loss, task.train_data, list(points[:, None]), damping=task.settings.damping
    )
    minimizer = SharedBatches(_batches(task), lr=descent.lr, momentum=descent.momentum)
    moved = proximal_bregman_warm_optimum(left_out, minimizer)
    objective = ProximalBregmanCost(left_out)
    before, after = (objective(where, everything)[1].norm(dim=1) for where in (torch.zeros_like(moved), moved))
    changes = loss_response(task.model, task.loss, task.train_data, moved.T.contiguous(), epsilon=1.0)
    return {
        "own": changes[points, torch.arange(len(points))].cpu(),
        "total": changes.mean(0).cpu(),
        # The gradient at the start is the example's own over N: 0 where its loss has rounded away.
        "gradient_norm": torch.where(before > 0, after / before, torch.zeros_like(after)).cpu(),
    }


def _batches(task: CorruptedTask) -> list[Tensor]:
    """Return the batches of the descent: the whole training set each, or random ones."""
    descent, size = task.settings.descent, task.num_train
    if descent.batch_size is None:
        return [torch.arange(size)] * descent.num_steps
    epochs = math.ceil(descent.num_steps * descent.batch_size / size)
    generator = task.generator("PBRF batches")
    drawn = shuffled_batches(size, batch_size=descent.batch_size, num_epochs=epochs, generator=generator)
    return drawn[: descent.num_steps]
