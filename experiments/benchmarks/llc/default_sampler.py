"""From devinterp's defaults to our settings, one change at a time; and what its shuffled batches must do to it.

devinterp reads a loader. One that shuffles gives each example once an epoch, so that a step's batch is the one on
which the chain has not descended in this epoch, while it has on those before. In an epoch of K batches two
examples at different places have gradients of covariance -Σ/(n-1), Σ = Cov(g_i), and what a step adds to w
decays with A = I - lr (H + localization/nbeta), lr = step_size nbeta/2. So, with t steps of the epoch before it,
the loss of a batch lies above L(w) by

    lr/(n-1) sum_{k<t} tr(Σ A^k),      to first order in lr;  lr/B E|g_i|² t B/n where nothing decays.

Times nbeta that is what the estimate has too much. With replacement it is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig
from scipy import stats
from torch import Tensor, nn

from curvlab.curvature import HessianOperator
from curvlab.lab import ClaimResult, ClaimSheet, Interval, out_of_reach, t_interval, unit
from curvlab.lab import judge as verdict
from curvlab.problem import stack
from curvlab.sampling import default_nbeta, estimate_llc
from experiments.benchmarks.llc.devinterp_chains import DivergedError, available, devinterp_chains
from experiments.shared.task import TrainedTask

DEFAULTS = {"step_size": 0.01, "localization": 0.0, "num_draws": 100, "num_burnin_steps": 0, "nbeta": None}
DEFAULTS |= {"initial_loss": None, "replacement": False}
MEASURED = ("initial loss", "replacement", "small batches")  # what batches do, along their chains
_SHOWN = ("estimate", "curvlab", "ratio", "sampler", "sampler_ratio")
_INTERVALS = [f"{name}{end}" for name in _SHOWN for end in ("", "_low", "_high")]
_PARTS = ("initial_loss_part", "initial_loss_sd", "sampler_told", "sampler_first_order")
COLUMNS = ("step", "change", *DEFAULTS, "batch_size", "chains", *_INTERVALS, *_PARTS, "problem")


@dataclass(frozen=True)
class _Step:
    name: str
    change: str
    setting: dict[str, Any]


def steps(ours: Mapping[str, Any], small_batch: int) -> list[_Step]:
    """Return the settings from devinterp's defaults to `ours`, a change in each, and small batches."""
    setting: dict[str, Any] = {**ours, **DEFAULTS}
    found = [_Step("defaults", "", dict(setting))]
    for name, change, *keys in (
        ("step size", "its lr is ours", "step_size"),
        ("localization", "ours, in place of none", "localization"),
        ("length", "our burn-in and draws", "num_burnin_steps", "num_draws"),
        ("nbeta", "n/ln n, n the data, not the batch", "nbeta"),
        ("initial loss", "over all the data, not its first batches", "initial_loss"),
        ("replacement", "batches drawn with replacement", "replacement"),
    ):
        setting |= {key: ours[key] for key in keys}
        found.append(_Step(name, change, dict(setting)))
    own = {**ours, "batch_size": small_batch, "replacement": False}
    found.append(_Step("small batches", "as initial loss, but smaller batches", own))
    return found


def default_sampler_table(task: TrainedTask) -> pd.DataFrame:
    """Return one row for each of `steps`: devinterp's estimate, ours at the same settings, and the parts between.

    Args:
        task: a classifier; of its settings `default_sampler` has `num_repeats` (0: no row), `num_chains`, and
            `num_measured_chains` where the batches' loss is judged, `small_batch`, `all_every`, draws between
            losses over all the data, and, of what is told, `num_states` of the chains' last and `num_probes` of
            their Σ.

    Columns `COLUMNS`: estimate is devinterp's, curvlab that of `estimate_llc`. initial_loss_part is what the first
    has more by the L(w0) that devinterp took, initial_loss_sd its standard deviation as drawing batches has it.
    sampler is what the loss of its own batches lies above that of all the data along its chains, for the steps
    `MEASURED`; sampler_told what the module's equation has for it, sampler_first_order without decay. ratio is
    estimate over curvlab + initial_loss_part + sampler_told, sampler_ratio is sampler over sampler_told. Intervals
    are 95 % t over all chains of all repeats. Without devinterp its columns are empty, and so they are where it
    diverges, which `problem` says.
    """
    settings, own = task.settings, task.settings.default_sampler
    ours = {name: settings[name] for name in ("step_size", "localization", "num_draws", "num_burnin_steps")}
    ours |= {"nbeta": default_nbeta(task.num_train), "initial_loss": task.train_loss, "replacement": True}
    ours |= {"batch_size": settings.batch_size, "num_chains": own.num_chains}
    if own.num_repeats == 0:
        return pd.DataFrame(columns=list(COLUMNS))
    rows = []
    for step in steps(ours, own.small_batch):
        found = [_repeat(task, step, repeat, own) for repeat in range(own.num_repeats)]
        shown = {name: step.setting[name] for name in (*DEFAULTS, "batch_size")} | {"nbeta": _nbeta(step.setting)}
        rows.append({"step": step.name, "change": step.change} | shown | summary(found))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _nbeta(setting: Mapping[str, Any]) -> float:
    """Return nbeta; devinterp's own is B/ln B, B the batch's size."""
    return default_nbeta(setting["batch_size"]) if setting["nbeta"] is None else setting["nbeta"]


