"""Mislabelled examples found against the fraction of the training set inspected (Bae et al. 2022, Fig. 6, D.3).

make pbrf-fig6 PRESET=smoke|embedded|laptop|paper ARGS="damping=0.01 fraction=0.2"

A tenth of the training labels is replaced by wrong ones, a network is trained on them, and the examples are
inspected from the highest score to the lowest: which score finds the wrong labels first? Self-influence by PBRF
(each example is left out by itself, and the proximal Bregman objective is minimised from the trained network on)
and by influence functions; random order; and what people use for this: the loss, the margin, the margin averaged
over the epochs of the training (area under the margin, Pleiss et al. 2020), and confident learning (Northcutt et
al. 2021) with probabilities from cross-validation by trainings of the same kind (the ranking is ours; cleanlab is
not called).

Where the paper leaves a choice. "The influence of removing a single training example on the total training loss
(self-influence scores)" names two things. Self-influence, in the works it cites, is the change of the example's
*own* loss: that is what "PBRF" and "influence" mean here; the change of the mean loss over the whole training set,
the example included, is a row of its own ("total loss"). "Random labels" are drawn from the other classes, so that
each is wrong. The number of epochs is not stated; it is 1,000 in the paper's C.3. It matters, since a network that
has learnt wrong labels by heart shows less of them: there are tasks that stop early and overfitted ones, and
networks.csv has the share of wrong labels that the network predicts.

Leaving out is a weight of -1/N (the paper's 1/N has the opposite sign). With it the objective of a wrong label is
mostly not bounded below (see `curvlab.influence.retraining`; Newton's method runs away): the PBRF is what so many
steps of full-batch descent with momentum give, as the paper's is what K/2 epochs of SGD give. How far the points
got stands in networks.csv: the norm of the objective's gradient at the end over that at the start, the share of
points that came below a tenth, and of those for which it grew. Influence is exact to a residual of `rtol`; with
`num_probes` it is estimated for all examples at once from so many systems, each score with a relative standard
error of √(2/num_probes). Everything is in single precision. Seeds share their images: intervals are over wrong
labels, starts and orders of batches.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import DictConfig
from torch import Tensor, nn

from curvlab.influence import (
    confident_learning_scores,
    detection_curve,
    loss_response,
    margins,
    self_influence,
)
from curvlab.influence.retraining import LeftOut, ProximalBregmanCost, SharedBatches, proximal_bregman_warm_optimum
from curvlab.lab import Computed, Run, Target, panels, plots, task_settings, unit
from curvlab.lab.claims import ClaimResult, ClaimSheet, out_of_reach
from curvlab.lab.claims import judge as judge_claim
from curvlab.training import TrainingDivergedError, shuffled_batches
from experiments.pbrf.corrupted import CorruptedTask, load_task
from experiments.pbrf.gaps import arrived
from experiments.shared import stats

TARGET = Target(
    __name__,
    title="Mislabelled examples found by PBRF, influence and everyday scores",
    paper={
        "data.num_train": 6000,
        "model.hidden_sizes": "2 x 1024",
        "training.num_epochs": "not stated here, 1000 in C.3",
        "training.batch_size": 128,
        "fraction": 0.1,
        "damping": 0.001,
        "seeds": "not stated",
        "descent.num_steps": "K/2 epochs, in C.2",
        "influence.num_probes": "LiSSA, in C.2",
    },
    curves=("curves: found over inspected by method",),
)
PBRF, INFLUENCE = "PBRF", "influence"
PBRF_TOTAL, INFLUENCE_TOTAL = "PBRF, total loss", "influence, total loss"
LOSS, MARGIN, AREA = "loss", "margin", "area under the margin"
CONFIDENT, RANDOM = "confident learning", "random order"
METHODS = (PBRF, INFLUENCE, PBRF_TOTAL, INFLUENCE_TOTAL, LOSS, MARGIN, AREA, CONFIDENT, RANDOM)
INSPECTED = (0.05, 0.1, 0.2, 0.3, 0.5)  # columns of the table
MARK = "found at 20 %"
OF_PBRF = (  # decided only where its descent has got somewhere
    "pbrf-finds-most",
    "pbrf-beats-random",
    "total-loss-finds-most",
    "influence-finds-as-many",
    "influence-aligns",
    "influence-aligns-total",
)
NUM_STEPS = 100  # of the drawn curves


# ------------------------------------------------------------------------------------ compute
def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return one row for each method, the same for each seed, the curves, and one row for each network."""
    rows: dict[str, list[dict[str, Any]]] = {"seeds": [], "curves": [], "networks": []}
    for name, settings in task_settings(cfg).items():
        for seed in settings.seeds:
            for table, found in _rows(load_task(run, name, settings, seed)).items():
                rows[table] += found
    tables = {name: pd.DataFrame(found) for name, found in rows.items()}
    return {"table": summary(tables["seeds"]), **tables}


