"""Memory and time of one product on ten models, in a process of its own, and rounding in low precision."""

from __future__ import annotations

import copy
import ctypes
import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from curvlab.curvature import GaussNewtonOperator, HessianOperator
from curvlab.lab import Computed, Run, panels, plots, unit
from curvlab.lab.claims import Claim, ClaimResult, ClaimSheet, Interval, out_of_reach
from curvlab.lab.claims import judge as verdict
from curvlab.linalg import flatten
from curvlab.problem.model_function import plain_attention
from experiments.benchmarks.speed.networks import Case, build_case
from experiments.shared.gauges import kernel_threads, measure_peak, measure_times, searched_once
from experiments.shared.stats import in_columns, mean

MIB = 2**20
SMALLEST_RISE = 50.0  # MiB: below, what Python and the system do is no longer negligible
AIM, TIME_AIM = 1.2, 1.6
# glibc's mallopt: from which size on a freed block goes back to the system, and how much may be left at the end.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
AT_ONCE, AS_A_RULE = (2**16, 2**16), (2**25, 2**30)  # what glibc itself adapts to where blocks are large

GRADIENT, PLAIN_GRADIENT = "gradient step", "gradient step, plain attention"
PRODUCT, LOW_MEMORY, DIFFERENCES = "product", "low memory product", "product, finite differences"
ONCE = (PLAIN_GRADIENT, DIFFERENCES)  # measured once: no claim rests on them

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MATRICES = {"Gauss-Newton": GaussNewtonOperator, "Hessian": HessianOperator}


def compute(run: Run, cfg: DictConfig) -> dict[str, pd.DataFrame]:
    """Return a row for each model, the repeats behind its ratios, and the errors in low precision."""
    own: dict[str, Any] = OmegaConf.to_container(cfg.models, resolve=True)  # type: ignore[assignment]
    counts = {name: own[name] for name in ("num_rounds", "num_repeats")} | {"num_threads": cfg.num_threads}
    repeats, rows, rounding = [], [], []
    # One process for all models, since what it imports takes longer than most of them.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        for name, settings in run.progress(list(own["models"].items()), "models"):
            seed = run.generator("model", name).initial_seed()
            measured = _cost(run, apart, settings=settings, seed=seed, device=str(run.device), **counts)
            less = settings | {"batch_size": own["num_rounding_examples"]}
            vectors = {"num_vectors": own["num_rounding_vectors"]}
            found = _rounding(run, model=name, settings=less, **vectors, device=run.device.type)["rows"]
            errors = pd.DataFrame([{"model": name} | row for row in found]).reindex(columns=ROUNDING)
            repeats.append(repeats_of(name, measured))
            rows.append(_summary(name, measured, repeats[-1], errors))
            rounding.append(errors)
    tables = {"models": pd.DataFrame(rows), "model_repeats": pd.concat(repeats, ignore_index=True)}
    return tables | {"model_rounding": pd.concat(rounding, ignore_index=True)}


# ------------------------------------------------------------------------------------ memory and time
@unit("benchmarks/models/cost", version=2, about="time and memory of {settings[model][_target_]}")
def _cost(run: Run, apart: ProcessPoolExecutor, /, **task: Any) -> dict[str, Any]:
    return apart.submit(measure, task).result()


