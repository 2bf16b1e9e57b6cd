"""Learning coefficients: agreement with devinterp 1.3.2, and seconds beside it and beside the arithmetic.

make bench-llc PRESET=smoke|embedded|laptop|paper

The same model, hyperparameters, number of chains and draws for everybody, and the same initial loss over all the
data. devinterp's default nbeta takes the batch for the data (n = batch size), so it is passed; it samples in
`train()` mode, which changes nothing for a fully connected net. Methods take turns, so that a busy machine slows
all of them, and a ratio is that of neighbours. The floor is the matrix products alone that these chains
need, forward and backward, without anything around them; the normals stand beside it.

devinterp reads a shuffled loader, so a step's batch is new to the chain until the epoch is over, and its loss is
that of unseen examples: above L(w) by about lr/B E|g_i|² times the share of examples seen, lr = step_size nbeta/2.
With replacement, as `estimate_llc` draws, it is unbiased; devinterp is shown with both samplers.

known.csv, beside it: polynomials whose value at this n is known by quadrature (see llc_known).
"""

from __future__ import annotations

import os
from functools import partial
from itertools import product
from typing import Any

import pandas as pd
from omegaconf import DictConfig

from curvlab import runs
from curvlab.reporting import save_claims, t_interval
from curvlab.sampling import default_nbeta
from experiments.benchmarks.llc_known import draw_known, known_table
from experiments.benchmarks.llc_methods import METHODS, Setting, available, floor_seconds, measure
from experiments.benchmarks.llc_plot import draw
from experiments.benchmarks.threads import threads
from experiments.task import Task, build_task

Turn = tuple[int, int]  # threads, repeat


@runs.main("benchmarks/llc")
def main(cfg: DictConfig) -> None:
    """Estimate, time, tabulate, draw."""
    with runs.start(cfg, paper="benchmarks", item="llc", title="Learning coefficients beside devinterp") as run:
        methods = [name for name in METHODS if available(name)]
        task = build_task(run, cfg)
        turns = list(product(cfg.num_threads, range(cfg.num_repeats)))
        results = {
            turn: run.unit(
                "llc_benchmark",
                _key(task, cfg, methods, turn),
                partial(_repeat, run, task, cfg, methods, turn),
            )
            for turn in run.progress(turns, "repeats")
        }
        table = pd.DataFrame([row for turn in results for row in _rows(task, turn, results[turn], methods)])
        save_claims(run.folder, [])  # no paper compares these
        run.save_table(table)
        summary = summary_table(table)
        run.save_table(summary, "summary.csv")
        floors = {
            num_threads: run.unit(
                "llc_floor",
                {**_key(task, cfg, [], (num_threads, 0)), "version": 1},
                partial(_floor, task, cfg, num_threads),
            )
            for num_threads in cfg.num_threads
        }
        run.save_table(timing_table(results, floors, methods), "timings.csv")
        run.save_figure(draw(summary, pd.read_csv(run.folder / "timings.csv")))
        known = known_table(run, cfg.known)
        run.save_table(known, "known.csv")
        run.save_figure(draw_known(known), "known.png")
        missing = [name for name in METHODS if name not in methods]
        run.note(
            scale={"chains": cfg.num_chains, "draws": cfg.num_draws, "repeats": cfg.num_repeats},
            threads=list(cfg.num_threads),
            load_average=round(os.getloadavg()[0], 1),
            reduced=[f"{name} is not installed" for name in missing],
        )


def _key(task: Task, cfg: DictConfig, methods: list[str], turn: Turn) -> dict[str, Any]:
    names = (
        "num_chains",
        "num_draws",
        "num_burnin_steps",
        "batch_size",
        "step_size",
        "localization",
    )
    chosen = {name: cfg[name] for name in names}
    return {**task.key, **chosen, "methods": methods, "threads": turn[0], "repeat": turn[1], "version": 2}


def _repeat(run: runs.Run, task: Task, cfg: DictConfig, methods: list[str], turn: Turn) -> dict[str, Any]:
    """Return estimates of every chain, R-hat and seconds by method."""
    setting = _setting(task, cfg)
    num_threads, repeat = turn
    # Turn about: the first of one repeat is the last of the next.
    order = methods if repeat % 2 == 0 else methods[::-1]
    with threads(num_threads):
        return {name: measure(name, setting, run.generator("llc", name, *turn)) for name in order}


def _setting(task: Task, cfg: DictConfig) -> Setting:
    return Setting(
        model=task.model,
        data=task.train,
        num_chains=cfg.num_chains,
        num_draws=cfg.num_draws,
        num_burnin_steps=cfg.num_burnin_steps,
        batch_size=cfg.batch_size,
        step_size=cfg.step_size,
        localization=cfg.localization,
        nbeta=default_nbeta(task.num_train),
        initial_loss=task.train_loss,
    )


def _floor(task: Task, cfg: DictConfig, num_threads: int) -> dict[str, Any]:
    with threads(num_threads):
        return dict(floor_seconds(_setting(task, cfg), num_steps=20))


def _rows(task: Task, turn: Turn, result: dict[str, Any], methods: list[str]) -> list[dict[str, Any]]:
    shared = {"model": task.name, "parameters": task.num_parameters, "n": task.num_train}
    shared |= {"threads": turn[0], "repeat": turn[1]}
    return [
        shared | {"method": name, "chain": chain, "llc": value, "rhat": result[name]["rhat"]}
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


if __name__ == "__main__":
    main()