def _rows(task: CorruptedTask) -> dict[str, list[dict[str, Any]]]:
    scores, quality = all_scores(task)
    wrong, grid = task.corrupted.mislabelled.cpu(), np.linspace(0, 1, NUM_STEPS + 1)
    seeds, curves = [], []
    for method, values in scores.items():
        names = {"task": task.label, "method": method, "seed": task.seed}
        curve = detection_curve(values, wrong)
        found = {_column(inspected): curve.at(inspected) for inspected in INSPECTED}
        seeds.append(names | found | {"area": curve.area})
        curves += [names | {"inspected": float(at), "found": curve.at(float(at))} for at in grid]
    row = {"task": task.label, "seed": task.seed, "N": task.num_train}
    row |= {"mislabelled": int(wrong.sum()), "epochs": task.settings.training.num_epochs}
    columns = ("train_loss", "wrong_label_loss", "wrong_labels_predicted", "test_accuracy")
    row |= {name.replace("_", " "): task.after_training[name] for name in columns} | quality
    # PBRF and loss: what any two scores of mislabelled data share.
    pairs = {"own": (PBRF, INFLUENCE), "total": (PBRF_TOTAL, INFLUENCE_TOTAL), "PBRF and loss": (PBRF, LOSS)}
    for label, pair in pairs.items():
        if pair[0] in scores:
            row[f"spearman {label}"] = stats.spearman(*(scores[name].double() for name in pair))
    return {"seeds": seeds, "curves": curves, "networks": [row]}


def _column(inspected: float) -> str:
    return f"found at {100 * inspected:g} %"


def summary(seeds: pd.DataFrame) -> pd.DataFrame:
    """Return means over seeds with their t intervals, one row for each task and method."""
    rows = []
    for (task, method), own in seeds.groupby(["task", "method"], sort=False):
        row: dict[str, Any] = {"task": task, "method": method, "seeds": len(own)}
        for column in (*map(_column, INSPECTED), "area"):
            row |= stats.in_columns(column, own[column], joint=" ")
        rows.append(row)
    return pd.DataFrame(rows)


# ------------------------------------------------------------------------------------ scores
def all_scores(task: CorruptedTask) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return every method's scores, (N,) each, the highest inspected first, and how well they were computed."""
    labels, influence = task.corrupted.labels, _influence(task)
    outputs = task.outputs(task.model)
    scores = {
        INFLUENCE: influence["own"],
        INFLUENCE_TOTAL: influence["total"],
        LOSS: nn.functional.cross_entropy(outputs, labels, reduction="none"),
        MARGIN: -margins(outputs, labels),
        AREA: -task.after_training["area_under_margin"],
        CONFIDENT: confident_learning_scores(task.cross_validated, labels),
        RANDOM: torch.rand(task.num_train, generator=task.generator("random order")),
    }
    quality = {"influence residual": float(influence["residual"])}
    if task.settings.get("descent") is not None:  # a task leaves it out by its own null
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


def _chunks(task: CorruptedTask) -> list[Tensor]:
    return list(torch.arange(task.num_train).split(task.settings.points_at_once))