def measure(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return bytes held, MiB by which memory rises and seconds, by method, one number for each repeat or round."""
    device = torch.device(task["device"])
    case = build_case(task["settings"], torch.Generator().manual_seed(task["seed"]), device)
    arguments = (case.model, nn.CrossEntropyLoss(), (case.inputs, case.targets))
    kinds: dict[str, dict[str, Any]] = {PRODUCT: {}, LOW_MEMORY: {"low_memory": True}}
    kinds[DIFFERENCES] = {"jvp": "finite_difference"}
    vector = case.vectors(1)[:, 0]
    methods: dict[str, Callable[[], Any]] = {
        GRADIENT: lambda: _gradient_step(case),
        PLAIN_GRADIENT: lambda: _plain_gradient_step(case),
    }
    for name, options in kinds.items():
        operator = GaussNewtonOperator(*arguments, batch_size=len(case.targets), **options)
        methods[name] = partial(operator.matvec, vector)
    with kernel_threads(task["num_threads"]):
        give_back_freed_memory(AS_A_RULE)
        timed = {"forward": torch.no_grad()(case.loss)}
        timed |= {name: methods[name] for name in (GRADIENT, PRODUCT, LOW_MEMORY)}
        for compute in timed.values():
            compute()
        seconds = measure_times(timed, num_rounds=task["num_rounds"], device=device)
        for name in ONCE:
            methods[name]()
        give_back_freed_memory(AT_ONCE)
        rises: dict[str, list[float]] = {name: [] for name in methods}
        with searched_once():
            for _ in range(task["num_repeats"]):
                for name, compute in methods.items():
                    if name not in ONCE or not rises[name]:
                        rises[name].append(measure_peak(compute, device))
        give_back_freed_memory(AS_A_RULE)
    sizes = {"held": case.held, "vector": vector.numel() * vector.element_size()}
    return {"num_parameters": case.num_parameters, "seconds": seconds, "rises": rises} | sizes


def give_back_freed_memory(thresholds: tuple[int, int]) -> None:
    """Tell malloc from which sizes on freed memory goes back to the system, where it is glibc's."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_THRESHOLD, thresholds[0])
        libc.mallopt(M_TRIM_THRESHOLD, thresholds[1])


def _gradient_step(case: Case) -> None:
    """Forward, backward and a step of SGD that goes nowhere, so that all repeats are the same."""
    case.loss().backward()
    stepper = torch.optim.SGD(case.parameters, lr=0.0)
    stepper.step()
    stepper.zero_grad()


def _plain_gradient_step(case: Case) -> None:
    with plain_attention():
        _gradient_step(case)


def repeats_of(name: str, measured: dict[str, Any]) -> pd.DataFrame:
    """Return memory in MiB of each repeat, what is held all the time included, and its ratios.

    `rise_ratio` is of what rises during the call. `plain_ratio` is over a gradient step by plain attention,
    `differences_ratio` of a product by finite differences: both were measured once.
    """
    rises = {method: np.asarray(values) for method, values in measured["rises"].items()}
    held, vector = measured["held"] / MIB, measured["vector"] / MIB
    gradient, plain = held + rises[GRADIENT], held + rises[PLAIN_GRADIENT][0]
    product, low_memory = (held + vector + rises[method] for method in (PRODUCT, LOW_MEMORY))
    found = {"gradient_mib": gradient, "plain_gradient_mib": plain, "product_mib": product}
    found |= {
        "low_memory_mib": low_memory,
        "gradient_rise_mib": rises[GRADIENT],
        "product_rise_mib": rises[PRODUCT],
    }
    found |= {"memory_ratio": product / gradient, "low_memory_ratio": low_memory / gradient}
    found |= {"plain_ratio": product / plain}
    found |= {"differences_ratio": (held + vector + rises[DIFFERENCES][0]) / gradient}
    found |= {"rise_ratio": pd.Series(rises[PRODUCT]) / pd.Series(rises[GRADIENT])}
    return pd.DataFrame({"model": name, "repeat": range(len(gradient))} | found)


def _summary(name: str, measured: dict[str, Any], repeats: pd.DataFrame, errors: pd.DataFrame) -> dict[str, Any]:
    """Return one model's row: medians over repeats and rounds; of ratios to the floor means and t intervals."""
    seconds = {method: np.asarray(values) for method, values in measured["seconds"].items()}
    floor = 2 * seconds["forward"] + seconds[GRADIENT]
    row: dict[str, Any] = {"model": name, "parameters": measured["num_parameters"]}
    row["held_mib"] = measured["held"] / MIB
    row |= {str(column): float(value) for column, value in repeats.iloc[:, 2:].median().items()}
    row |= {f"{method.split()[0]}_ms": 1e3 * float(np.median(own)) for method, own in seconds.items()}
    row["rounds"] = len(floor)
    for method, column in {PRODUCT: "time_to_floor", LOW_MEMORY: "low_memory_time_to_floor"}.items():
        row |= in_columns(column, seconds[method] / floor, unit="rounds")
    one_batch = errors[(errors.matrix == "Gauss-Newton") & (errors.batches == 1)].set_index("precision")
    return row | {f"error_{name}": float(own) for name, own in one_batch.error.items()}


# ------------------------------------------------------------------------------------ rounding
@unit("benchmarks/models/rounding", version=1, about="rounding of {model}")
def _rounding(run: Run, /, *, model: str, settings: dict[str, Any], num_vectors: int, **_: Any) -> dict[str, Any]:
    generator = run.generator("rounding", model)
    return {"rows": rounding_errors(settings, num_vectors=num_vectors, generator=generator, device=run.device)}


ROUNDING = ["model", "matrix", "precision", "batches", "status", "error", "error_converted"]


def rounding_errors(
    settings: Mapping[str, Any], *, num_vectors: int, generator: torch.Generator, device: torch.device
) -> list[dict[str, Any]]:
    """Return a row for each matrix, precision and cut into batches: its own error, and that of converting."""
    case = build_case(settings, generator, device)
    weights = flatten(case.parameters).detach()
    # Of the weights' norm, so that tangents are about as large as activations. Of norm √P they overflow in fp16.
    scale = float(weights.norm()) / len(weights) ** 0.5
    vectors = scale * torch.randn(case.num_parameters, num_vectors, generator=generator).to(device)
    count, rows = len(case.targets), []
    for matrix in MATRICES:
        exact = _product(matrix, case, vectors, torch.float64, size=count)
        for precision, dtype in PRECISIONS.items():
            # Weights and inputs rounded to dtype: higher precisions hold the same numbers.
            inputs = _cast(case.inputs, dtype)
            rounded = Case(copy.deepcopy(case.model).to(dtype), inputs, case.targets, generator)
            own = _product(matrix, rounded, vectors.to(dtype), torch.float64, size=count)
            for size in (count, 1) if matrix == "Gauss-Newton" else (count,):
                row = {"matrix": matrix, "precision": precision, "batches": count // size}
                try:
                    found = _product(matrix, rounded, vectors.to(dtype), dtype, size=size).double()
                    status = "done" if bool(found.isfinite().all()) else "not finite"
                    row |= {"status": status, "error": _error(found, own), "error_converted": _error(found, exact)}
                except (NotImplementedError, RuntimeError, TypeError, ValueError) as reason:
                    row |= {"status": f"failed: {str(reason).splitlines()[0][:120]}"}
                rows.append(row)
    return rows


def _product(matrix: str, case: Case, vectors: Tensor, dtype: torch.dtype, *, size: int) -> Tensor:
    model = copy.deepcopy(case.model).to(dtype)
    data = (_cast(case.inputs, dtype), case.targets)
    op = MATRICES[matrix](model, nn.CrossEntropyLoss(), data, batch_size=size, columns="loop")
    return op @ vectors.to(dtype)


def _cast(inputs: Any, dtype: torch.dtype) -> Any:
    return inputs.to(dtype) if isinstance(inputs, Tensor) else inputs  # mappings hold ids and masks


def _error(found: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.matrix_norm(found - expected) / torch.linalg.matrix_norm(expected))


# ------------------------------------------------------------------------------------ claims
CLAIMS = ("memory", "low-memory", "time", "low-memory-time")


def judge(computed: Computed, claims: ClaimSheet) -> list[ClaimResult]:
    """Judge memory for each model, over repeats, and the largest times, over rounds."""
    results = []
    for name, own in computed["model_repeats"].groupby("model", sort=False):
        asked = claims.claim("memory", of=str(name)), claims.claim("low-memory", of=str(name))
        if not own.gradient_rise_mib.min() >= SMALLEST_RISE:
            reason = f"A gradient step rises by {own.gradient_rise_mib.min():.3g} MiB: too little to be measured."
            results += [out_of_reach(claim, reason) for claim in asked]
            continue
        row = own.median(numeric_only=True)
        held = f"A gradient step holds {row.gradient_mib:.3g} MiB, a product"
        reasons = (
            f"{held} {row.product_mib:.3g}; by plain attention, without the fused kernel, a gradient step holds "
            f"{row.plain_gradient_mib:.3g}, and the ratio would be {row.plain_ratio:.3g}. With "
            f"jvp='finite_difference' in the product it is {row.differences_ratio:.3g}.",
            f"{held} in two passes {row.low_memory_mib:.3g}.",
        )
        for claim, ratios, reason in zip(asked, (own.memory_ratio, own.low_memory_ratio), reasons, strict=True):
            results.append(verdict(claim, *mean(ratios, unit="repeats"), if_not_reproduced=reason))
    table = computed["models"]
    columns = {"time": "time_to_floor", "low-memory-time": "low_memory_time_to_floor"}
    return [*results, *(_slowest(claims.claim(name), table, column) for name, column in columns.items())]


def _slowest(claim: Claim, table: pd.DataFrame, column: str) -> ClaimResult:
    """Judge the model that takes longest, over rounds."""
    row = table.sort_values(column).iloc[-1]
    kind = f"t 95 %, {row.rounds} rounds"
    interval = Interval(float(row[f"{column}_low"]), float(row[f"{column}_high"]), kind, int(row.rounds))
    reason = f"{row.model} is the slowest; the median is {table[column].median():.3g}."
    return verdict(claim, float(row[column]), interval, if_not_reproduced=reason)


# ------------------------------------------------------------------------------------ figure
def draw(computed: Computed) -> dict[str, Figure]:
    """Return time and memory of a product, a row for each model."""
    table = computed["models"]
    figure, axes = plots.figure(1, 2, panel_size=(4.0, 2.0 + 0.28 * len(table)), sharey=True)
    time, memory = axes[0]
    names = {"time_to_floor": "product", "low_memory_time_to_floor": "product, low_memory"}
    styles = panels.styles_of(names.values())
    panels.bars(time, table, name="model", value=names, styles=styles)
    panels.rule(time, x=TIME_AIM, color="black")
    panels.frame(time, x="time / (two forwards + a gradient)")
    kept = table.gradient_rise_mib >= SMALLEST_RISE  # below it a ratio is of rounding
    means = computed["model_repeats"].groupby("model")[["memory_ratio", "low_memory_ratio"]].mean()
    shown = table.assign(**{str(name): table.model.map(own).where(kept) for name, own in means.items()})
    ratios = {"memory_ratio": "product", "low_memory_ratio": "product, low_memory"}
    panels.bars(memory, shown, name="model", value=ratios, styles=styles)
    panels.rule(memory, x=AIM, color="black")
    note = f"a gradient's is < {SMALLEST_RISE:g} MiB"
    for place in np.flatnonzero(~kept):
        memory.text(0.02, place, note, transform=memory.get_yaxis_transform(), fontsize=7.5, va="center")
    panels.frame(memory, x="peak memory / a gradient step's")
    note = "product: with the Gauss-Newton matrix; bars: 95 % t over repeats"
    panels.legend(figure, title=f"{note}\ndashed: what we aim at, {TIME_AIM:g} in time and {AIM:g} in memory")
    return {"figure.png": figure}
