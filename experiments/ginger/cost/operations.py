"""What steps of Ginger and QNG cost: counted for the paper's networks, measured whole, and without gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from curvlab.lab import Run, unit
from curvlab.lab.models import build_model, resnet18, resnet50
from curvlab.optim import QNG, Ginger
from curvlab.training import (
    Learner,
    MeanLoss,
    Step,
    TrainingBatch,
    curvature_step,
    gradient_step,
    shared_curvature_step,
)
from experiments.ginger.printed import table_1
from experiments.ginger.step_cost import Cost, call_cost, step_cost

# How the gradient of sampled labels comes by its forward pass: that of the loss (train mode, BatchNorm by the
# batch's statistics), or one of its own (eval mode, running statistics).
STEPS: dict[str, Step] = {"shared": shared_curvature_step, "own": curvature_step}
LEAST_PERIOD = 8  # updates, of which Ginger measures its basis in one; the rank where that is more
SHIFT = 16  # numbers between two gradients: 64 bytes


def make_optimizer(kind: str, params: Iterable[nn.Parameter], rank: int | None = None) -> torch.optim.Optimizer:
    """Return "momentum", "Adam", "QNG" or "Ginger", with momentum 0.9 and second moments 0.99 (Sec. 4.1)."""
    if kind == "momentum":
        return torch.optim.SGD(params, lr=1e-3, momentum=0.9)
    if kind == "Adam":
        return torch.optim.Adam(params, lr=1e-3, betas=(0.9, 0.99))
    settings: dict[str, Any] = {"lr": 1e-3, "rank": rank, "decay": 0.99, "momentum": 0.9}
    if kind == "QNG":
        return QNG(params, **settings)
    if kind == "Ginger":
        return Ginger(params, damping=1e-2, **settings)
    raise ValueError(f"unknown optimizer {kind!r}: choose momentum, Adam, QNG or Ginger")


def step_of(kind: str, forward: str | None) -> Step:
    """Return the training step of an optimizer; `forward` is a key of STEPS for QNG and Ginger."""
    if kind in ("momentum", "Adam"):
        return gradient_step
    if forward not in STEPS:
        raise ValueError(f"{kind} needs forward: shared or own, got {forward!r}")
    return STEPS[forward]


def own_cost(
    kind: str, size: int, *, rank: int | None = None, device: torch.device | None = None, num_repeats: int
) -> tuple[Cost, int]:
    """Return what an optimizer costs beside the gradients, over several updates and steps, and how many.

    One vector of `size` parameters, random gradients, after the rows of the basis are filled; as many calls as
    Ginger has from one measurement of its basis to the next. Memory: parameters, gradient, state, temporaries.
    """
    generator = torch.Generator().manual_seed(0)
    calls = max(rank or 0, LEAST_PERIOD)
    warmup = (rank or 0) + 1
    parameter = nn.Parameter(torch.zeros(size, device=device))
    optimizer = make_optimizer(kind, [parameter], rank)
    # Every call needs a gradient of its own, or the basis would not change: pieces of one, a few numbers apart.
    num_calls = warmup + (2 + num_repeats) * calls
    numbers = torch.randn(size + SHIFT * num_calls, generator=generator).to(parameter.device)
    places = iter(range(num_calls))

    def call() -> None:
        start = SHIFT * next(places)
        parameter.grad = numbers[start : start + size]
        if isinstance(optimizer, QNG | Ginger):
            optimizer.update_curvature()
        optimizer.step()

    def work() -> None:
        for _ in range(calls):
            call()

    for _ in range(warmup):
        call()
    state = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    held = [parameter, torch.empty_like(parameter), *state]
    return call_cost(work, held=held, device=parameter.device, num_repeats=num_repeats), calls


# ---------------------------------------------------- counted: what Table 1's column would be
NETWORKS = {"ResNet-18": resnet18, "ResNet-50": resnet50}
SIZES = (20_000, 40_000)  # two points on a line


def gradient_flops(network: str, batch_size: int) -> dict[str, int]:
    """Return counts for one batch of CIFAR-100: forward, backward, num_parameters; and entries of convolutions.

    `activations`: numbers that the convolutions give, one pass. Nothing is computed: the tensors have shapes only.
    """
    with torch.device("meta"):
        model = NETWORKS[network]((3, 32, 32), 100, stem="cifar").train()
        inputs, targets = torch.zeros(batch_size, 3, 32, 32), torch.zeros(batch_size, dtype=torch.long)
    entries = []

    def see(module: nn.Module, given: Any, output: Tensor) -> None:
        entries.append(output.numel())

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(see)
    with FlopCounterMode(display=False) as forward:
        loss = nn.functional.cross_entropy(model(inputs), targets)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return {
        "forward": forward.get_total_flops(),
        "backward": backward.get_total_flops(),
        "activations": sum(entries),
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def own_flops(kind: str, rank: int) -> tuple[float, float]:
    """Return a and b: update and step of an optimizer have a + bP operations, on average."""
    small, large = (
        cost.flops / calls for cost, calls in (own_cost(kind, n, rank=rank, num_repeats=1) for n in SIZES)
    )
    slope = (large - small) / (SIZES[1] - SIZES[0])
    return small - slope * SIZES[0], slope


def counted_steps(batch_size: int, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each network, optimizer, rank and way of the forward pass: operations of a whole step.

    Columns: network, optimizer, rank, forward ("shared" by both gradients, or the sampled labels' "own"; empty for
    first-order methods), batch_size, num_parameters, forward_flops, backward_flops, activations, own_flops (of
    update and step), flops (of all), to_adam.
    """
    own = {(kind, rank): own_flops(kind, rank) for kind in ("QNG", "Ginger") for rank in ranks}
    rows: list[dict[str, Any]] = []
    for network in NETWORKS:
        gradient = gradient_flops(network, batch_size)
        shape = {"network": network, "batch_size": batch_size, "num_parameters": gradient["num_parameters"]}
        shape |= {"activations": gradient["activations"]}
        passes = {"forward_flops": gradient["forward"], "backward_flops": gradient["backward"]}
        once = gradient["forward"] + gradient["backward"]
        for kind in ("momentum", "Adam"):
            rows.append(shape | {"optimizer": kind, "own_flops": 0.0, "flops": once, "to_adam": 1.0} | passes)
        for (kind, rank), (constant, slope) in own.items():
            for way in STEPS:
                at = shape | {"optimizer": kind, "rank": rank, "forward": way}
                of_own = constant + slope * gradient["num_parameters"]
                total = once + gradient["backward"] + (gradient["forward"] if way == "own" else 0) + of_own
                rows.append(at | passes | {"own_flops": of_own, "flops": total, "to_adam": total / once})
    return rows