def _influence(task: CorruptedTask) -> dict[str, Any]:
    """Return `own` and `total`, (N,), in units of some points, or of some probes, so that little is lost."""
    settings, found = task.settings, []
    probes, at_once = settings.influence.num_probes, settings.points_at_once
    key = {"damping": settings.damping, "rtol": settings.influence.rtol, "at_once": at_once, "num_probes": probes}
    parts = len(_chunks(task)) if probes is None else math.ceil(probes / at_once)
    of_part = _of_points if probes is None else _of_probes
    for part in task.run.progress(range(parts), f"influence {task.described}"):
        found.append(of_part(task, part=part, **key))
    residual = max(part["residual"] for part in found)
    if probes is None:
        return {n: torch.cat([part[n] for part in found]) for n in ("own", "total")} | {"residual": residual}
    weights = [part["num_probes"] for part in found]
    own = sum(weight * part["own"] for weight, part in zip(weights, found, strict=True)) / sum(weights)
    return {"own": own, "total": found[0]["total"], "residual": residual}


def _influence_part(task: CorruptedTask, /, *, part: int, at_once: int, num_probes: int | None, **_: Any) -> dict:
    """Solve for one part: the gradients of its points, or its probes."""
    settings, data = task.settings, (task.model, task.loss, task.train_data)
    more = {"damping": settings.damping, "columns": at_once, "rtol": settings.influence.rtol}
    more |= {"generator": task.run.generator(f"influence {part}", task.seed_name, task.seed)}
    points = _chunks(task)[part] if num_probes is None else None
    count = None if num_probes is None else min(at_once, num_probes - part * at_once)
    found = self_influence(*data, points=points, num_probes=count, **more)
    task.run.add_matvecs(found.num_matvecs)
    return {"own": found.own, "total": found.total, "residual": found.residual, "num_probes": count}


_ABOUT = "influence of {seed_name}, seed {network_seed}, part {part}"
_of_points = unit("fig6/influence", version=1, about=_ABOUT)(_influence_part)
_of_probes = unit("fig6/influence_probes", version=1, about=_ABOUT)(_influence_part)


def _pbrf(task: CorruptedTask) -> dict[str, Tensor]:
    """Return `own`, `total` and `gradient_norm`, (N,), in units of some points."""
    settings, chunks = task.settings, task.run.progress(_chunks(task), f"PBRF {task.described}")
    key = {"damping": settings.damping, "descent": dict(settings.descent), "at_once": settings.points_at_once}
    found = [_pbrf_part(task, points, part=part, **key) for part, points in enumerate(chunks)]
    return {name: torch.cat([part[name] for part in found]) for name in found[0]}


@unit("fig6/pbrf", version=1, about="PBRF of {seed_name}, seed {network_seed}, part {part}")
def _pbrf_part(task: CorruptedTask, points: Tensor, /, **_: Any) -> dict[str, Any]:
    return _responses(task, points)


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
    groups, damping = list(points[:, None]), task.settings.damping
    left_out = LeftOut(task.model, task.loss, task.train_data, groups, damping=damping)
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


