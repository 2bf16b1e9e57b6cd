"""Time and memory of Gauss-Newton products, beside the peers' and beside what cannot be saved.

make bench-curvature PRESET=smoke|embedded|laptop|paper

One product needs the outputs' derivative along a vector (about two forwards, one of which the gradient needs too)
and one gradient: the floor for one vector is two forwards and one gradient. For K vectors on the same batch the
forward and its activations are shared; the aim is stated per vector (`aim_many`).

All methods take turns, round by round, in one process and on the same random batch and weights; medians count.
Time is processor time on a CPU (with one thread what an idle machine takes, whatever else runs), elapsed time on a
GPU. Vectors lie as each library wants them: ours and curvlinops' as (P, K), ours with contiguous columns.
PyHessian multiplies by the Hessian, one vector at a time; without the package its rows say "not installed".
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import DictConfig, OmegaConf

from curvlab import runs
from curvlab.reporting import save_claims
from experiments.benchmarks.curvature_measure import measure_peak, measure_times
from experiments.benchmarks.curvature_plot import draw
from experiments.benchmarks.curvature_products import NotInstalledError, build_case, products
from experiments.benchmarks.threads import threads

UNITS = ("forward", "gradient")
MUST_WORK = (*UNITS, "curvlab")  # peers do not take every model


@runs.main("benchmarks/curvature")
def main(cfg: DictConfig) -> None:
    """Measure, tabulate, draw."""
    title = "Time and memory of Gauss-Newton products"
    with runs.start(cfg, paper="benchmarks", item="curvature", title=title) as run:
        rows: list[dict[str, Any]] = []
        for name in run.progress(list(cfg.models), "models"):
            rows += _model_rows(run, str(name), cfg)
        table = pd.DataFrame(rows)
        save_claims(run.folder, [])  # no paper compares these
        run.save_table(table)
        run.save_figure(draw(table))
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
        run.note(
            scale={"rounds": cfg.num_rounds, "threads": cfg.num_threads, "load of the machine": round(load, 1)}
        )
        columns = [
            "model",
            "num_vectors",
            "method",
            "status",
            "milliseconds",
            "to_aim",
            "to_curvlinops",
            "peak_mib",
        ]
        print(table[columns].to_string(index=False, float_format=lambda value: f"{value:.3g}", na_rep=""))


def _model_rows(run: runs.Run, name: str, cfg: DictConfig) -> list[dict[str, Any]]:
    """Return one row a number of vectors and method, milliseconds a vector."""
    settings = cfg.models[name]
    shared = {
        "model_config": OmegaConf.to_container(settings, resolve=True),
        "num_rounds": cfg.num_rounds,
        "num_threads": cfg.num_threads,
        "device": run.device.type,
        "version": 3,
    }
    rows: list[dict[str, Any]] = []
    for count in cfg.num_vectors:
        key = {**shared, "num_vectors": count, "methods": list(cfg.methods)}
        measured = run.unit("benchmarks/curvature", key, partial(_measured, run, name, cfg, int(count)))
        rows += _rows(name, int(count), settings, measured, list(cfg.methods))
    return rows


def _measured(run: runs.Run, name: str, cfg: DictConfig, count: int) -> dict[str, Any]:
    """Return seconds of each round and the peak memory by method; else a status."""
    case = build_case(cfg.models[name], run.generator("model", name), run.device)
    methods: dict[str, Any] = {}
    status: dict[str, str] = {}
    with threads(cfg.num_threads):
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
        peaks = {method: measure_peak(compute, run.device) for method, compute in methods.items()}
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


if __name__ == "__main__":
    main()
