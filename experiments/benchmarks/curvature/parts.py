"""Where the time of a product with K vectors goes: its parts, each in CPU time of its own, and their kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.profiler import ProfilerActivity, profile

from curvlab.curvature import GaussNewtonOperator
from curvlab.curvature.column_sums import ColumnSums
from curvlab.curvature.jacobian_products import push_forward
from curvlab.curvature.recorded_forward import RecordedForward
from curvlab.lab import runs
from experiments.benchmarks.curvature.gauges import measure_peak, measure_times
from experiments.benchmarks.curvature.products import Case, build_case, products
from experiments.benchmarks.timing import kernel_threads

FORWARD, GRADIENT = "forward", "gradient"
DUAL, BACKWARD, TANGENTS = "forward with one tangent", "backward", "tangents, several at once"
LOOP, VMAP = "product, vectors in turns", "product, columns='vmap'"
FLOOR = "one forward + one gradient"


def part_rows(run: runs.Run, name: str, cfg: DictConfig) -> list[dict[str, Any]]:
    """Return a row for each part: milliseconds for each vector, over the floor, and the share of convolutions.

    A product takes its vectors in turns, `forward with one tangent` and `backward` for each: the forward's own
    outputs are computed again with each tangent. With `columns='vmap'` one recorded forward serves all, tangents
    go through it several at once, and only the backward is for each vector alone.
    """
    settings = cfg.models[name]
    key = {"model_config": OmegaConf.to_container(settings, resolve=True), "num_threads": cfg.num_threads}
    key |= {"num_vectors": cfg.profile_vectors, "num_rounds": cfg.profile_rounds, "device": run.device.type}
    compute = partial(_measured, run, name, cfg)
    measured = run.unit(
        "benchmarks/curvature/parts", key, compute, version=1, about=f"parts of products of {name}"
    )
    count = cfg.profile_vectors
    each = {part: float(np.median(times)) for part, times in measured["times"].items()}
    floor = each[FORWARD] + each[GRADIENT]
    rows = []
    for part, seconds in each.items():
        own = seconds / (count if part in (LOOP, VMAP, TANGENTS) else 1)
        row = {
            "model": name,
            "num_vectors": count,
            "part": part,
            "milliseconds": 1e3 * own,
            "to_base": own / floor,
        }
        row |= {"base": FLOOR, "convolutions": measured["convolutions"].get(part, float("nan"))}
        rows.append(row | {"peak_mib": measured["peaks"].get(part, float("nan"))})
    return rows


def _measured(run: runs.Run, name: str, cfg: DictConfig) -> dict[str, Any]:
    case = build_case(cfg.models[name], run.generator("model", name), run.device)
    with kernel_threads(cfg.num_threads):
        parts = computations(case, int(cfg.profile_vectors))
        for compute in parts.values():
            compute()  # warm up
        times = measure_times(parts, num_rounds=cfg.profile_rounds, device=run.device)
        profiled = {part: _share_of_convolutions(parts[part]) for part in (FORWARD, GRADIENT, DUAL, BACKWARD)}
        peaks = {part: measure_peak(parts[part], run.device) for part in (LOOP, VMAP)}
    return {"times": times, "convolutions": profiled, "peaks": peaks}


def computations(case: Case, count: int) -> dict[str, Callable[[], Any]]:
    """Return the parts, each to be called as often as one likes."""
    data = (case.inputs, case.targets)
    loss = nn.CrossEntropyLoss()
    loop = GaussNewtonOperator(case.model, loss, data, columns="loop", batch_size=len(case.targets))
    together = GaussNewtonOperator(case.model, loss, data, columns="vmap", batch_size=len(case.targets))
    function, rows = loop.function, case.rows(count)

    def outputs_of(values: Any) -> list[torch.Tensor]:
        return [function(values, case.inputs)]

    recorded = RecordedForward(outputs_of, function.parameters)
    sums = ColumnSums(torch.empty_like(rows[:1]), first=True, scale=1.0)
    cotangents = [torch.randn(recorded.outputs[0].shape, generator=case.generator).to(case.inputs.device)]
    return {
        FORWARD: products(FORWARD, case, 1),
        GRADIENT: products(GRADIENT, case, 1),
        DUAL: lambda: RecordedForward(outputs_of, function.parameters, rows[0]),
        BACKWARD: lambda: recorded.pull_back(cotangents, sums, keep=True),
        TANGENTS: lambda: [None for _ in push_forward(outputs_of, function.parameters, rows)],
        LOOP: lambda: loop.matmat(rows.T),
        VMAP: lambda: together.matmat(rows.T),
    }


def _share_of_convolutions(compute: Callable[[], Any]) -> float:
    """Return the share of a call's time that lies in kernels of convolutions, backward ones included."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        compute()
    events = seen.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    inside = sum(event.self_cpu_time_total for event in events if "convolution" in event.key)
    return float(inside / total) if total else float("nan")