# ------------------------------------------------------------------------------------ judge
def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every claim of every task; intervals are over seeds."""
    networks, results = computed["networks"], []
    for task, seeds in computed["seeds"].groupby("task", sort=False):
        results += _of_task(claims, str(task), seeds, networks[networks.task == task])
    return results


def _of_task(claims: ClaimSheet, task: str, seeds: pd.DataFrame, networks: pd.DataFrame) -> list[ClaimResult]:
    found, area = (seeds.pivot_table(index="seed", columns="method", values=name) for name in (MARK, "area"))
    best = str(area[[AREA, CONFIDENT]].mean().idxmax())
    nothing = pd.Series(dtype=float)  # of a task without PBRF
    pbrf = found.get(PBRF, nothing)
    of = {name: networks.get(f"spearman {name}", nothing) for name in ("own", "total")}
    values = {
        "pbrf-finds-most": pbrf,
        "pbrf-beats-random": pbrf - found[RANDOM],
        "total-loss-finds-most": found.get(PBRF_TOTAL, nothing),
        "influence-finds-as-many": pbrf - found[INFLUENCE],
        "influence-aligns": of["own"],
        "influence-aligns-total": of["total"],
        "influence-finds-most": found[INFLUENCE],
        "influence-beats-random": found[INFLUENCE] - found[RANDOM],
        "influence-above-loss": area[INFLUENCE] - area[LOSS],
        "influence-above-all": area[INFLUENCE] - area[best],
    }
    state = (
        f"The network predicts {networks['wrong labels predicted'].mean():.0%} of the wrong labels; plain loss "
        f"finds {found[LOSS].mean():.2f}."
    )
    more = {"influence-above-all": f"The better of the two is {best}, {area[best].mean():.3f}."}
    if PBRF in found:
        more["influence-aligns-total"] = (
            f"By own losses it is {of['own'].mean():.2f}; PBRF and plain loss correlate by "
            f"{networks['spearman PBRF and loss'].mean():.2f}."
        )
    absent = "The PBRF of every example is not computed for this task: descent is null."
    left = float(networks.get("PBRF gradient norm, median", nothing).max())
    begun = arrived(gradient_left=left)
    results = []
    for name, column in values.items():
        claim, why = claims.claim(name, of=task), f"{state} {more.get(name, '')}"
        reason = absent if column.isna().all() else begun if name in OF_PBRF else ""
        judged = out_of_reach(claim, reason) if reason else None
        results.append(judged or judge_claim(claim, *stats.mean(column), if_not_reproduced=why))
    return results


# ------------------------------------------------------------------------------------ draw
PAPERS = (PBRF, INFLUENCE, RANDOM)
PANELS = {
    "the paper's": (*PAPERS, PBRF_TOTAL, INFLUENCE_TOTAL),
    "everyday": (INFLUENCE, LOSS, MARGIN, AREA, CONFIDENT),
}
STYLES = panels.styles_of(METHODS)


def draw(computed: Computed) -> dict[str, Figure]:
    """Return the paper's scores of two tasks; of all, with total losses, and everyday scores beside influence."""
    curves, networks = computed["curves"], computed["networks"]
    tasks = curves.task.unique().tolist()
    learnt = 100 * networks.groupby("task")["wrong labels predicted"].mean()
    figure, axes = plots.figure(1, min(2, len(tasks)), panel_size=(3.8, 3.8))
    more, others = plots.figure(2, len(tasks), panel_size=(2.9, 2.9))
    for column, task in enumerate(tasks):
        own, title = curves[curves.task == task], f"{task}\n{learnt[task]:.0f} % of wrong labels learnt"
        title += "" if PBRF in set(own.method) else ", PBRF not computed"
        drawn: list[Any] = list(zip(others[:, column], PANELS.values(), [title, ""], strict=True))
        drawn += [(axes[0, column], PAPERS, title)] if column < axes.shape[1] else []
        for ax, methods, name in drawn:
            _draw_panel(ax, own[own.method.isin(methods)])
            panels.frame(
                ax, x="fraction inspected", y="" if column else "fraction of wrong labels found", title=name
            )
    note = f"mean over {panels.seeds(networks.groupby('task').seed.nunique())}, band: all seeds"
    for each in (figure, more):
        panels.legend(each, title=f"{note}; star: the paper's mark, over 0.80", columns=5)
    return {"figure.png": figure, "figure_more.png": more}


def _draw_panel(ax: Axes, curves: pd.DataFrame) -> None:
    shown = curves.groupby(["method", "inspected"], sort=False).found.agg(["mean", "min", "max"]).reset_index()
    kind: dict[str, Any] = {"by": "method", "styles": STYLES, "marker": ""}
    panels.lines(ax, shown, x="inspected", y="mean", low="min", high="max", **kind)
    # Hollow, so that it hides no curve.
    ax.plot([0.2], [0.8], marker="*", markersize=12, mfc="none", color="black", linestyle="none", zorder=3)
    ax.plot([0.2, 0.2, 0], [0, 0.8, 0.8], color=panels.GREY, linewidth=0.8, linestyle=(0, (2, 2)))
    ax.set(xlim=(0, 1), ylim=(0, 1.02))
