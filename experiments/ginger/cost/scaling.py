"""Time and memory of an optimizer's own part, update and step, against P and τ; and their fits."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig

from curvlab.lab import Run
from experiments.ginger.cost.optimizers import own_cost


def scaling_table(run: Run, settings: DictConfig) -> pd.DataFrame:
    """Return a row for each sweep ("size", "rank"), optimizer, P, τ and repeat.

    Columns: sweep, optimizer, rank, num_parameters, repeat, milliseconds (of one update and one step, mean over a
    period; processor time of all threads, on a GPU elapsed time), peak_bytes, flops (of one update and one step),
    threads.

    Args:
        run: store and device.
        settings: `sizes` (P) at `rank` for all optimizers; `ranks` (τ) at `size` for QNG and Ginger;
            `num_repeats`.
    """
    cells = [
        ("size", kind, rank, size)
        for size in settings.sizes
        for kind, rank in (("Adam", None), ("QNG", settings.rank), ("Ginger", settings.rank))
    ]
    cells += [("rank", kind, rank, settings.size) for rank in settings.ranks for kind in ("QNG", "Ginger")]
    rows: list[dict[str, Any]] = []
    for sweep, kind, rank, size in run.progress(cells, "update and step"):
        config = {"kind": kind, "rank": rank, "size": size, "num_repeats": settings.num_repeats}
        config |= {"threads": torch.get_num_threads(), "device": run.device.type}
        about = f"update and step of {kind}, P = {size:,}" + (f", τ = {rank}" if rank else "")
        found = run.unit("ginger/own-cost", config, partial(_measured, run, config), version=1, about=about)
        place = {"sweep": sweep, "optimizer": kind, "rank": rank, "num_parameters": size}
        place |= {"peak_bytes": found["peak_bytes"], "flops": found["flops"], "threads": config["threads"]}
        rows += [
            place | {"repeat": index, "milliseconds": value} for index, value in enumerate(found["milliseconds"])
        ]
    return pd.DataFrame(rows)


def _measured(run: Run, config: dict[str, Any]) -> dict[str, Any]:
    cost, calls = own_cost(
        config["kind"],
        config["size"],
        rank=config["rank"],
        device=run.device,
        num_repeats=config["num_repeats"],
    )
    return {
        "milliseconds": [1e3 * seconds / calls for seconds in cost.all_seconds],
        "peak_bytes": cost.peak_bytes,
        "flops": cost.flops / calls,
    }


def fits(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each sweep, optimizer, quantity and repeat: a least-squares polynomial and its R².

    quantity: milliseconds, peak_bytes or flops. Of "size": intercept + linear P. Of "rank": the same in τ, and
    another row with a square: intercept + linear τ + square τ²; `share` is that of the square at the largest τ.
    """
    rows: list[dict[str, Any]] = []
    for (sweep, optimizer, repeat), own in table.groupby(["sweep", "optimizer", "repeat"], sort=False):
        x = own["num_parameters" if sweep == "size" else "rank"].to_numpy(dtype=float)
        for quantity in ("milliseconds", "peak_bytes", "flops"):
            y = own[quantity].to_numpy(dtype=float)
            for degree in (1,) if sweep == "size" else (1, 2):
                if len(x) > degree + 1 and y.any():  # Adam has no products
                    place = {"sweep": sweep, "optimizer": optimizer, "quantity": quantity, "repeat": repeat}
                    rows.append(place | {"degree": degree} | polynomial_fit(x, y, degree))
    return pd.DataFrame(rows)


def polynomial_fit(x: np.ndarray, y: np.ndarray, degree: int) -> dict[str, float]:
    """Return intercept, linear, square (nan for degree 1), r_squared, the last term's share at the largest x."""
    scale = x.max()
    coefficients = np.polynomial.polynomial.polyfit(x / scale, y, degree)
    fitted = np.polynomial.polynomial.polyval(x / scale, coefficients)
    total = float(np.square(y - y.mean()).sum())
    residual = float(np.square(y - fitted).sum())
    powers = [float(value / scale**power) for power, value in enumerate(coefficients)]
    return {
        "intercept": powers[0],
        "linear": powers[1],
        "square": powers[2] if degree > 1 else float("nan"),
        "share": float(coefficients[-1] / fitted[x.argmax()]),
        "r_squared": 1 - residual / total if total > 0 else float("nan"),
    }


def exponent(x: pd.Series, y: pd.Series) -> float:
    """Return the slope of log y on log x."""
    return float(np.polyfit(np.log(x.to_numpy(dtype=float)), np.log(y.to_numpy(dtype=float)), 1)[0])
