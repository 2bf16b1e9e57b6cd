"""LiSSA against the proximal Bregman response function (Klochkov & Liu 2024, Fig. 1, 5, 6, 7).

make lissa-fig1 PRESET=smoke|embedded|laptop|paper ARGS="task=mlp_64_64_digits damping_ratio=0.1"

For each of 25 random training images: influence on 500 test losses by LiSSA with the hyperparameters of Corollary
1, and the response of the same losses to minimising the proximal Bregman objective by SGD with the same step size,
batch size and steps; where `exact_points` asks for it, also the exact solution of both (CG to 1e-6, Newton's
method), so that solver error and linearisation error can be told apart. All of it twice: with the constant C of
condition C.1 assumed to be 2, and with C measured, |B| = 2 C tr / lambda_max (all examples where that exceeds N).
A third pair, ours, has the batch size of C = 2 and draws examples with probability proportional to tr(G_i), so
that C is 1 by proof. Over networks that have fitted most examples (training loss below 0.5) and others the first
two are a 2 x 2, cells.csv. The paper gives no training loss; about 1, usual for large networks, have ours of eight
units, on noisy labels (mlp-8-tanh-*-noisy) and on true ones (mlp-8-tanh-cifar10). The others of such a loss are
stopped early. The trace of ResNet-20 on 200 images is exact: three images hold most of it; probes read it badly.

LiSSA and SGD of one seed see the same batches. To first order in epsilon they are then one iteration, so that they
agree also where neither has converged: the step at which they part is where SGD leaves the range of the quadratic
approximation, and LiSSA's length there says whether the linear iteration had diverged before. The paper's figure
and the claims on agreement compare LiSSA of one seed with SGD on the next seed's batches.

Conventions, where they differ from the paper's: we score the test loss, the paper log p (both axes change
sign). Its code up-weights in the PBRF and records LiSSA with the opposite sign; here both are for up-weighting.
Eq. 6 as printed converges to the solution divided by the step size; see curvlab.solvers.Lissa. `damping` is
5/270 of lambda_max, as for the paper's ResNet-18, because its lambda = 5 means nothing at another scale. The
objective is optimised through gradients in double precision, with epsilon = 1e-8 for SGD as in the paper; with
1e-2, as in its code, once more for C = 2 (larger_epsilon.csv), where SGD may leave the quadratic range. Newton's
method takes an epsilon per point, which bounds the displacement by 1e-6: with one for all, badly fitted points
cross the kinks of ReLU networks (1e-6) or fitted ones drown in rounding (1e-8).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from omegaconf import DictConfig
from torch import Tensor

from curvlab.influence import median_rms
from curvlab.lab import Computed, Run, Target
from curvlab.lab.claims import Claim, ClaimResult, ClaimSheet, exact, out_of_reach
from curvlab.lab.claims import judge as judge_claim
from experiments.lissa.fig1.agreement_panels import (
    ASSUMED,
    CHOICES,
    MEASURED,
    REGIMES,
    Statistic,
    cell_table,
    counted_pearson,
    mean,
    median,
    over_runs,
    panel_rows,
    point_means,
    regime,
    score_table,
    summary_row,
)
from experiments.lissa.fig1.image_scatters import choices, headline
from experiments.lissa.fig1.lissa_and_pbrf import given_settings, pairs_by_choice, solved_exactly
from experiments.shared.spectrum import spectrum, trace
from experiments.shared.systems import Systems
from experiments.shared.task import Task, TrainedTask

TARGET = Target(
    __name__,
    title="LiSSA against the proximal Bregman response",
    paper={
        "tasks": ["ResNet-18 on ImageNet", "ResNet-50 on ImageNet"],
        "num_points": 25,
        "num_test": 500,
        "num_seeds": 1,
        "lissa.constant": 2.0,
        "summary.csv:damping": 5.0,
        "summary.csv:step size": [0.003, 0.002],
        "summary.csv:batch size": [100, 5],
        "summary.csv:steps": [150, 200],
        "pbrf.epsilon": 1e-8,
    },
    after=("lissa/tab1",),
)
LARGER = [
    "task", "epsilon", "position", "seed", "lissa_pbrf_case", "lissa_pbrf_pearson", "lissa_overflow",
    "pbrf_overflow", "lissa_length", "sgd_length", "parted_step", "length_at_parting",
]  # fmt: skip


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, `summary`, `cells`, `larger_epsilon` and `scores_<task>`.

    One row for each task, choice of C, point and seed; for each task; for each cell of the 2 x 2, a training loss
    above or below 0.5 and C = 2 or measured; for each point and seed with the larger epsilon; for each point and
    test point, what the panels show. Beside them images_<task>.png, the training images side by side.

    All scores are changes of a test loss per unit weight added to the point's loss in the mean training loss
    (the paper plots the same numbers with log p, the other sign, on both axes).

    Args:
        run: seeds, store, device.
        cfg: `tasks`, and for all of them or for one what stands in conf/lissa/fig1.yaml.
    """
    if cfg.num_seeds < 2:
        raise ValueError(
            f"num_seeds must be at least 2, got {cfg.num_seeds}: LiSSA of a seed is compared with SGD on its own "
            "batches, and with SGD on the next seed's"
        )
    scores: dict[str, pd.DataFrame] = {}
    rows, larger, summary = [], [], []
    for loaded in Task.each(run, cfg):
        task = loaded.trained()
        found = _of_task(run, task, task.settings)
        scores[f"scores_{task.label}"] = found["scores"]
        rows += found["panels"]
        larger += found["larger"]
        summary.append(found["summary"])
        images = [np.round(255 * task.splits.to_image(image)).astype(np.uint8) for image in found["images"]]
        run.save_image(np.concatenate(images, axis=1), f"images_{task.label}.png")
    run.note(seeds=list(range(cfg.num_seeds)))
    table, of_tasks = pd.DataFrame(rows), pd.DataFrame(summary)
    tables = {"table": table, "summary": of_tasks, "cells": cell_table(table, of_tasks)}
    return tables | {"larger_epsilon": pd.DataFrame(larger, columns=LARGER), **scores}


