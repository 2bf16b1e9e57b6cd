"""Estimates of every chain and seconds by method; each method is given the same setting."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from typing import Any, cast

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from omegaconf import DictConfig
from torch import Tensor, nn

from curvlab.lab import ClaimResult, ClaimSheet, Computed, Run, exact, out_of_reach, panels, plots, unit
from curvlab.lab import judge as verdict
from curvlab.problem import stack
from curvlab.sampling import LLC, default_nbeta, effective_sample_size, estimate_llc, split_rhat
from curvlab.sampling.diagnostics import problems_of, standard_error
from experiments.benchmarks.llc import default_sampler, polynomials
from experiments.benchmarks.llc.devinterp_chains import available, devinterp_traces
from experiments.shared.gauges import LayerProducts, kernel_threads
from experiments.shared.stats import mean
from experiments.shared.task import Task, TrainedTask

SHARED = ("num_chains", "num_draws", "num_burnin_steps", "batch_size", "step_size", "localization")
PEER = "devinterp, with replacement"
Turn = tuple[int, int]  # threads, repeat
Setting = dict[str, Any]
_FLAGS = {"drift_flagged": "the loss still moves", "unmixed": "the chains have not mixed", "few": "too few draws"}


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return estimates by chain, their means, seconds by method, the known answers, and the diagnostics' power."""
    methods = [name for name in METHODS if available(name)]
    (task,) = (each.trained() for each in Task.each(run, cfg))
    settings = task.settings
    setting = {name: settings[name] for name in SHARED}
    turns = run.progress(list(product(settings.num_threads, range(settings.num_repeats))), "repeats")
    results = {turn: _repeat(task, **setting, methods=methods, threads=turn[0], repeat=turn[1]) for turn in turns}
    floors = {threads: _floor(task, **setting, threads=threads) for threads in settings.num_threads}
    table = pd.DataFrame([row for turn in results for row in _rows(task, turn, results[turn], methods)])
    run.note(reduced=[f"{name} is not installed" for name in METHODS if name not in methods])
    tables = {"table": table, "summary": summary_table(table), "timings": _timing_table(results, floors, methods)}
    tables |= {"known": polynomials.known_table(run, cfg.known), "power": power_table(run, cfg.power)}
    return tables | {"default_sampler": default_sampler.default_sampler_table(task)}


# ------------------------------------------------------------------------------------ methods
def _curvlab(task: TrainedTask, setting: Setting, generator: torch.Generator, *, vmap: bool = False) -> Tensor:
    nbeta, chunk_size = default_nbeta(task.num_train), setting["num_chains"] if vmap else None
    settings = setting | {"nbeta": nbeta, "chunk_size": chunk_size}
    llc = estimate_llc(task.model, nn.CrossEntropyLoss(), task.train, **settings, generator=generator)
    return llc.nbeta * (llc.losses - llc.initial_loss)


def _devinterp(
    task: TrainedTask, setting: Setting, generator: torch.Generator, *, replacement: bool = False
) -> Tensor:
    nbeta, initial_loss = default_nbeta(task.num_train), task.train_loss
    settings = setting | {"nbeta": nbeta, "initial_loss": initial_loss, "replacement": replacement}
    data = stack(task.train, torch.arange(task.num_train))
    seed = int(torch.randint(2**31, (), generator=generator))
    found, _ = devinterp_traces(task.model, data, settings, seed=seed)
    return nbeta * (torch.as_tensor(found["loss/trace"]) - initial_loss)


# The first is what a user gets, the second the same with parallel kernels in place of a thread for each core.
METHODS: dict[str, Callable[[TrainedTask, Setting, torch.Generator], Tensor]] = {
    "curvlab": _curvlab,
    "curvlab, one vmap": partial(_curvlab, vmap=True),
    "devinterp": _devinterp,
    PEER: partial(_devinterp, replacement=True),
}


