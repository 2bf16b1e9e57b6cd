"""Estimates of every chain and seconds by method, and estimates where the value is known."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pandas as pd
from omegaconf import DictConfig

from curvlab.lab import runs, t_interval, task_settings
from curvlab.sampling import default_nbeta
from experiments.benchmarks.gauges import kernel_threads, load_average
from experiments.benchmarks.llc.default_sampler import default_sampler_table
from experiments.benchmarks.llc.known import known_table
from experiments.benchmarks.llc.methods import METHODS, Setting, available, floor_seconds, measure
from experiments.benchmarks.llc.power import power_table
from experiments.shared.task import Task, TrainedTask

Turn = tuple[int, int]  # threads, repeat


def compute(run: runs.Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return estimates by chain, their means, seconds by method, the known answers, and the diagnostics' power."""
    methods = [name for name in METHODS if available(name)]
    ((name, settings),) = task_settings(cfg).items()
    task = Task.load(run, name, settings).trained()
    results, floors = _results(run, task, settings, methods), _floors(run, task, settings)
    table = pd.DataFrame([row for turn in results for row in _rows(task, turn, results[turn], methods)])
    run.note(
        load_average=load_average(),
        reduced=[f"{name} is not installed" for name in METHODS if name not in methods],
    )
    return {
        "table": table,
        "summary": summary_table(table),
        "timings": timing_table(results, floors, methods),
        "known": known_table(run, cfg.known),
        "power": power_table(run, cfg.power),
        "default_sampler": default_sampler_table(run, task, settings),
    }


def _results(
    run: runs.Run, task: TrainedTask, settings: DictConfig, methods: list[str]
) -> dict[Turn, dict[str, Any]]:
    found = {}
    for turn in run.progress(list(product(settings.num_threads, range(settings.num_repeats))), "repeats"):
        key = _key(task, settings) | {"methods": methods, "threads": turn[0], "repeat": turn[1]}
        repeat = partial(_repeat, run, task, settings, methods, turn)
        about = f"LLC of {task.label}, {turn[0]} threads, repeat {turn[1]}"
        found[turn] = run.unit("benchmarks/llc", key, repeat, version=2, about=about)
    return found


def _floors(run: runs.Run, task: TrainedTask, settings: DictConfig) -> dict[int, dict[str, float]]:
    found = {}
    for num_threads in settings.num_threads:
        key = _key(task, settings) | {"threads": num_threads}
        about = f"floor of {task.label}, {num_threads} threads"
        floor = partial(_floor, task, settings, num_threads)
        found[num_threads] = run.unit("benchmarks/llc_floor", key, floor, version=1, about=about)
    return found


def _key(task: TrainedTask, settings: DictConfig) -> dict[str, Any]:
    return task.key | _sampling(settings)


def _sampling(settings: DictConfig) -> dict[str, Any]:
    names = ("num_chains", "num_draws", "num_burnin_steps", "batch_size", "step_size", "localization")
    return {name: settings[name] for name in names}


def _repeat(
    run: runs.Run, task: TrainedTask, settings: DictConfig, methods: list[str], turn: Turn
) -> dict[str, Any]:
    """Return estimates of every chain, R-hat and seconds by method."""
    setting = _setting(task, settings)
    num_threads, repeat = turn
    # Turn about: the first of one repeat is the last of the next.
    order = methods if repeat % 2 == 0 else methods[::-1]
    with kernel_threads(num_threads):
        return {name: measure(name, setting, run.generator("llc", name, *turn)) for name in order}


def _setting(task: TrainedTask, settings: DictConfig) -> Setting:
    return Setting(
        model=task.model,
        data=task.train,
        **_sampling(settings),
        nbeta=default_nbeta(task.num_train),
        initial_loss=task.train_loss,
    )


def _floor(task: TrainedTask, settings: DictConfig, num_threads: int) -> dict[str, Any]:
    with kernel_threads(num_threads):
        return dict(floor_seconds(_setting(task, settings), num_steps=20))


def _rows(task: TrainedTask, turn: Turn, result: dict[str, Any], methods: list[str]) -> list[dict[str, Any]]:
    shared = {"model": task.label, "parameters": task.num_parameters, "n": task.num_train}
    shared |= {"threads": turn[0], "repeat": turn[1]}
    return [
        shared
        | {"method": name, "chain": chain, "llc": value}
        | {key: result[name][key] for key in ("rhat", "problem")}
        for name in methods
        for chain, value in enumerate(result[name]["per_chain"])
    ]


def summary_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return each method's mean over all chains of all repeats, with its 95 % t interval."""
    rows = []
    for (model, method), own in table.groupby(["model", "method"], sort=False):
        interval = t_interval(own.llc.to_numpy(), unit="chains")
        rows.append(
            {
                "model": model,
                "parameters": own.parameters.iloc[0],
                "n": own.n.iloc[0],
                "method": method,
                "chains": len(own),
                "llc": own.llc.mean(),
                "low": interval.low,
                "high": interval.high,
                "between_chains": own.llc.std(),
                "worst_rhat": own.rhat.max(),
                "problems": "; ".join(sorted(set(own.problem) - {""})),
            }
        )
    summary = pd.DataFrame(rows)
    ours = summary[summary.method == "curvlab"].iloc[0]
    summary["overlaps_curvlab"] = (summary.low <= ours.high) & (summary.high >= ours.low)
    return summary


def timing_table(
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
            times = pd.DataFrame([result[name] for result in own])[["seconds", "cpu_seconds"]]
            ours = pd.DataFrame([result["curvlab"] for result in own])[["seconds", "cpu_seconds"]]
            rows.append(
                {
                    "method": name,
                    "threads": num_threads,
                    "seconds": times.seconds.median(),
                    "fastest": times.seconds.min(),
                    "slowest": times.seconds.max(),
                    "cpu_seconds": times.cpu_seconds.median(),
                    "to_curvlab": (times.seconds / ours.seconds).median(),
                    "cpu_to_curvlab": (times.cpu_seconds / ours.cpu_seconds).median(),
                }
            )
        for label, name in {"matrix products alone": "products", "normals alone": "normals"}.items():
            clock, cpu = floors[num_threads][name], floors[num_threads][f"{name}_cpu"]
            known = {"seconds": clock, "fastest": clock, "slowest": clock, "cpu_seconds": cpu}
            rows.append({"method": label, "threads": num_threads, **known})
    return pd.DataFrame(rows)
