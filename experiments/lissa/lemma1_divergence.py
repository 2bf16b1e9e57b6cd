"""Lemma 1: the mean of LiSSA converges and its second moment diverges (Klochkov & Liu 2024, App. B.4).

make lissa-lemma1 PRESET=smoke|embedded|laptop|paper ARGS="num_trials=10000"

The lemma's binary task, over spectra and dimensions (lemma1_trials): trials of `Lissa` from u_0 = 0 for the
gradient of one example, and of the same iteration with g = 0 from the start that grows fastest, against the exact
recursion of the second moments (lemma1_moments), for |B| below and above both thresholds: the paper's, and the one
where the recursion's spectral radius is 1. Only t <= 20: later E‖u_t‖² is carried by trials too rare to be drawn.
For the same reason a diverging second moment does not say what a single run does: the growth of the typical trial,
log‖u_t‖ / t, is measured beside it.

Misprints that matter: in this task E H_t² - H² is (tr(H) H - H²) / |B|, not tr(H) H / |B|; the proof's R_k is not
R^k (see lemma1_moments); λ is both the damping and the eigenvalue of R; an eigenvalue of exactly 1 gives a bounded
second moment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig
from torch import Tensor

from curvlab import runs
from curvlab.reporting import save_claims
from curvlab.runs import Run
from experiments.lissa import lemma1_moments as moments
from experiments.lissa.lemma1_claims import judge_claims
from experiments.lissa.lemma1_plot import draw
from experiments.lissa.lemma1_trials import SignedFeatures, homogeneous_errors, lissa_errors, typical_growth


@runs.main("lissa/lemma1_divergence")
def main(cfg: DictConfig) -> None:
    """Compute, tabulate, judge, draw."""
    with runs.start(cfg, paper="lissa", item="lemma1", title="Lemma 1: mean and second moment") as run:
        limits, errors, growth = [], [], []
        for damping in cfg.dampings:
            for case in cfg.cases:
                eigenvalues = moments.spectrum(case.spectrum, case.size)
                names = {"spectrum": case.spectrum, "size": case.size, "damping": float(damping)}
                limits.append(
                    names | thresholds(eigenvalues, damping) | {"constant": condition_constant(eigenvalues)}
                )
                if case.trials and damping in cfg.trial_dampings:
                    for role, batch_size in batch_sizes(eigenvalues, damping).items():
                        setting = names | {"role": role, "batch_size": batch_size}
                        measured = _measure(run, cfg, eigenvalues, setting)
                        errors += [setting | row for row in measured["errors"]]
                        growth.append(setting | measured["growth"])
        tables = [pd.DataFrame(rows) for rows in (errors, limits, growth)]
        for table, name in zip(tables, ("table.csv", "thresholds.csv", "growth.csv"), strict=True):
            run.save_table(table, name)
        save_claims(run.folder, judge_claims(*tables))
        for name, figure in draw(*tables).items():
            run.save_figure(figure, name)
        run.note(
            scale={
                "spectra": {"ours": [f"{case.spectrum}, {case.size}" for case in cfg.cases], "paper": "any"},
                "damping / λmax": {"ours": [float(damping) for damping in cfg.dampings], "paper": "any"},
                "damping / λmax of trials": {"ours": [float(d) for d in cfg.trial_dampings], "paper": "any"},
                "trials": {"ours": cfg.num_trials, "paper": "expectation"},
                "steps": {"ours": cfg.num_steps, "paper": "limit"},
            },
            seeds=[cfg.seed],
        )


def recommended_step_size(eigenvalues: Tensor, damping: float) -> float:
    """Return 1 / (λmax + damping) of Corollary 1; the step sizes of the lemma go up to 1 / λmax."""
    return 1 / (float(eigenvalues.max()) + damping)


def thresholds(eigenvalues: Tensor, damping: float) -> dict[str, float]:
    """Return the |B| below which the second moment diverges: as printed, by R, exactly; and radii at R's.

    At 1 / (λmax + damping), and (`_largest`) at 1 / λmax, the largest step size that the lemma admits.
    """
    found = {"printed": moments.printed_threshold(eigenvalues, damping)}
    for suffix, step_size in (
        ("", recommended_step_size(eigenvalues, damping)),
        ("_largest", 1 / float(eigenvalues.max())),
    ):
        sufficient = moments.sufficient_threshold(eigenvalues, damping, step_size=step_size)
        found["sufficient" + suffix] = sufficient
        found["exact" + suffix] = moments.exact_threshold(eigenvalues, damping, step_size=step_size)
        batch_size = max(math.floor(sufficient), 1)  # the largest for which R has an eigenvalue of at least 1
        settings = {"step_size": step_size, "batch_size": batch_size}
        found["batch_size" + suffix] = batch_size
        found["printed_radius" + suffix] = float(moments.printed_matrix(eigenvalues, damping, **settings).max())
        found["radius" + suffix] = moments.spectral_radius(eigenvalues, damping, **settings)
    return found


def condition_constant(eigenvalues: Tensor) -> float:
    """Return |B| [E‖H_t v‖² - ‖H v‖²] / (tr(H) vᵀHv) for v the top eigenvector, equal in all draws."""
    v = torch.zeros(len(eigenvalues), 8, dtype=eigenvalues.dtype)
    v[int(eigenvalues.argmax())] = 1
    operator = SignedFeatures(eigenvalues, num_trials=8)
    drawn = operator.sample(1, torch.Generator().manual_seed(0)) @ v
    squares = drawn.square().sum(0) - (operator @ v).square().sum(0)
    return float((squares / (eigenvalues.sum() * (v * (operator @ v)).sum(0))).mean())


def batch_sizes(eigenvalues: Tensor, damping: float) -> dict[str, int]:
    """Return whole |B| by role: half, below, between the exact threshold and R's, double the paper's."""
    limits = thresholds(eigenvalues, damping)
    exact, sufficient = limits["exact"], limits["sufficient"]
    found = {"half": max(math.floor(exact / 2), 1), "below": max(math.floor(exact), 1)}
    if (between := math.floor(exact) + 1) <= sufficient:
        found["between"] = between
    found["double"] = math.ceil(2 * limits["printed"])
    return {role: size for role, size in found.items() if role != "half" or size != found["below"]}


def _measure(run: Run, cfg: DictConfig, eigenvalues: Tensor, setting: dict[str, Any]) -> dict[str, Any]:
    names = [setting[key] for key in ("spectrum", "size", "damping", "batch_size")]
    counts = {"num_trials": cfg.num_trials, "num_steps": cfg.num_steps, "shown_steps": list(cfg.shown_steps)}
    damping = setting["damping"]
    settings = {
        "step_size": recommended_step_size(eigenvalues, damping),
        "batch_size": setting["batch_size"],
    }

    def compute_errors() -> dict[str, Any]:
        start = moments.growing_start(eigenvalues, damping, **settings)
        generator = run.generator("lemma1", *names)
        sizes = {"num_steps": cfg.num_steps, "num_trials": cfg.num_trials, "generator": generator}
        gradient = eigenvalues.sqrt()  # of one example, up to signs
        trials = {
            "lissa": lissa_errors(eigenvalues, damping, **settings, gradient=gradient, **sizes),
            "growing": homogeneous_errors(eigenvalues, damping, **settings, start=start, **sizes),
        }
        inputs = {"lissa": (gradient, torch.zeros_like(start)), "growing": (torch.zeros_like(start), start)}
        rows: list[dict[str, Any]] = []
        for name, blocks in trials.items():
            rows += _rows(
                name,
                blocks,
                eigenvalues,
                damping,
                settings=settings,
                inputs=inputs[name],
                shown=list(cfg.shown_steps),
            )
        return {"rows": rows}

    def compute_growth() -> dict[str, Any]:
        rates = typical_growth(
            eigenvalues, damping, **settings, **cfg.growth, generator=run.generator("growth", *names)
        )
        radius = moments.spectral_radius(eigenvalues, damping, **settings)
        return {
            "radius": radius,
            "half_log_radius": math.log(radius) / 2,
            "growth": float(rates.mean()),
            "growth_stderr": float(rates.std()) / math.sqrt(len(rates)),
            "num_trials": len(rates),
        }

    return {
        "errors": _unit(run, "lissa/lemma1_errors", {**setting, **counts}, compute_errors)["rows"],
        "growth": _unit(run, "lissa/lemma1_growth", {**setting, **dict(cfg.growth)}, compute_growth),
    }


def _unit(run: Run, name: str, config: dict[str, Any], compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    key = {name: value for name, value in config.items() if name != "role"}
    return run.unit(name, key | {"version": 1}, compute)


def _rows(
    name: str,
    blocks: Iterator[Tensor],
    eigenvalues: Tensor,
    damping: float,
    *,
    settings: dict[str, Any],
    inputs: tuple[Tensor, Tensor],
    shown: list[int],
) -> list[dict[str, Any]]:
    """Return one row a shown step: measured and exact second moment and mean, relative to the start's."""
    gradient, start = inputs
    steps = torch.tensor(shown)
    first = start - gradient / (eigenvalues + damping)
    scale = float(first @ first)
    squares, projections = [], []
    for errors in blocks:
        squares.append(errors[steps].square().sum(1) / scale)
        projections.append((first[:, None] * errors[steps]).sum(1) / scale)
    square, projection = torch.cat(squares, dim=1), torch.cat(projections, dim=1)
    means, exact = moments.exact_errors(
        eigenvalues, damping, **settings, gradient=gradient, start=start, num_steps=max(shown)
    )
    printed = moments.printed_growth(eigenvalues, damping, **settings, start=start, num_steps=max(shown))
    root = math.sqrt(square.shape[1])
    rows = []
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
                "second_moment_printed": float(printed[step]) / scale if name == "growing" else math.nan,
                "z": 0.0 if certain else (measured - expected) / stderr,
                "mean": float(projection[index].mean()),
                "mean_stderr": float(projection[index].std()) / root,
                "mean_exact": float(means[step] @ first) / scale,
                "mean_bound": (1 - damping * settings["step_size"]) ** step,
                "num_trials": square.shape[1],
            }
        )
    return rows


if __name__ == "__main__":
    main()