@unit("benchmarks/llc", version=2, about="LLC of {seed_name}, {threads} threads, repeat {repeat}")
def _repeat(task: TrainedTask, /, *, methods: list[str], threads: int, repeat: int, **key: Any) -> dict[str, Any]:
    """Return estimates of every chain, R-hat and seconds by method."""
    setting = {name: key[name] for name in SHARED}
    # Turn about: the first of one repeat is the last of the next.
    order = methods if repeat % 2 == 0 else methods[::-1]
    with kernel_threads(threads):
        seeds = {name: task.run.generator("llc", name, threads, repeat) for name in order}
        return {name: _measured(name, task, setting, seed) for name, seed in seeds.items()}


def _measured(name: str, task: TrainedTask, setting: Setting, generator: torch.Generator) -> dict[str, Any]:
    """Return estimates by chain, R-hat, what `LLC.problems` would say of the draws, seconds by clock and cores.

    A short run comes first: what PyTorch loads when it is first asked for something belongs to no method.
    """
    METHODS[name](task, setting | {"num_draws": 4, "num_burnin_steps": 0}, torch.Generator().manual_seed(0))
    start, cpu_start = time.perf_counter(), time.process_time()
    draws = METHODS[name](task, setting, generator)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    rhat, (ess, ess_tail) = split_rhat(draws), (effective_sample_size(draws, kind) for kind in ("bulk", "tail"))
    quality: dict[str, Any] = {"rhat": rhat, "ess": ess, "ess_tail": ess_tail, "stderr": standard_error(draws)}
    problems = problems_of(draws, draws[:, :0], **quality)
    problem = "; ".join(text.split(":")[0] for text in problems)
    found = {"per_chain": draws.double().mean(1).tolist(), "rhat": rhat, "problem": problem}
    return found | {"seconds": seconds, "cpu_seconds": cpu_seconds}


@unit("benchmarks/llc_floor", version=1, about="floor of {seed_name}, {threads} threads")
def _floor(task: TrainedTask, /, *, threads: int, **setting: Any) -> dict[str, Any]:
    with kernel_threads(threads):
        return dict(floor_seconds(task.model, setting, num_steps=20))


def floor_seconds(model: nn.Module, setting: Mapping[str, Any], *, num_steps: int) -> dict[str, float]:
    """Return seconds, on the clock and of all cores, of the matrix products and the normals alone.

    Scaled up from `num_steps` steps.
    """
    products = LayerProducts(model, setting["batch_size"]).in_a_loop
    noise = torch.empty(sum(parameter.numel() for parameter in model.parameters()))
    normals = partial(noise.normal_, 0.0, 1.0, generator=torch.Generator().manual_seed(0))
    scale = (setting["num_burnin_steps"] + setting["num_draws"]) / num_steps
    found = {}
    works: dict[str, Callable[[], object]] = {"products": products, "normals": normals}
    for name, work in works.items():
        work()
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(num_steps * setting["num_chains"]):
            work()
        found[name] = scale * (time.perf_counter() - start)
        found[f"{name}_cpu"] = scale * (time.process_time() - cpu_start)
    return found


# ------------------------------------------------------------------------------------ tables
def _rows(task: TrainedTask, turn: Turn, result: dict[str, Any], methods: list[str]) -> list[dict[str, Any]]:
    shared = {"model": task.label, "parameters": task.num_parameters, "n": task.num_train}
    shared |= {"threads": turn[0], "repeat": turn[1]}
    rows = []
    for name in methods:
        quality = {key: result[name][key] for key in ("rhat", "problem")}
        chains = enumerate(result[name]["per_chain"])
        rows += [shared | {"method": name, "chain": chain, "llc": value} | quality for chain, value in chains]
    return rows


def summary_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return each method's mean over all chains of all repeats, with its 95 % t interval."""
    rows = []
    for (model, method), own in table.groupby(["model", "method"], sort=False):
        row = {"model": model, "parameters": own.parameters.iloc[0], "n": own.n.iloc[0], "method": method}
        value, interval = mean(own.llc, unit="chains")
        row |= {"chains": len(own), "llc": value, "low": interval.low, "high": interval.high}
        row |= {"between_chains": own.llc.std(), "worst_rhat": own.rhat.max()}
        rows.append(row | {"problems": "; ".join(sorted(set(own.problem) - {""}))})
    summary = pd.DataFrame(rows)
    ours = summary[summary.method == "curvlab"].iloc[0]
    return summary.assign(overlaps_curvlab=(summary.low <= ours.high) & (summary.high >= ours.low))


