"""Lemma 1: the mean of LiSSA converges and its second moment diverges (Klochkov & Liu 2024, App. B.4).

make lissa-lemma1 PRESET=smoke|embedded|laptop|paper ARGS="num_trials=10000"

The lemma's binary task, over spectra and dimensions (trials.py): trials of `Lissa` from u_0 = 0 for the
gradient of one example, and of the same iteration with g = 0 from the start that grows fastest, against the exact
recursion of the second moments (second_moments.py), for |B| below and above both thresholds: the paper's, and the
one where the recursion's spectral radius is 1. Only t <= 20: later E‖u_t‖² is carried by trials too rare to be
drawn. For the same reason a diverging second moment does not say what a single run does: the growth of the typical
trial, log‖u_t‖ / t, is measured beside it.

The lemma says that such a task exists, and the proof takes any H. Misprints of the proof that matter: in its task
E H_t² - H² is (tr(H) H - H²) / |B|, not tr(H) H / |B|; its R_k is not R^k (see second_moments.py); λ is both the
damping and the eigenvalue of R. With isotropic inputs the lemma holds (table `isotropic`).
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import DictConfig
from torch import Tensor

from curvlab.lab import ClaimResult, ClaimSheet, Computed, Run, Target, panels, plots, unit
from experiments.lissa import second_moments
from experiments.lissa.second_moments import batch_sizes, recommended_step_size, spectrum, thresholds
from experiments.lissa.trials import (
    IsotropicFeatures,
    SignedFeatures,
    iterates_from,
    lissa_iterates,
    signed_blocks,
    typical_growth,
)
from experiments.shared.worst_case import farthest_ratio, judge_row

TARGET = Target(
    __name__,
    title="Lemma 1: mean and second moment",
    paper={
        "thresholds.csv:spectrum": "any, by the proof",
        "thresholds.csv:size": "any, by the proof",
        "dampings": "any",
        "trial_dampings": "any",
        "num_trials": "expectation",
        "num_steps": "limit",
    },
)
Row = dict[str, Any]
ABOUT = "{spectrum}, n = {size}, damping {damping:g}, |B| = {batch_size}"
ROLES = {  # of |B|: see `batch_sizes`
    "half": "half the exact threshold",
    "below": "just below it",
    "between": "just above it, R > 1",
    "double": "twice the printed one",
}


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return `table`, `thresholds` of |B|, `growth` of typical trials, and `isotropic`: another task.

    Columns of `table`, errors over steps: spectrum, size, damping, role of the batch size (see `batch_sizes`),
    batch_size, start ("lissa": u_0 = 0, the gradient of one example; "growing": g = 0, the start that grows
    fastest), step, and what `_errors` gives. Columns of `isotropic`: size, damping, |B|, the same errors, and what
    `isotropic_limits` gives.

    Args:
        run: seeds and store.
        cfg: `cases` (spectrum, size, trials: whether trials are run), `isotropic` (sizes), `dampings`,
            `trial_dampings`, `num_trials`, `num_steps`, `shown_steps`, `growth` (arguments of `typical_growth`).
    """
    limits, errors, growth, isotropic = [], [], [], []
    sizes = {"num_trials": cfg.num_trials, "num_steps": cfg.num_steps, "shown": list(cfg.shown_steps)}
    for damping in cfg.dampings:
        for case in cfg.cases:
            eigenvalues = spectrum(case.spectrum, case.size)
            names = {"spectrum": case.spectrum, "size": case.size, "damping": float(damping)}
            limits.append(names | thresholds(eigenvalues, damping) | {"constant": condition_constant(eigenvalues)})
            if not case.trials or damping not in cfg.trial_dampings:
                continue
            for role, batch_size in batch_sizes(eigenvalues, damping).items():
                key, setting = names | {"batch_size": batch_size}, names | {"role": role, "batch_size": batch_size}
                errors += [setting | row for row in _errors(run, eigenvalues, **key, **sizes)["rows"]]
                growth.append(setting | _growth(run, eigenvalues, **key, **cfg.growth))
        for size in cfg.isotropic:
            found = second_moments.isotropic_limits(size, damping)
            key = {"spectrum": "isotropic", "size": size, "damping": float(damping)}
            key["batch_size"] = found["batch_size"]
            rows = _errors(run, spectrum("flat", size), **key, **sizes)["rows"]
            isotropic += [{"size": size, "damping": float(damping)} | found | row for row in rows]
    run.note(seeds=[cfg.seed])
    tables = {"table": errors, "thresholds": limits, "growth": growth, "isotropic": isotropic}
    return {name: pd.DataFrame(rows) for name, rows in tables.items()}