def beside_the_paper(table: pd.DataFrame) -> pd.DataFrame:
    """Return `counted_steps` with Table 1's paper_flops, paper_memory (GB), and paper_to_adam, of FLOPs."""
    printed = table_1().rename(columns={"model": "network", "flops": "paper_flops", "memory": "paper_memory"})
    names = {kind.lower(): kind for kind in table.optimizer.unique()}
    printed = printed.assign(optimizer=printed.racer.map(names))
    columns = ["network", "optimizer", "rank"]
    found = table.merge(printed[[*columns, "paper_flops", "paper_memory"]], on=columns, how="left")
    adam = found[found.optimizer == "Adam"].set_index("network").paper_flops
    return found.assign(paper_to_adam=found.paper_flops / found.network.map(adam))


# ---------------------------------------------------- measured: update and step alone, against P and τ
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
    threads = torch.get_num_threads()
    for sweep, kind, rank, size in run.progress(cells, "update and step"):
        key = {"kind": kind, "rank": rank, "size": size, "num_repeats": settings.num_repeats}
        found = _own_cost(run, **key, threads=threads, device=run.device.type)
        place = {"sweep": sweep, "optimizer": kind, "rank": rank, "num_parameters": size}
        place |= {"peak_bytes": found["peak_bytes"], "flops": found["flops"], "threads": threads}
        rows += [
            place | {"repeat": index, "milliseconds": value} for index, value in enumerate(found["milliseconds"])
        ]
    return pd.DataFrame(rows)