def _timing_table(
    results: dict[Turn, dict[str, Any]], floors: dict[int, dict[str, float]], methods: list[str]
) -> pd.DataFrame:
    """Return seconds of each method, medians over repeats, and of the floor; ratios to curvlab in the same repeat.

    `seconds` is on the clock, `cpu_seconds` of all cores: on a busy machine the latter says more with one thread;
    with several it counts their waiting for each other, too.
    """
    rows = []
    for num_threads in sorted(floors):
        own = [result for turn, result in results.items() if turn[0] == num_threads]
        for name in methods:
            times, ours = (
                pd.DataFrame([result[of] for result in own])[["seconds", "cpu_seconds"]]
                for of in (name, "curvlab")
            )
            row = {"method": name, "threads": num_threads, "seconds": times.seconds.median()}
            row |= {"fastest": times.seconds.min(), "slowest": times.seconds.max()}
            row["cpu_seconds"] = times.cpu_seconds.median()
            ratios = (times / ours).median()
            rows.append(row | {"to_curvlab": ratios.seconds, "cpu_to_curvlab": ratios.cpu_seconds})
        for label, name in {"matrix products alone": "products", "normals alone": "normals"}.items():
            clock, cpu = floors[num_threads][name], floors[num_threads][f"{name}_cpu"]
            known = {"seconds": clock, "fastest": clock, "slowest": clock, "cpu_seconds": cpu}
            rows.append({"method": label, "threads": num_threads, **known})
    return pd.DataFrame(rows)


