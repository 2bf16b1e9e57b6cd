"""Milliseconds for each vector and peak memory of each library's products, and of the parts of ours."""

# mypy: disable-error-code="import-not-found"
# The peers need not be there.

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from curvlab.curvature import GaussNewtonOperator
from curvlab.curvature.linearise import ColumnSums, RecordedForward, push_forward
from curvlab.lab import Computed, Run, panels, plots, unit
from curvlab.lab.runs.record import device_name, read_record
from experiments.benchmarks.speed.networks import Case, build_case
from experiments.shared.gauges import Compute, kernel_threads, measure_peak, measure_times, searched_once
from experiments.shared.stats import in_columns

FORWARD, GRADIENT = "forward", "gradient"
MUST_WORK = (FORWARD, GRADIENT, "curvlab")  # peers do not take every model
DUAL, BACKWARD, TANGENTS = "forward with one tangent", "backward", "tangents, several at once"
LOOP, VMAP = "product, vectors in turns", "product, columns='vmap'"
FLOOR = "one forward + one gradient"
DEFAULT, TWO_PASSES, LAST = "forward mode", "two passes", ", channels last"


class NotInstalledError(Exception):
    """The library of a method is not there."""


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return one row for each model, number of vectors and method, in milliseconds a vector; parts; and ways."""
    own: dict[str, Any] = OmegaConf.to_container(cfg.products, resolve=True)  # type: ignore[assignment]
    own["shared"] = {"num_threads": cfg.num_threads, "device": run.device.type}
    names = run.progress(list(own["models"]), "products")
    rows = [row for name in names for row in _model_rows(run, name, own)]
    parts = [row for name in own["profiles"] for row in _part_rows(run, name, own)]
    ways = [row for name in own["ways"] for row in _way_rows(run, name, own)]
    tables = {"products": rows, "product_parts": parts, "product_ways": ways}
    return {name: pd.DataFrame(own) for name, own in tables.items() if own}


def _model_rows(run: Run, name: str, own: dict[str, Any]) -> list[dict[str, Any]]:
    settings, methods = own["models"][name], own["methods"]
    key = own["shared"] | {"model_config": settings, "num_rounds": own["num_rounds"], "methods": methods}
    rows: list[dict[str, Any]] = []
    for count in own["num_vectors"]:
        rows += _rows(name, count, settings, _measured(run, name, **key, num_vectors=count), methods)
    return rows


@unit("benchmarks/curvature", version=1, about="{num_vectors} products of {model_config[model][_target_]}")
def _measured(
    run: Run, name: str, /, *, model_config: Any, methods: list[str], num_vectors: int, **asked: Any
) -> dict[str, Any]:
    """Return seconds of each round and the peak memory by method; else a status."""
    case = build_case(model_config, run.generator("model", name), run.device)
    works: dict[str, Compute] = {}
    status: dict[str, str] = {}
    with kernel_threads(asked["num_threads"]):
        for method in (FORWARD, GRADIENT, *methods):
            try:
                works[method] = product_of(method, case, num_vectors)
                works[method]()  # warm up; what fails, fails here
            except NotInstalledError:
                status[method] = "not installed"
            except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
                if method in MUST_WORK:
                    raise
                works.pop(method, None)
                status[method] = f"failed: {str(error).splitlines()[0][:120]}"
        times = measure_times(works, num_rounds=asked["num_rounds"], device=run.device)
        with searched_once():
            peaks = {method: measure_peak(compute, run.device) for method, compute in works.items()}
    found = {"times": times, "peaks": peaks, "status": status, "num_parameters": case.num_parameters}
    return found | {"device": device_name(run.device)}


def _rows(
    name: str, count: int, settings: dict[str, Any], measured: dict[str, Any], methods: list[str]
) -> list[dict[str, Any]]:
    seconds = {method: float(np.median(times)) for method, times in measured["times"].items()}
    forward, gradient = seconds[FORWARD], seconds[GRADIENT]
    aims = {"two forwards + one gradient": 2 * forward + gradient, "three forwards": 3 * forward}
    aims |= {FLOOR: forward + gradient}
    aim = settings["aim_one" if count == 1 else "aim_many"]
    rows = []
    for method in (FORWARD, GRADIENT, *methods):
        is_unit = method in (FORWARD, GRADIENT)
        each = seconds.get(method, np.nan) / (1 if is_unit else count)
        over = each / aims[aim["base"]]
        row = {"model": name, "num_vectors": count, "method": method, "parameters": measured["num_parameters"]}
        row |= {"status": measured["status"].get(method, "done"), "milliseconds": 1e3 * each}
        row |= {"base": aim["base"], "to_base": over, "aim": aim["factor"], "to_aim": over / aim["factor"]}
        row |= {"to_curvlinops": np.nan if is_unit else each / (seconds.get("curvlinops", np.nan) / count)}
        row |= {"peak_mib": measured["peaks"].get(method, np.nan)}
        rows.append(row | {"device": measured.get("device", "")})  # which units before 2026-11-26 have not
    return rows


# ------------------------------------------------------------------------------------ each library's
class _ClassesSecond(nn.Module):
    """The model as nn.CrossEntropyLoss and the peers want it: tensors, classes on axis 1."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.model(inputs)
        logits: Tensor = outputs if isinstance(outputs, Tensor) else outputs.logits
        return logits.movedim(-1, 1)


