"""Memory, time and rounding of one product, model by model."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from omegaconf import DictConfig, OmegaConf

from curvlab.lab import runs, t_interval
from experiments.benchmarks.models.process import Apart
from experiments.benchmarks.models.rounding import rounding_errors
from experiments.benchmarks.models.worker import DIFFERENCES, GRADIENT, LOW_MEMORY, PLAIN_GRADIENT, PRODUCT
from experiments.benchmarks.timing import load_average

MIB = 2**20


def compute(run: runs.Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return a row for each model, the repeats behind its ratios, and the errors in low precision."""
    repeats, rows, rounding = [], [], []
    with Apart() as apart:
        for name in run.progress(list(cfg.models), "models"):
            measured = _measured(run, apart, str(name), cfg)
            own = repeats_of(str(name), measured)
            errors = _errors(run, str(name), cfg)
            rows.append(summary(str(name), measured, own, errors))
            repeats.append(own)
            rounding.append(errors)
    run.note(load_average=load_average())
    return {
        "table": pd.DataFrame(rows),
        "repeats": pd.concat(repeats, ignore_index=True),
        "rounding": pd.concat(rounding, ignore_index=True),
    }


def _measured(run: runs.Run, apart: Apart, name: str, cfg: DictConfig) -> dict[str, Any]:
    task = {
        "settings": OmegaConf.to_container(cfg.models[name], resolve=True),
        "seed": run.generator("model", name).initial_seed(),
        "device": str(run.device),
        "num_threads": cfg.num_threads,
        "num_rounds": cfg.num_rounds,
        "num_repeats": cfg.num_repeats,
    }
    about = f"time and memory of {name}"
    return run.unit("benchmarks/models/cost", task, partial(apart.measure, task), version=2, about=about)


def _errors(run: runs.Run, name: str, cfg: DictConfig) -> pd.DataFrame:
    settings = OmegaConf.to_container(cfg.models[name], resolve=True)
    settings |= {"batch_size": cfg.num_rounding_examples}  # type: ignore[operator]
    key = {"settings": settings, "num_vectors": cfg.num_rounding_vectors, "device": run.device.type, "model": name}

    def rows() -> dict[str, Any]:
        generator = run.generator("rounding", name)
        vectors = cfg.num_rounding_vectors
        found = rounding_errors(settings, num_vectors=vectors, generator=generator, device=run.device)  # type: ignore[arg-type]
        return {"rows": found}

    about = f"rounding of {name}"
    found = run.unit("benchmarks/models/rounding", key, rows, version=1, about=about)
    return pd.DataFrame([{"model": name} | row for row in found["rows"]])


def repeats_of(name: str, measured: dict[str, Any]) -> pd.DataFrame:
    """Return memory in MiB of each repeat, what is held all the time included, and its ratios.

    `rise_ratio` is of what rises during the call. `plain_ratio` is over a gradient step by plain attention,
    `differences_ratio` of a product by finite differences: both were measured once.
    """
    rises = {method: np.asarray(values) for method, values in measured["rises"].items()}
    held, vector = measured["held"] / MIB, measured["vector"] / MIB
    gradient, plain = held + rises[GRADIENT], held + rises[PLAIN_GRADIENT][0]
    product, low_memory = (held + vector + rises[method] for method in (PRODUCT, LOW_MEMORY))
    return pd.DataFrame(
        {
            "model": name,
            "repeat": range(len(gradient)),
            "gradient_mib": gradient,
            "plain_gradient_mib": plain,
            "product_mib": product,
            "low_memory_mib": low_memory,
            "gradient_rise_mib": rises[GRADIENT],
            "product_rise_mib": rises[PRODUCT],
            "memory_ratio": product / gradient,
            "low_memory_ratio": low_memory / gradient,
            "plain_ratio": product / plain,
            "differences_ratio": (held + vector + rises[DIFFERENCES][0]) / gradient,
            "rise_ratio": pd.Series(rises[PRODUCT]) / pd.Series(rises[GRADIENT]),
        }
    )


def summary(name: str, measured: dict[str, Any], repeats: pd.DataFrame, errors: pd.DataFrame) -> dict[str, Any]:
    """Return one model's row: medians over repeats and rounds; of ratios to the floor means and t intervals."""
    seconds = {method: np.asarray(values) for method, values in measured["seconds"].items()}
    floor = 2 * seconds["forward"] + seconds[GRADIENT]
    row: dict[str, Any] = {
        "model": name,
        "parameters": measured["num_parameters"],
        "held_mib": measured["held"] / MIB,
    }
    row |= {column: float(repeats[column].median()) for column in repeats.columns[2:]}
    row |= {f"{method.split()[0]}_ms": 1e3 * float(np.median(own)) for method, own in seconds.items()}
    row["rounds"] = len(floor)
    for method, column in ((PRODUCT, "time_to_floor"), (LOW_MEMORY, "low_memory_time_to_floor")):
        ratios = seconds[method] / floor
        interval = t_interval(ratios, unit="rounds")
        row |= {column: float(ratios.mean()), f"{column}_low": interval.low, f"{column}_high": interval.high}
    one_batch = errors[(errors.matrix == "Gauss-Newton") & (errors.batches == 1)].set_index("precision")
    return row | {f"error_{precision}": _number(one_batch, precision) for precision in one_batch.index}


def _number(errors: pd.DataFrame, precision: str) -> float:
    return float(errors.error.get(precision, np.nan)) if "error" in errors else np.nan