# ------------------------------------------------------------------------------------ claims
CLAIMS = (*polynomials.CLAIMS, "agrees-with-devinterp", *default_sampler.CLAIMS, "valid")


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge the polynomials, the peer, its defaults, and the estimates' validity by the house's own rule."""
    table, known = computed["table"], computed["known"]
    results = polynomials.judge(known, claims, num_chains=int(computed.config["known"]["num_chains"]))
    claim = claims.claim("agrees-with-devinterp")
    if PEER in set(table.method):
        means = table.groupby(["threads", "repeat", "method"]).llc.mean().unstack()
        why = f"curvlab has {means['curvlab'].mean():.4g}, devinterp {means[PEER].mean():.4g}."
        found = mean(means[PEER] / means["curvlab"], unit="repeats")
        results.append(verdict(claim, *found, if_not_reproduced=why))
    else:
        results.append(out_of_reach(claim, "devinterp is not installed."))
    results += default_sampler.judge(computed["default_sampler"], claims)
    compared = table.drop_duplicates(["threads", "repeat", "method"]).problem.fillna("")
    kinds = {"of the methods": compared == "", "of polynomials": known.valid.astype(bool)}
    whole = pd.concat(kinds.values())
    counts = ", ".join(f"{int(valid.sum())} of {len(valid)} {kind}" for kind, valid in kinds.items())
    why = f"Valid: {counts}. {'; '.join(sorted(set(compared) - {''}))}".strip()
    share = float(whole.mean())
    interval = exact(share, kind=f"counted, {len(whole)} estimates")
    return [*results, verdict(claims.claim("valid"), share, interval, if_not_reproduced=why)]


# ------------------------------------------------------------------------------------ figures
def draw(computed: Computed) -> dict[str, Figure]:
    """Return the estimates beside the polynomials, and their seconds."""
    figure, ((left, right),) = plots.figure(1, 2, panel_size=(4.6, 3.6))
    summary = computed["summary"]
    _draw_estimates(left, summary)
    polynomials.draw(right, computed["known"])
    numbers = (summary.chains.min(), computed.config["known"]["num_chains"])
    chains = " and ".join(f"{number:.0f}" for number in numbers)
    panels.legend(figure, title=f"bars: 95 % t interval over chains, {chains} of them", axes=[right])
    more, ((ax,),) = plots.figure(1, 1, panel_size=(6.0, 3.2))
    _draw_seconds(ax, computed["timings"])
    return {"figure.png": figure, "figure_more.png": more}


def _draw_estimates(left: Axes, summary: pd.DataFrame) -> None:
    summary = summary.fillna({"problems": ""}).assign(lost=lambda own: own.problems != "")
    panels.forest(left, summary, name="method", value="llc", low="low", high="high", hollow="lost")
    hollow = "; hollow: not valid" if summary.lost.any() else ""
    panels.frame(left, x=f"estimated learning coefficient{hollow}", title=str(summary.model.iloc[0]))


def _draw_seconds(right: Axes, timings: pd.DataFrame) -> None:
    panels.bars(right, timings, name="method", value="cpu_seconds", by="threads")
    for bars in right.containers:
        right.bar_label(cast(BarContainer, bars), fmt=" %.3g s", fontsize=7)
    right.margins(x=0.3)
    if timings.threads.nunique() > 1:
        right.legend(title="threads", fontsize=7)
    right.set_xlabel("CPU seconds of all cores\n(median; on the clock: timings.csv)")


def power_table(run: Run, cfg: DictConfig) -> pd.DataFrame:
    """Return one row for each length, correlation and drift: shares of the repeats that are flagged.

    Chains are made up: 1 + a straight line + noise, an AR(1) process of known correlation, so the mean is 1, the
    line's change over the trace is a share of the estimate, and the draws are worth (1 - correlation)/(1 +
    correlation) of their number. A flag without any drift is a false alarm.

    Columns: num_chains, num_draws, correlation, worth (effective draws), drift (over the trace, of the estimate);
    drift_flagged, unmixed, few: the shares with that problem; usable: without any; strictly_mixed: within the
    limits of Vehtari et al. (2021).

    Args:
        run: seeds, store.
        cfg: num_repeats, num_chains, relative_sd (of a draw), and the lists num_draws, correlations and drifts.
    """
    rows = []
    for num_draws, correlation, drift in product(cfg.num_draws, cfg.correlations, cfg.drifts):
        cell = {"num_chains": cfg.num_chains, "num_draws": num_draws, "correlation": correlation}
        sizes = {"num_repeats": cfg.num_repeats, "relative_sd": cfg.relative_sd}
        shares = _shares(run, **cell, drift=drift, **sizes)
        worth = cfg.num_chains * num_draws * (1 - correlation) / (1 + correlation)
        rows.append(cell | {"worth": worth, "drift": drift} | shares)
    return pd.DataFrame(rows)


@unit("benchmarks/llc_power", version=1)
def _shares(
    run: Run, /, *, num_draws: int, correlation: float, drift: float, num_repeats: int, **key: Any
) -> dict[str, Any]:
    generator = run.generator("llc_power", str(num_draws), str(correlation))  # equal noise for every drift
    noise: dict[str, Any] = {"num_draws": num_draws, "correlation": correlation, "generator": generator}
    chains = 1 + key["relative_sd"] * autoregressive(num_repeats, num_chains=key["num_chains"], **noise)
    chains += drift * torch.linspace(-0.5, 0.5, chains.shape[-1], dtype=torch.float64)
    settings: dict[str, Any] = {"initial_loss": 0.0, "nbeta": 1.0, "step_size": 1.0, "localization": 0.0}
    settings |= {"num_examples": 1, "num_gradients": 0}
    found = [LLC.of_traces(draws, draws[:, :0], **settings) for draws in chains]
    shares = {
        name: sum(any(problem.startswith(text) for problem in llc.problems) for llc in found) / num_repeats
        for name, text in _FLAGS.items()
    }
    shares["usable"] = sum(llc.valid for llc in found) / num_repeats
    return shares | {"strictly_mixed": sum(llc.strictly_mixed for llc in found) / num_repeats}


def autoregressive(
    num_repeats: int, *, num_chains: int, num_draws: int, correlation: float, generator: torch.Generator
) -> Tensor:
    """Return (num_repeats, num_chains, num_draws) of stationary AR(1) processes of variance 1."""
    draws = torch.randn(num_repeats, num_chains, num_draws, generator=generator, dtype=torch.float64)
    for step in range(1, num_draws):
        draws[..., step] *= math.sqrt(1 - correlation**2)
        draws[..., step] += correlation * draws[..., step - 1]
    return draws