def product_of(method: str, case: Case, count: int) -> Compute:
    """Return a function that does the work of a method once, set-up done."""
    model, loss, data = _ClassesSecond(case.model), nn.CrossEntropyLoss(), (case.inputs, case.targets)
    if method == FORWARD:
        return torch.no_grad()(lambda: model(case.inputs))
    if method == GRADIENT:
        return lambda: torch.autograd.grad(loss(model(case.inputs), case.targets), case.parameters)
    if method == "pyhessian":
        return _pyhessian(model, loss, case, count)
    vectors = case.vectors(count)
    if method == "curvlab":
        ours = GaussNewtonOperator(case.model, loss, data)
        return partial(ours.matvec, vectors[:, 0]) if count == 1 else partial(ours.matmat, vectors)
    try:
        from curvlinops import GGNLinearOperator
    except ImportError:
        raise NotInstalledError from None
    theirs = GGNLinearOperator(model, loss, case.parameters, [data], check_deterministic=False)
    vectors = vectors.contiguous()
    return partial(theirs.__matmul__, vectors[:, 0].clone() if count == 1 else vectors)


def _pyhessian(model: nn.Module, loss: nn.Module, case: Case, count: int) -> Compute:
    try:
        from pyhessian import hessian
    except ImportError:
        raise NotInstalledError from None
    on_gpu = case.targets.device.type == "cuda"
    computer = hessian(model, loss, dataloader=[(case.inputs, case.targets)], cuda=on_gpu)
    sizes = [parameter.numel() for parameter in case.parameters]
    vectors = [
        [piece.view_as(p) for piece, p in zip(row.split(sizes), case.parameters, strict=True)]
        for row in case.vectors(count).T
    ]

    def compute() -> None:
        for vector in vectors:
            computer.dataloader_hv_product(vector)
            model.zero_grad(set_to_none=True)  # it leaves graphs in .grad

    return compute