def _of_task(run: Run, task: TrainedTask, cfg: DictConfig) -> dict[str, Any]:
    generator = run.generator("points", task.splits.name)
    test = _draw(len(task.splits.test), cfg.num_test, generator)  # type: ignore[arg-type]  # map-style
    places = _draw(task.num_train, cfg.num_points, generator)
    # Of a large network λmax takes hours, and nothing asks for it where the paper's settings are given.
    given = cfg.damping is not None and None not in given_settings(cfg).values()
    unknown = dict.fromkeys(("largest_eigenvalue", "largest_eigenvalue_error"), math.nan)
    measured = unknown | trace(task, cfg) if given else spectrum(task, cfg)
    damping = cfg.damping if cfg.damping is not None else cfg.damping_ratio * measured["largest_eigenvalue"]
    systems, points = Systems.at(task, damping, places, test), task.train_indices[places]
    pairs = pairs_by_choice(systems, cfg, measured)
    solved, residuals = solved_exactly(systems, cfg)
    scale = median_rms(solved["cg"]) if solved["cg"].numel() else 0.0  # or else no panel is near zero
    at_larger = pairs.pop("larger", None)
    rows: list[dict[str, Any]] = []
    scores: dict[str, Tensor] = {}
    for prefix, own in pairs.items():
        rows += panel_rows(task.label, CHOICES[prefix], own, points, solved, scale=scale)
        scores[f"{prefix}lissa_0"] = own.lissa[0]
        # SGD on other batches; where all the data are a batch there is one run.
        scores[f"{prefix}pbrf_1"] = own.pbrf[min(1, len(own.pbrf) - 1)]
    larger = []
    if at_larger is not None:
        larger = panel_rows(task.label, "", at_larger, points, solved, scale=scale)
        for row in larger:
            length = float(at_larger.sgd_lengths[row["seed"], -1, row["position"]])
            row |= {"epsilon": float(cfg.larger.epsilon), "sgd_length": length}
    return {
        "scores": score_table(points, test, scores | solved),
        "panels": rows,
        "larger": larger,
        "summary": summary_row(systems, measured, pairs, pd.DataFrame(rows)) | residuals,
        "images": systems.sources[0],
    }


