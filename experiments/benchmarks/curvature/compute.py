"""Milliseconds for each vector and peak memory of each method, beside a forward and a gradient."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import DictConfig, OmegaConf

from curvlab.lab import runs
from experiments.benchmarks.curvature.gauges import measure_peak, measure_times
from experiments.benchmarks.curvature.parts import part_rows
from experiments.benchmarks.curvature.products import NotInstalledError, build_case, products
from experiments.benchmarks.timing import kernel_threads, load_average

UNITS = ("forward", "gradient")
MUST_WORK = (*UNITS, "curvlab")  # peers do not take every model


def compute(run: runs.Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return one row for each model, number of vectors and method, in milliseconds for each vector; and parts."""
    rows: list[dict[str, Any]] = []
    for name in run.progress(list(cfg.models), "models"):
        rows += _model_rows(run, str(name), cfg)
    parts = [row for name in cfg.profiles for row in part_rows(run, str(name), cfg)]
    run.note(load_average=load_average())
    return {"table": pd.DataFrame(rows)} | ({"profile": pd.DataFrame(parts)} if parts else {})


def _model_rows(run: runs.Run, name: str, cfg: DictConfig) -> list[dict[str, Any]]:
    settings, methods = cfg.models[name], list(cfg.methods)
    key = {
        "model_config": OmegaConf.to_container(settings, resolve=True),
        "num_rounds": cfg.num_rounds,
        "num_threads": cfg.num_threads,
        "device": run.device.type,
        "methods": methods,
    }
    rows: list[dict[str, Any]] = []
    for count in cfg.num_vectors:
        measure = partial(_measured, run, name, cfg, int(count))
        about = f"products of {name} with {count} vectors"
        measured = run.unit("benchmarks/curvature", key | {"num_vectors": count}, measure, version=1, about=about)
        rows += _rows(name, int(count), settings, measured, methods)
    return rows


def _measured(run: runs.Run, name: str, cfg: DictConfig, count: int) -> dict[str, Any]:
    """Return seconds of each round and the peak memory by method; else a status."""
    case = build_case(cfg.models[name], run.generator("model", name), run.device)
    methods: dict[str, Any] = {}
    status: dict[str, str] = {}
    with kernel_threads(cfg.num_threads):
        for method in (*UNITS, *cfg.methods):
            try:
                methods[method] = products(str(method), case, count)
                methods[method]()  # warm up; what fails, fails here
            except NotInstalledError:
                methods.pop(method, None)
                status[method] = "not installed"
            except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
                if method in MUST_WORK:
                    raise
                methods.pop(method, None)
                status[method] = f"failed: {str(error).splitlines()[0][:120]}"
        times = measure_times(methods, num_rounds=cfg.num_rounds, device=run.device)
        gc.collect()
        gc.freeze()  # the gauge collects garbage: what was there before need not be searched each time
        peaks = {method: measure_peak(compute, run.device) for method, compute in methods.items()}
        gc.unfreeze()
    return {
        "times": times,
        "peaks": peaks,
        "status": status,
        "num_parameters": case.num_parameters,
    }


def _rows(
    name: str, count: int, settings: DictConfig, measured: dict[str, Any], methods: list[str]
) -> list[dict[str, Any]]:
    seconds = {method: float(np.median(times)) for method, times in measured["times"].items()}
    forward, gradient = seconds["forward"], seconds["gradient"]
    aims = {
        "two forwards + one gradient": 2 * forward + gradient,
        "three forwards": 3 * forward,
        "one forward + one gradient": forward + gradient,
    }
    base = str(settings.aim_one.base if count == 1 else settings.aim_many.base)
    factor = float(settings.aim_one.factor if count == 1 else settings.aim_many.factor)
    rows = []
    for method in (*UNITS, *methods):
        row: dict[str, Any] = {"model": name, "num_vectors": count, "method": method}
        row["parameters"] = measured["num_parameters"]
        row["status"] = measured["status"].get(method, "done")
        each = seconds.get(method, float("nan")) / (1 if method in UNITS else count)
        peer = seconds.get("curvlinops", float("nan")) / count
        row["milliseconds"] = 1e3 * each
        row["base"], row["to_base"] = base, each / aims[base]
        row["aim"], row["to_aim"] = factor, each / aims[base] / factor
        row["to_curvlinops"] = float("nan") if method in UNITS else each / peer
        row["peak_mib"] = measured["peaks"].get(method, float("nan"))
        rows.append(row)
    return rows