# ------------------------------------------------------------------------------------ parts of ours
def _part_rows(run: Run, name: str, own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each part: milliseconds for each vector, over the floor, and the share of convolutions.

    A product takes its vectors in turns, `forward with one tangent` and `backward` for each: the forward's own
    outputs are computed again with each tangent. With `columns='vmap'` one recorded forward serves all, tangents
    go through it several at once, and only the backward is for each vector alone.
    """
    count, key = own["profile_vectors"], own["shared"] | {"num_rounds": own["profile_rounds"]}
    found = _parts(run, name, model_config=own["models"][name], num_vectors=count, **key)
    each = {part: float(np.median(times)) for part, times in found["times"].items()}
    rows = []
    for part, seconds in each.items():
        alone = seconds / (count if part in (LOOP, VMAP, TANGENTS) else 1)
        row = {"model": name, "num_vectors": count, "part": part, "milliseconds": 1e3 * alone}
        row |= {"to_base": alone / (each[FORWARD] + each[GRADIENT]), "base": FLOOR}
        row |= {"convolutions": found["convolutions"].get(part, np.nan)}
        rows.append(row | {"peak_mib": found["peaks"].get(part, np.nan)})
    return rows


@unit("benchmarks/curvature/parts", version=1, about="parts of products of {model_config[model][_target_]}")
def _parts(
    run: Run, name: str, /, *, model_config: Any, num_threads: int, num_vectors: int, num_rounds: int, **_: Any
) -> dict[str, Any]:
    case = build_case(model_config, run.generator("model", name), run.device)
    with kernel_threads(num_threads):
        parts = part_computations(case, num_vectors)
        for compute in parts.values():
            compute()  # warm up
        times = measure_times(parts, num_rounds=num_rounds, device=run.device)
        shares = {part: _share_of_convolutions(parts[part]) for part in (FORWARD, GRADIENT, DUAL, BACKWARD)}
        peaks = {part: measure_peak(parts[part], run.device) for part in (LOOP, VMAP)}
    return {"times": times, "convolutions": shares, "peaks": peaks}


def part_computations(case: Case, count: int) -> dict[str, Callable[[], Any]]:
    """Return the parts, each to be called as often as one likes."""
    data, loss = (case.inputs, case.targets), nn.CrossEntropyLoss()
    loop = GaussNewtonOperator(case.model, loss, data, columns="loop", batch_size=len(case.targets))
    together = GaussNewtonOperator(case.model, loss, data, columns="vmap", batch_size=len(case.targets))
    function, vectors = loop.function, case.vectors(count)
    rows = vectors.T

    def outputs_of(values: Any) -> list[Tensor]:
        return [function(values, case.inputs)]

    recorded = RecordedForward(outputs_of, function.parameters)
    sums = ColumnSums(torch.empty_like(rows[:1]), first=True, scale=1.0)
    cotangents = [torch.randn(recorded.outputs[0].shape, generator=case.generator).to(rows.device)]
    return {
        FORWARD: product_of(FORWARD, case, 1),
        GRADIENT: product_of(GRADIENT, case, 1),
        DUAL: lambda: RecordedForward(outputs_of, function.parameters, rows[0]),
        BACKWARD: lambda: recorded.pull_back(cotangents, sums, keep=True),
        TANGENTS: lambda: [None for _ in push_forward(outputs_of, function.parameters, rows)],
        LOOP: lambda: loop.matmat(vectors),
        VMAP: lambda: together.matmat(vectors),
    }


def _share_of_convolutions(compute: Compute) -> float:
    """Return the share of a call's time that lies in kernels of convolutions, backward ones included."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        compute()
    events = seen.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    inside = sum(event.self_cpu_time_total for event in events if "convolution" in event.key)
    return float(inside / total) if total else float("nan")


# ------------------------------------------------------------------------------------ ways of ours
def _way_rows(run: Run, name: str, own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each way: milliseconds, of a product with one vector over the default's in its round."""
    settings = own["models"][name]
    found = _ways(run, name, model_config=settings, num_rounds=own["way_rounds"], **own["shared"])
    rows = []
    for way, times in found["times"].items():
        ratios = np.asarray(times) / np.asarray(found["times"][GRADIENT if way.startswith(GRADIENT) else DEFAULT])
        row = {"model": name, "batch_size": settings["batch_size"], "way": way, "rounds": len(times)}
        row |= {"milliseconds": 1e3 * float(np.median(times))} | in_columns("to_default", ratios, unit="rounds")
        rows.append(row | {"device": found["device"]})
    return rows


@unit("benchmarks/curvature/ways", version=1, about="ways of products of {model_config[model][_target_]}")
def _ways(
    run: Run, name: str, /, *, model_config: Any, num_threads: int, num_rounds: int, **_: Any
) -> dict[str, Any]:
    ways = ways_of(build_case(model_config, run.generator("model", name), run.device))
    with kernel_threads(num_threads):
        for compute in ways.values():
            compute()  # warm up
        times = measure_times(ways, num_rounds=num_rounds, device=run.device)
    return {"times": times, "device": device_name(run.device)}


def ways_of(case: Case) -> dict[str, Compute]:
    """Return products in forward mode and in two passes, and a gradient, also with channels last for images."""
    formats = {"": case}
    if isinstance(case.inputs, Tensor) and case.inputs.ndim == 4:
        model = copy.deepcopy(case.model).to(memory_format=torch.channels_last)
        images = case.inputs.to(memory_format=torch.channels_last)
        formats[LAST] = Case(model, images, case.targets, case.generator)
    ways: dict[str, Compute] = {}
    vector = case.vectors(1)[:, 0]
    for suffix, own in formats.items():
        arguments = (own.model, nn.CrossEntropyLoss(), (own.inputs, own.targets))
        for way, low_memory in ((DEFAULT, False), (TWO_PASSES, True)):
            matrix = GaussNewtonOperator(*arguments, batch_size=len(own.targets), low_memory=low_memory)
            ways[way + suffix] = partial(matrix.matvec, vector)
        ways[GRADIENT + suffix] = product_of(GRADIENT, own, 1)
    return ways


# ------------------------------------------------------------------------------------ figure
def draw(computed: Computed) -> dict[str, Figure]:
    """Return one panel for each number of vectors: bars by model and method, the aim as a mark across them."""
    table = computed["products"]
    table = table[~table.method.isin([FORWARD, GRADIENT])]
    table = table.assign(of=table.model + "\n(" + table.base.str.replace(" + ", "\n+ ") + ")")
    figure, axes = plots.figure(1, table.num_vectors.nunique(), panel_size=(1.4 * table.of.nunique(), 3.2))
    for ax, (count, own) in zip(axes[0], table.groupby("num_vectors", sort=False), strict=True):
        panels.bars(ax, own, name="of", value="to_base", by="method", upright=True)
        aims = own.drop_duplicates("of")
        ax.hlines(aims.aim, np.arange(len(aims)) - 0.45, np.arange(len(aims)) + 0.45, color="black", label="aim")
        ax.tick_params(axis="x", labelsize=7)
        panels.frame(ax, title=f"{count} vector{'s' if count != 1 else ''}")
    axes[0, 0].set_ylabel("time for each vector,\nin units of (...)")
    units = read_record(computed.folder)["units"]
    devices = sorted({unit["device"] for unit in units if unit["name"] == "benchmarks/curvature"})
    panels.legend(figure, title=f"measured on {', '.join(devices)}")
    return {"figure_more.png": figure}