def condition_constant(eigenvalues: Tensor) -> float:
    """Return |B| [E‖H_t v‖² - ‖H v‖²] / (tr(H) vᵀHv) for v the top eigenvector, equal in all draws."""
    v = torch.zeros(len(eigenvalues), 8, dtype=eigenvalues.dtype)
    v[int(eigenvalues.argmax())] = 1
    operator = SignedFeatures(eigenvalues, num_trials=8)
    drawn = operator.sample(1, torch.Generator().manual_seed(0)) @ v
    squares = drawn.square().sum(0) - (operator @ v).square().sum(0)
    return float((squares / (eigenvalues.sum() * (v * (operator @ v)).sum(0))).mean())


def _lissa_settings(eigenvalues: Tensor, setting: Row) -> Row:
    step_size = recommended_step_size(eigenvalues, setting["damping"])
    return {"damping": setting["damping"], "step_size": step_size, "batch_size": setting["batch_size"]}


@unit("lissa/lemma1_errors", version=2, about=f"errors of {ABOUT}")
def _errors(
    run: Run, eigenvalues: Tensor, /, *, num_trials: int, num_steps: int, shown: list[int], **setting: Any
) -> Row:
    """Return one row for each start and shown step: measured and exact, relative to the start's ‖u_0 - u*‖².

    second_moment: E‖u_t - u*‖², with _stderr over trials, _exact by the recursion and _printed, u_0ᵀ R^t u_0;
    z: (measured - exact) / stderr. mean: ⟨E u_t - u*, u_0 - u*⟩, with _stderr and _exact. mean_norm: ‖E u_t - u*‖,
    exact, relative to ‖u_0 - u*‖; mean_bound, (1 - ηλ)^t, bounds it.
    """
    settings, rows, kind, noise = _lissa_settings(eigenvalues, setting), [], SignedFeatures, None
    if setting["spectrum"] == "isotropic":
        drawn = {name: settings[name] for name in ("step_size", "batch_size")}
        kind, noise = IsotropicFeatures, second_moments.isotropic_noise(len(eigenvalues), **drawn)
    zero, gradient = torch.zeros_like(eigenvalues), eigenvalues.sqrt()  # of one example, up to signs
    growing = second_moments.growing_start(eigenvalues, **settings)
    sizes: Row = {"num_steps": num_steps, "generator": run.generator("lemma1", *setting.values())}
    for name, g, start in (("lissa", gradient, zero), ("growing", zero, growing)):
        solution = g / (eigenvalues + settings["damping"])
        first = start - solution
        scale, root = float(first @ first), math.sqrt(num_trials)
        squares, projections = [], []
        for block in signed_blocks(eigenvalues, num_trials, settings["batch_size"], kind):
            if name == "lissa":
                iterates = lissa_iterates(block, g, **settings, **sizes, shown=shown)
            else:
                path = iterates_from(block, g, start, **settings, **sizes)
                iterates = torch.stack(list(path))[shown]
            deviations = iterates - solution[:, None]
            squares.append(deviations.square().sum(1) / scale)
            projections.append((first[:, None] * deviations).sum(1) / scale)
        square, projection = torch.cat(squares, dim=1), torch.cat(projections, dim=1)
        means, exact = second_moments.exact_errors(
            eigenvalues, **settings, gradient=g, start=start, num_steps=max(shown), noise=noise
        )
        printed = second_moments.printed_growth(eigenvalues, **settings, start=start, num_steps=max(shown))
        for index, step in enumerate(shown):
            measured, stderr = float(square[index].mean()), float(square[index].std()) / root
            expected = float(exact[step].sum()) / scale
            certain = abs(measured - expected) <= 1e-9 * expected  # e.g. the first step from 0 is the same in all
            rows.append(
                {
                    "start": name,
                    "step": step,
                    "second_moment": measured,
                    "second_moment_stderr": stderr,
                    "second_moment_exact": expected,
                    "second_moment_printed": float(printed[step]) / scale
                    if name == "growing" and noise is None
                    else math.nan,
                    "z": 0.0 if certain else (measured - expected) / stderr,
                    "mean": float(projection[index].mean()),
                    "mean_stderr": float(projection[index].std()) / root,
                    "mean_exact": float(means[step] @ first) / scale,
                    "mean_norm": float(means[step].norm()) / math.sqrt(scale),
                    "mean_bound": (1 - settings["damping"] * settings["step_size"]) ** step,
                    "num_trials": num_trials,
                }
            )
    return {"rows": rows}