def _repeat(task: TrainedTask, step: _Step, repeat: int, own: DictConfig) -> dict[str, Any]:
    """Return our chains' estimates and, where it is installed, devinterp's and the parts of the difference."""
    setting = step.setting
    names = ("step_size", "localization", "num_draws", "num_burnin_steps", "batch_size", "num_chains")
    of_ours = {name: setting[name] for name in names} | {"nbeta": _nbeta(setting)}
    found = dict(_ours(task, of_ours, repeat=repeat, **of_ours))
    if not available("devinterp"):
        return found
    # Elsewhere what is told of the batches is a small part of the estimate, and one state will do.
    of_peer = setting | {"all_every": None, "num_states": 1, "num_probes": 2}
    if step.name in MEASURED:
        of_peer |= {name: own[name] for name in ("all_every", "num_states", "num_probes")}
        of_peer |= {} if setting["replacement"] else {"num_chains": own.num_measured_chains}
    return found | _peer(task, of_peer, repeat=repeat, peer="devinterp 1.3.2", **of_peer)


@unit("benchmarks/llc_default_sampler_ours", version=1, about="LLC, steps of {step_size:g}, repeat {repeat}")
def _ours(task: TrainedTask, setting: dict[str, Any], /, *, repeat: int, **_: Any) -> dict[str, Any]:
    generator = task.run.generator("llc_default_sampler", "curvlab", repeat)
    llc = estimate_llc(task.model, nn.CrossEntropyLoss(), task.train, **setting, generator=generator)
    return {"curvlab": llc.per_chain.double().tolist()}


@unit("benchmarks/llc_default_sampler", version=1, about="{peer}, steps of {step_size:g}, repeat {repeat}")
def _peer(task: TrainedTask, setting: dict[str, Any], /, *, repeat: int, **_: Any) -> dict[str, Any]:
    generator = task.run.generator("llc_default_sampler", "devinterp", repeat)
    data = stack(task.train, torch.arange(task.num_train))
    seed = int(torch.randint(2**31, (), generator=generator))
    try:
        found = devinterp_chains(task.model, data, setting, seed=seed)
    except DivergedError as error:
        none = [float("nan")] * setting["num_chains"]
        lost = {"per_chain": none, "sampler": none} | dict.fromkeys(_PARTS, float("nan"))
        return lost | {"problem": f"devinterp diverges: {error}"}
    nbeta, start = _nbeta(setting), task.train_loss
    with torch.no_grad():
        spread = float(nn.functional.cross_entropy(task.model(data[0]), data[1], reduction="none").std())
    size = min(setting["num_chains"] * setting["batch_size"], task.num_train)
    share_left = 1 - size / task.num_train
    result: dict[str, Any] = {
        "per_chain": found.per_chain.tolist(),
        "sampler": (nbeta * found.own_minus_all).tolist(),
    }
    result |= dict.fromkeys(_PARTS, 0.0)
    if setting["initial_loss"] is None:
        result["initial_loss_part"] = nbeta * (start - found.initial_loss)
        result["initial_loss_sd"] = nbeta * spread * (share_left / size) ** 0.5
    if setting["replacement"]:
        return result
    # Chains as far away as the defaults take them have no minimum that their steps relax to.
    if setting["step_size"] == DEFAULTS["step_size"]:
        return result | {"sampler_told": float("nan"), "sampler_first_order": float("nan")}
    steps_of = {"lr": setting["step_size"] * nbeta / 2, "shrinkage": setting["localization"] / nbeta}
    drawn: dict[str, Any] = {"num_probes": setting["num_probes"], "generator": generator}
    states = found.last[: setting["num_states"]]
    told = [told_excess(state, data, found.positions, **steps_of, **drawn) for state in states]
    decayed, first_order = np.mean(told, axis=0)
    return result | {"sampler_told": nbeta * float(decayed), "sampler_first_order": nbeta * float(first_order)}