@unit("ginger/own-cost", version=2, about="update and step of {kind}, P = {size:,}, τ = {rank}")
def _own_cost(
    run: Run, /, *, kind: str, size: int, rank: int | None, num_repeats: int, **_: Any
) -> dict[str, Any]:
    cost, calls = own_cost(kind, size, rank=rank, device=run.device, num_repeats=num_repeats)
    milliseconds = [1e3 * seconds / calls for seconds in cost.all_seconds]
    return {"milliseconds": milliseconds, "peak_bytes": cost.peak_bytes, "flops": cost.flops / calls}


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


# ---------------------------------------------------- measured: whole training steps, both gradients included
NUM_CLASSES = 100


def step_table(run: Run, settings: DictConfig) -> pd.DataFrame:
    """Return a row for each network, optimizer, rank, way of the forward pass and repeat, on random images.

    Columns: network, batch_size, num_parameters, optimizer, rank, forward, repeat, flops, peak_bytes, seconds
    (processor time of all threads; on a GPU elapsed), wall_seconds (least), threads; and `..._to_adam` of
    operations, memory, seconds (repeat by repeat) and elapsed time, with Adam's gradient.

    Args:
        run: store, seeds, device.
        settings: `networks`, by name: `model`, `input_shape`, `batch_size`, `steps` (optimizer, rank, forward;
            Adam among them); `num_repeats`.
    """
    rows: list[dict[str, Any]] = []
    for name, network in settings.networks.items():
        for step in run.progress(network.steps, f"steps of {name}"):
            key = {"network": network.model, "input_shape": network.input_shape, "batch_size": network.batch_size}
            key |= {"step": step, "num_repeats": settings.num_repeats}
            found = _step_cost(run, **key, threads=torch.get_num_threads(), device=run.device.type)
            place = {"network": str(name), "batch_size": network.batch_size, "threads": torch.get_num_threads()}
            place |= {"optimizer": step.optimizer, "rank": step.get("rank"), "forward": step.get("forward")}
            place |= {key: found[key] for key in ("num_parameters", "flops", "peak_bytes", "wall_seconds")}
            rows += [place | {"repeat": index, "seconds": value} for index, value in enumerate(found["seconds"])]
    table = pd.DataFrame(rows)
    adam = table[table.optimizer == "Adam"].set_index(["network", "repeat"])
    of_adam = table.set_index(["network", "repeat"]).index
    names = {"flops": "flops", "peak_bytes": "memory", "seconds": "seconds", "wall_seconds": "wall"}
    for column, name in names.items():
        table[f"{name}_to_adam"] = table[column].to_numpy() / adam[column].reindex(of_adam).to_numpy()
    return table


@unit("ginger/step-cost", version=2, about="steps of {step[optimizer]}, {network[_target_]}")
def _step_cost(
    run: Run, /, *, network: Any, input_shape: Any, batch_size: int, step: Any, num_repeats: int, **_: Any
) -> dict[str, Any]:
    generator = run.generator("step cost")
    model = build_model(
        partial(instantiate, network), input_shape=list(input_shape), num_outputs=NUM_CLASSES, generator=generator
    ).to(run.device)
    model.train()
    inputs = torch.randn(batch_size, *input_shape, generator=generator)
    targets = torch.randint(NUM_CLASSES, (batch_size,), generator=generator)
    optimizer = make_optimizer(step.optimizer, model.parameters(), step.get("rank"))
    cost = step_cost(
        Learner(model, MeanLoss(nn.CrossEntropyLoss()), optimizer),
        TrainingBatch(inputs.to(run.device), targets.to(run.device)),
        step=step_of(step.optimizer, step.get("forward")),
        num_warmup=1,
        num_repeats=num_repeats,
    )
    return {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops": cost.flops,
        "peak_bytes": cost.peak_bytes,
        "seconds": list(cost.all_seconds),
        "wall_seconds": cost.wall_seconds,
    }