@unit("lissa/lemma1_growth", version=1, about=f"growth of {ABOUT}")
def _growth(run: Run, eigenvalues: Tensor, /, *, num_steps: int, num_trials: int, **setting: Any) -> Row:
    """Return the growth rate of the typical trial beside that of the root of the second moment."""
    settings = _lissa_settings(eigenvalues, setting)
    sizes: Row = {"num_steps": num_steps, "num_trials": num_trials}
    rates = typical_growth(eigenvalues, **settings, **sizes, generator=run.generator("growth", *setting.values()))
    radius = second_moments.spectral_radius(eigenvalues, **settings)
    return {
        "radius": radius,
        "half_log_radius": math.log(radius) / 2,
        "growth": float(rates.mean()),
        "growth_stderr": float(rates.std()) / math.sqrt(len(rates)),
        "num_trials": len(rates),
    }


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge the proof's growth where it is the farthest off; the other claims say their value themselves."""
    table = computed["table"]
    own = table[(table.start == "growing") & (table.step == table.step.max())]
    ratios, stderrs = (own[f"second_moment{part}"] / own.second_moment_printed for part in ("", "_stderr"))
    place = farthest_ratio(ratios)
    row = own.iloc[place]
    where = f"{row.spectrum}, {row['size']}, |B| = {row.batch_size}"
    why = (
        "The proof takes E H_t R H_t for (E H_t²) R. From the recursion derived here measured values differ by "
        f"noise: (measured - exact) / stderr has a standard deviation of {table.z.std():.2f} over table.csv."
    )
    return [judge_row(claims.claim("powers-of-r"), own, ratios, place, where, why, stderrs=stderrs)]


# ------------------------------------------------------------------------------------ draw
def draw(computed: Computed) -> dict[str, Figure]:
    """Return the paper's finding and the thresholds; and the second moments of all spectra."""
    errors, limits = computed["table"], computed["thresholds"]
    cases = errors[(errors.damping == errors.damping.min()) & (errors.start == "growing")]
    figure, axes = plots.figure(1, 2, panel_size=(4.0, 3.6))
    _mean_and_second_moment(axes[0, 0], cases[cases.role == "half"])
    _thresholds(axes[0, 1], limits)
    note = f"right, flat to spike: spectra of G; left, bars: 95 % over {cases.num_trials.max():,.0f} trials"
    panels.legend(figure, columns=3, title=note)
    groups = list(cases.groupby(["spectrum", "size"], sort=False))
    columns = min(len(groups), 3)
    spectra, places = plots.figure(-(-len(groups) // columns), columns, panel_size=(3.4, 2.9))
    for ax in places.flat[len(groups) :]:
        ax.set_axis_off()
    for ax, (_, own) in zip(places.flat, groups, strict=False):
        _second_moments(ax, own)
    panels.legend(spectra, columns=2, title="points: trials, line: exact, dashed: u_0ᵀ R^t u_0")
    return {"figure.png": figure, "figure_more.png": spectra}


def _mean_and_second_moment(ax: Axes, halved: pd.DataFrame) -> None:
    """Draw what the lemma says, of the spectrum that grows the most: half of the exact threshold, g = 0."""
    last = halved[(halved.step == halved.step.max()) & (halved.mean_norm > 0)]
    most = last.loc[last.second_moment.idxmax()]
    own = halved[(halved.spectrum == most.spectrum) & (halved["size"] == most["size"])]
    own = own.assign(mean_square=own.mean_norm**2)
    shown = {"second_moment": "LiSSA, E‖u_t - u*‖², trials", "mean_square": "LiSSA's mean, ‖E u_t - u*‖², exact"}
    for column, label in shown.items():
        ends: Row = {"stderr": "second_moment_stderr", "bars": True} if column == "second_moment" else {}
        panels.lines(ax, own, x="step", y=column, label=label, styles=panels.styles_of(shown.values()), **ends)
    title = f"the mean converges, LiSSA diverges\n({most.spectrum}, |B| = {most.batch_size})"
    panels.frame(ax, x="step t", y="relative to the start", title=title, log="y")


def _second_moments(ax: Axes, growing: pd.DataFrame) -> None:
    """Points: measured, with error bars; line: exact; dashed: u_0ᵀ R^t u_0."""
    styles = panels.styles_of(ROLES)
    for role, label in ROLES.items():
        own = growing[growing.role == role]
        look: Row = {"styles": {"": styles[role]}, "marker": "", "linewidth": 1}
        if own.empty:
            continue
        points: Row = {"stderr": "second_moment_stderr", "bars": True, "linestyle": "none", "label": label}
        panels.lines(ax, own, x="step", y="second_moment", styles={label: styles[role]}, **points)
        panels.lines(ax, own, x="step", y="second_moment_exact", **look)
        panels.lines(ax, own, x="step", y="second_moment_printed", linestyle="--", **look)
    panels.frame(ax, x="step t", y="E‖u_t‖² / ‖u_0‖², g = 0", log="y")
    ax.set_title(f"{growing.spectrum.iloc[0]}, {growing['size'].iloc[0]} eigenvalues")


def _thresholds(ax: Axes, limits: pd.DataFrame) -> None:
    """Exact thresholds over printed ones by spectrum; a ring for the larger damping."""
    own = limits.assign(ratio=limits.exact_largest / limits.printed, ring=limits.damping > limits.damping.min())
    panels.scatter(ax, own, x="printed", y="ratio", by="spectrum", identity=False, hollow="ring", size=30)
    panels.rule(ax, y=1, label="the paper's Lemma 1", color="black")
    title = "batch size from which LiSSA\nconverges (rings: larger damping)"
    panels.frame(ax, x="printed threshold of |B|", y="exact / printed threshold", title=title, log="x")
    ax.set_ylim(0, 1.2)