def _draw(size: int, wanted: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(size, generator=generator)[: min(wanted, size)]


# ------------------------------------------------------------------------------------ judge
CELLS = {ASSUMED: "assumed", MEASURED: "measured"}  # in the ids of claims
AGREEING = ("agree", "both near zero")  # of the cases of a panel: not apart
NOT_SOLVED = "No exact solutions of this task, or of one point only: see the task that has them."
COINCIDE = (
    "C as measured is below 1, and is taken as 1: |B| is that of C = 2, and the runs are the same ones. Condition "
    "C.1 asks for no larger batch here, so that there is nothing else to measure ({networks})."
)
DIVERGED = "{share} of the runs, and the slope of numbers that have diverged has no mean: see agreement."
LOWER_BOUND = (
    "C is measured in a few directions only, so it is a lower bound of the constant needed; what the last iterate "
    "keeps of sampling noise is off too."
)


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every claim for every task and the 2 x 2; intervals are over runs and points of one network."""
    results, table, summary = list[ClaimResult](), computed["table"], computed["summary"].set_index("task")
    seed, same = computed.config["seed"], _coinciding(summary)
    epsilon = computed.config.get("pbrf", {}).get("epsilon", math.nan)
    larger = computed.get("larger_epsilon", pd.DataFrame(columns=["task"]))
    for task, of_task in table.groupby("task", sort=False):
        of = {name: claims.claim(name, of=str(task)) for name in OF_TASK}
        own, measured, weighted = (of_task[of_task.constant == constant] for constant in CHOICES.values())
        apart, generator, at_larger = _why_apart(own, measured), _seeded(seed), larger[larger.task == task]
        results += [
            _median(of["agreement"], own, "lissa_pbrf_pearson", generator, apart),
            out_of_reach(of["slope"], DIVERGED.format(share=_longer(own)))
            if (~(own.lissa_length <= 1)).mean() > 0.5
            else _median(of["slope"], own, "lissa_pbrf_slope", generator, apart, within=(-math.inf, math.inf)),
            _convergence(of["recipe-converges"], own, generator, apart),
            out_of_reach(of["measured-constant"], COINCIDE.format(networks=task))
            if task in same
            else _median(
                of["measured-constant"], measured, "lissa_cg_pearson", generator, LOWER_BOUND, paired=False
            ),
            _cause(of["cause"], own, generator, epsilon=epsilon),
            out_of_reach(of["cause-larger"], "This run has no larger epsilon for this task.")
            if at_larger.empty
            else _cause(
                of["cause-larger"], _parted_by_it(at_larger, own), _seeded(seed), epsilon=at_larger.epsilon.iloc[0]
            ),
            _importance(of["importance"], weighted, _seeded(seed)),
        ]
    regimes = table.task.map(summary["train loss"].map(regime))
    for name in REGIMES:
        for constant in CELLS:
            cell = table[(regimes == name) & (table.constant == constant)]
            results.append(_cell(claims, cell, name, constant, same, _seeded(seed)))
    assumed = table[table.constant == ASSUMED]
    return [
        *results,
        _self_check(claims.claim("self-check"), table[table.constant.isin(CELLS)]),
        _three_cases(claims.claim("three-cases"), assumed),
        _overflow(claims.claim("overflow"), assumed),
        _pbrf_overflow(claims.claim("pbrf-overflow"), table[table.constant.isin(CELLS)]),
    ]


OF_TASK = (
    "agreement", "slope", "recipe-converges", "measured-constant", "cause", "cause-larger", "importance",
)  # fmt: skip


def _seeded(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _coinciding(summary: pd.DataFrame) -> list[str]:
    """Return the tasks whose |B| with C measured is that of C = 2, C being below 1: the same runs twice."""
    sizes = ("batch size", "batch size with it")
    return summary.index[summary[sizes[0]] == summary[sizes[1]]].tolist() if set(sizes) <= set(summary) else []


def _judged(
    claim: Claim, own: pd.DataFrame, column: str, statistic: Statistic, why: str, **settings: Any
) -> ClaimResult:
    """Judge a statistic over points of the means over runs."""
    by_seed = own.groupby("seed")[column].apply(lambda found: statistic(found.dropna().to_numpy(dtype=float)))
    why = f"By seed: {', '.join(f'{value:.3g}' for value in by_seed)}. {why}"
    return judge_claim(claim, *over_runs(own, column, statistic, **settings), if_not_reproduced=why)


def _median(
    claim: Claim, own: pd.DataFrame, column: str, generator: np.random.Generator, why: str, **settings: Any
) -> ClaimResult:
    if len(point_means(own, column)) < 2:
        return out_of_reach(claim, NOT_SOLVED if own.empty or "overflow" not in why else f"Nothing finite. {why}")
    return _judged(claim, own, column, median, why, generator=generator, **{"paired": True} | settings)


def _importance(claim: Claim, own: pd.DataFrame, generator: np.random.Generator) -> ClaimResult:
    """Judge our own statement; an overflow counts as -1."""
    if own.empty:
        return out_of_reach(claim, "This run draws no examples by importance.")
    found = _medians({"LiSSA with CG": (own, "lissa_cg"), "PBRF by SGD with the exact PBRF": (own, "pbrf_exact")})
    why = f"{found} {_longer(own)} of the runs."
    counted = counted_pearson(own, "lissa_pbrf")
    return _judged(claim, counted, "counted", median, why, paired=True, generator=generator)


def _convergence(claim: Claim, own: pd.DataFrame, generator: np.random.Generator, why: str) -> ClaimResult:
    """Judge by the error against CG; without one, a LiSSA longer than any solution has not converged."""
    error = own["lissa_cg_error"] if "lissa_cg_error" in own else pd.Series(math.nan, own.index)
    solved = error.notna() | (own.get("lissa_cg_case", pd.Series(index=own.index, dtype=object)) == "overflow")
    told = own.assign(converged=(error < 1).astype(float))
    if told[solved].position.nunique() > 1:
        told = told[solved]
    elif (own.lissa_length <= 1).any():
        return out_of_reach(claim, NOT_SOLVED)
    why = (
        f"The median error is {error.median():.3g} times the scores, the median length "
        f"{own.lissa_length.median():.3g} times ‖g‖ / damping, which no solution exceeds. {why}"
    )
    return _judged(claim, told, "converged", mean, why, paired=False, generator=generator, within=(0.0, 1.0))


def _why_apart(own: pd.DataFrame, measured: pd.DataFrame) -> str:
    """Say which of the methods is off with C = 2, by exact solutions where there are any, and what cures it."""
    found = {
        "LiSSA with SGD on the same batches": (own, "same_batches"),
        "LiSSA with CG": (own, "lissa_cg"),
        "PBRF by SGD with the exact PBRF": (own, "pbrf_exact"),
        "CG with the exact PBRF": (own, "cg_exact"),
        "with C measured, LiSSA with the PBRF by SGD": (measured, "lissa_pbrf"),
        "with C measured, LiSSA with CG": (measured, "lissa_cg"),
    }
    return f"{_medians(found)} {_overflows(own)}"


def _medians(compared: dict[str, tuple[pd.DataFrame, str]]) -> str:
    found = {label: point_means(own, f"{name}_pearson") for label, (own, name) in compared.items()}
    listed = ", ".join(f"{label} {median(values):.3f}" for label, values in found.items() if len(values))
    return f"Median Pearson: {listed or 'nothing finite, or no exact solutions'}."


def _overflows(own: pd.DataFrame) -> str:
    lissa, pbrf = int(own.lissa_overflow.sum()), int(own.pbrf_overflow.sum())
    return f"Of {len(own)} runs with C = 2 LiSSA overflows in {lissa}, SGD on the same batches in {pbrf}."


def _longer(own: pd.DataFrame) -> str:
    return f"LiSSA is longer than any solution in {(~(own.lissa_length <= 1)).mean():.0%}"


def _parted_by_it(larger: pd.DataFrame, own: pd.DataFrame) -> pd.DataFrame:
    """Return the panels of the larger epsilon that agree at the smaller one, where no batches part them."""
    panel = ["position", "seed"]
    agreeing = own[own.lissa_pbrf_case.isin(AGREEING)]
    return larger.merge(agreeing[panel], on=panel)


def _cause(claim: Claim, own: pd.DataFrame, generator: np.random.Generator, *, epsilon: float) -> ClaimResult:
    """Judge the paper's explanation of its third case: do those runs of SGD leave the quadratic range, and when?

    LiSSA on the batches of an SGD run is that run's linearisation at θ*. Where SGD never parts from it, the two of
    the panel are apart because their batches differ; where it parts after LiSSA is longer than any solution, the
    linear iteration had diverged before, and took SGD out of the range. While SGD is no longer than a solution its
    weights are within ε‖g‖ / damping of θ*: at a tiny ε nothing but divergence leads out.
    """
    apart = own[~own.lissa_pbrf_case.isin(AGREEING)]
    if apart.empty:
        return out_of_reach(claim, f"None of the {len(own)} panels that count has both large and apart.")
    left = apart.parted_step > 0
    if not left.any():
        return out_of_reach(
            claim,
            f"At epsilon = {epsilon:g} retraining moves the weights by epsilon ‖g‖ / damping times "
            f"the length of LiSSA, here {apart.lissa_length.max():.3g} at most, too little to leave the quadratic "
            f"range: in none of {len(apart)} such panels does it part from LiSSA on its own batches, and the "
            "two sides differ by their batches.",
        )
    first = left & (apart.length_at_parting <= 1)
    why = (
        f"Of {len(apart)} such panels SGD leaves LiSSA on its batches in {int(left.sum())} (median step "
        f"{apart[left].parted_step.median():.0f}), in {int((left & ~first).sum())} of them only when LiSSA is "
        "longer than any solution: there the linear iteration has diverged first, and SGD is taken out of the "
        f"range. In {int((~left).sum())} the two stay together to the end: it is the batches by which the panel's "
        "two sides differ."
    )
    told = apart.assign(first=first.astype(float))
    return _judged(claim, told, "first", mean, why, paired=True, generator=generator, within=(0.0, 1.0))


def _cell(  # noqa: PLR0917
    claims: ClaimSheet,
    cell: pd.DataFrame,
    kind: str,
    constant: str,
    same: list[str],
    generator: np.random.Generator,
) -> ClaimResult:
    """Judge the least of the medians of a cell's networks: from the least lower end to the least upper one.

    Without networks whose batches are all the examples: both sides are then one descent, and nothing is drawn.
    """
    claim = claims.claim("cell", of=f"{kind}-{CELLS[constant]}", regime=kind, constant=constant)
    if cell.empty:
        return out_of_reach(claim, f"This run has no network of this cell ({kind}, {constant}).")
    found = {str(task): counted_pearson(own, "lissa_pbrf") for task, own in cell.groupby("task", sort=False)}
    apart = [task for task in found if constant == ASSUMED or task not in same]
    if not apart:
        return out_of_reach(claim, COINCIDE.format(networks=", ".join(found)))
    drawn = [found[task].assign(task=task) for task in apart if found[task].seed.nunique() > 1]
    if not drawn:
        return out_of_reach(claim, f"Every batch is all the examples, and nothing is drawn ({', '.join(apart)}).")
    shared: dict[str, Any] = {"paired": True, "generator": generator}
    judged = {own.task.iloc[0]: over_runs(own, "counted", median, **shared) for own in drawn}
    worst = min(judged, key=lambda task: judged[task][0])
    listed = ", ".join(f"{task} {value:.3f}" for task, (value, _) in judged.items())
    value, own = judged[worst]
    ends = [(interval.low, interval.high) for _, interval in judged.values()]
    interval = replace(own, low=min(low for low, _ in ends), high=min(high for _, high in ends))
    why = f"By network: {listed}; the least is {worst}'s. {_longer(cell)} of the runs of this cell."
    return judge_claim(claim, value, interval, if_not_reproduced=why)


def _self_check(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    """Judge what must agree to first order in epsilon: by the network and comparison of the least median."""
    short = table[table.lissa_length <= 1]
    compared = (("same_batches", "same batches", short), ("cg_exact", "exact solutions", table))
    found = {
        f"{task}, {label}": median(values)
        for name, label, kept in compared
        for task, own in kept.groupby("task", sort=False)
        if len(values := point_means(own, f"{name}_pearson"))
    }
    if not found:
        why = "In every run LiSSA is longer than any solution, and nothing is solved exactly."
        return out_of_reach(claim, why)
    worst = min(found, key=found.__getitem__)
    interval = exact(found[worst], kind=f"least of {len(found)} medians: {worst}")
    why = "Either epsilon is too large, or one of the solvers is wrong: see summary.csv."
    return judge_claim(claim, found[worst], interval, if_not_reproduced=why)


def _three_cases(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    if "lissa_cg_case" not in table or table.lissa_cg_case.isna().all():
        return out_of_reach(claim, "What is near zero is told by exact solutions, of which this preset has none.")
    counts = table.groupby("task", sort=False).lissa_pbrf_case.value_counts().unstack(fill_value=0)
    counts = counts.reindex(columns=["agree", "both near zero", "apart"], fill_value=0)
    most = int((counts > 0).sum(axis=1).max())
    listed = "; ".join(
        f"{task} " + ", ".join(f"{case} {number}" for case, number in own.items())
        for task, own in counts.iterrows()
    )
    interval = exact(most, kind=f"count, largest of {len(counts)} networks")
    return judge_claim(claim, float(most), interval, if_not_reproduced=f"Panels: {listed}.")


def _overflow(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    own = table[table.task.str.contains("resnet50")]
    if own.empty:
        return out_of_reach(
            claim,
            "This preset has no ResNet-50 on ImageNet. LiSSA is linear in the gradient, so its norm alone cannot "
            f"make one point overflow; a batch too small for convergence can. All networks here: "
            f"{_overflows(table)}",
        )
    why = "The paper's |B| is below 2 tr / lambda_max for this model: printed-batch of lissa-tab1."
    count = int(own[own.seed == 0].lissa_overflow.sum())
    return judge_claim(claim, float(count), exact(count, kind="count"), if_not_reproduced=why)


def _pbrf_overflow(claim: Claim, table: pd.DataFrame) -> ClaimResult:
    if not (table.pbrf_overflow | table.lissa_overflow).any():
        return out_of_reach(claim, f"Nothing overflows in {len(table)} runs of LiSSA and of SGD.")
    alone = table.pbrf_overflow & ~table.lissa_overflow
    by_task = ", ".join(f"{task} {number}" for task, number in alone.groupby(table.task).sum().items() if number)
    why = (
        f"SGD overflows where LiSSA on the same batches is finite: {by_task}. Beyond the quadratic range the "
        "objective is steeper than its linearisation, so that SGD, in double precision, still overflows first."
    )
    count = int(alone.sum())
    return judge_claim(claim, float(count), exact(count, kind="count"), if_not_reproduced=why)


# ------------------------------------------------------------------------------------ draw
def draw(computed: Computed) -> dict[str, Figure]:
    """Return Fig. 1 (four points of three tasks, C = 2), and others, the fitted one by other batches and exact."""
    return {"figure.png": headline(computed), "figure_more.png": choices(computed)}