def told_excess(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    positions: list[int],
    *,
    lr: float,
    shrinkage: float,
    num_probes: int,
    generator: torch.Generator,
) -> tuple[float, float]:
    """Return lr/(n-1) sum_{k<t} tr(Σ A^k), the mean over t of `positions`, and the same with A = I.

    A = I - lr (H + shrinkage I), H the Hessian at the model's weights. A probe of Σ is sum_i z_i (g_i - g)/√n, z
    of random signs: one gradient. Cost: `num_probes` times max(positions) Hessian products of the data.
    """
    inputs, targets = data
    count = len(targets)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    losses = nn.functional.cross_entropy(model(inputs), targets, reduction="none")
    signs = 2.0 * torch.randint(2, (count, num_probes), generator=generator) - 1.0
    weights = (signs - signs.mean(0)).to(losses) / count**0.5  # less their mean: g_i less the mean gradient
    columns = []
    for column in weights.T:
        gradients = torch.autograd.grad(losses @ column, parameters, retain_graph=True)
        columns.append(torch.cat([gradient.flatten() for gradient in gradients]))
    probes = torch.stack(columns, 1)  # (P, num_probes)
    hessian, moved = HessianOperator(model, nn.CrossEntropyLoss(), data), probes
    traces = []  # of Σ A^k
    for power in range(max(positions)):
        if power:
            moved = moved - lr * (hessian @ moved + shrinkage * moved)
        traces.append(float((probes * moved).sum(0).double().mean()))
    sums = np.concatenate([[0.0], np.cumsum(traces)])[positions]
    scale = lr / (count - 1)
    return scale * float(sums.mean()), scale * traces[0] * float(np.mean(positions))


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row's numbers, of the repeats' (see `_repeat`)."""
    ours = np.array([repeat["curvlab"] for repeat in found])  # (repeats, chains)
    row: dict[str, Any] = {"chains": ours.size} | _with_interval("curvlab", ours)
    if "per_chain" not in found[0]:
        return row
    row["chains"] = sum(len(repeat["per_chain"]) for repeat in found)
    row |= {name: float(np.mean([repeat[name] for repeat in found])) for name in _PARTS}
    row["problem"] = next((repeat["problem"] for repeat in found if "problem" in repeat), "")
    theirs, sampler = (np.array([repeat[name] for repeat in found]) for name in ("per_chain", "sampler"))
    part = np.array([repeat["initial_loss_part"] for repeat in found])
    row |= _with_interval("estimate", theirs) | _with_interval("sampler", sampler)
    # Chains of a repeat share their L(w0): what they scatter is what is left without its part.
    own = theirs - part[:, None] + part.mean()
    row |= _ratio_interval(own, ours, row["initial_loss_part"] + np.nan_to_num(row["sampler_told"]))
    if row["sampler_told"] > 0:
        row |= _with_interval("sampler_ratio", sampler / row["sampler_told"])
    return row


def _with_interval(name: str, values: np.ndarray) -> dict[str, float]:
    if np.isnan(values).any():
        return {}
    interval = t_interval(values.ravel(), unit="chains")
    return {name: float(values.mean()), f"{name}_low": interval.low, f"{name}_high": interval.high}


def _ratio_interval(theirs: np.ndarray, ours: np.ndarray, parts: float) -> dict[str, float]:
    """Return mean(theirs) / (mean(ours) + parts) and its 95 % t interval (delta method)."""
    told = ours.mean() + parts
    ratio = theirs.mean() / told
    errors = theirs.std(ddof=1) / theirs.size**0.5, ratio * ours.std(ddof=1) / ours.size**0.5
    freedom = min(theirs.size, ours.size) - 1
    half = float(np.hypot(*errors) / abs(told) * stats.t.ppf(0.975, freedom))
    return {"ratio": float(ratio), "ratio_low": float(ratio - half), "ratio_high": float(ratio + half)}


# ------------------------------------------------------------------------------------ claims and figure
CLAIMS = ("default-settings", "default-sampler", "default-sampler-control")


def judge(table: pd.DataFrame, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge every step from devinterp's defaults, and what its batches do where that is measured."""
    if table.empty:
        reason = "The steps from devinterp's defaults are not run at this preset (`default_sampler.num_repeats`)."
        return [claims.unjudged(name, reason) for name in CLAIMS]
    results = []
    problems = table.assign(problem=table.get("problem", "")).fillna({"problem": ""}).set_index("step").problem
    for _, row in table.iterrows():
        of = row.step.replace(",", "").replace(" ", "-")
        found = [("default-settings", row.ratio, row.ratio_low, row.ratio_high)]
        if row.step in MEASURED and not row.replacement:
            found.append(("default-sampler", row.sampler_ratio, row.sampler_ratio_low, row.sampler_ratio_high))
        elif row.step in MEASURED:
            shares = [value / row.estimate for value in (row.sampler, row.sampler_low, row.sampler_high)]
            found.append(("default-sampler-control", *shares))
        for name, value, low, high in found:
            claim = claims.claim(name, of=of)
            if np.isnan(row.estimate):
                results.append(out_of_reach(claim, problems.get(row.step) or "devinterp is not installed."))
                continue
            why = (
                f"devinterp has {row.estimate:.4g} ({row.estimate_low:.4g} to {row.estimate_high:.4g}), curvlab "
                f"{row.curvlab:.4g}, of L(w0) {row.initial_loss_part:.3g} (± {row.initial_loss_sd:.3g} a repeat)."
            )
            if name != "default-settings":
                first_order = f"{row.sampler_first_order:.3g} to first order"
                why = f"{row.sampler:.3g} measured, {row.sampler_told:.3g} told, {first_order}."
            interval = Interval(low, high, "t 95 %, chains", int(row.chains))
            results.append(verdict(claim, float(value), interval, if_not_reproduced=why))
    return results
