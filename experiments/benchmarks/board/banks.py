"""Banks of retrainings: how they are computed, where they are kept, and how a stranger gets the networks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlab.influence import subset_weights
from curvlab.influence.bank import Bank, load_bank
from curvlab.lab import Run, all_targets, load_config, start, task_settings, unit
from curvlab.lab.runs.record import read_commit, versions
from experiments.benchmarks.attribution.network import Network
from experiments.shared.task import Task, files_by_name

FOLDER = Path("results/banks")
PRESETS = ("embedded", "laptop", "paper", "smoke")


def bank_of(network: Network, *, fraction: float = 0.5, num_standard: int | None = None) -> Bank:
    """Return the task's bank: the committed one where its recipe is this config's, or else one computed now."""
    settings = network.settings
    sizes = {name: settings[name] for name in ("num_subsets", "num_networks", "num_standard")}
    sizes |= {"fraction": fraction} | ({} if num_standard is None else {"num_standard": num_standard})
    key = files_by_name(network.key | sizes | {"num_queries": settings.num_queries, "seed": network.run.cfg.seed})
    path = FOLDER / f"{settings.bank}.npz"
    if settings.bank and fraction == settings.fraction and path.is_file():
        committed = load_bank(path)
        if committed.recipe["config"] == key:
            return committed
    return _computed(network, sizes, key)


def _computed(network: Network, sizes: dict[str, Any], config: dict[str, Any]) -> Bank:
    commit, settings, size = read_commit(), network.settings, max(1, int(sizes["fraction"] * network.num_train))
    drawn = torch.rand(settings.num_subsets, network.num_train, generator=network.generator("subsets"))
    subsets = drawn.argsort(1).argsort(1) < size
    common = {name: sizes[name] for name in ("fraction", "num_subsets")} | {"num_queries": settings.num_queries}
    numbers, starts = range(sizes["num_networks"]), range(sizes["num_standard"])
    single = [_single_run(network, subsets, **common, network=k) for k in numbers]
    alone = [_standard(network, subsets, k, **common, start=f"alone {k}") for k in starts]
    scored = [network.at(k).trained(k) for k in numbers]
    seconds = {"one training": [trained.seconds for trained in scored]}
    seconds |= {"single run": [float(unit["seconds"]) for unit in single]}
    seconds |= {"standard": [float(unit["seconds"]) for unit in alone]}
    recipe = {
        "command": f"make bank BANK={settings.bank}",
        "task": network.label,
        "preset": network.run.cfg.preset,
    }
    recipe |= {"config": config, "commit": commit.commit, "clean": commit.clean, "versions": versions()}
    recipe["learning_rate"] = [float(trained.training.learning_rates[0]) for trained in scored]
    recipe |= {"num_steps": [trained.training.num_steps for trained in scored], "seconds": seconds}
    return Bank(
        name=str(settings.bank or network.label),
        subsets=subsets.numpy(),
        single_run=_stacked([unit["losses"] for unit in single]),
        standard=_stacked([unit["losses"] for unit in alone]),
        scored=_stacked([network.losses_of(trained.model) for trained in scored]),
        queries=network.queries.numpy(),
        recipe=recipe,
    )


@unit("bank/single_run", version=1, about="single run {network} of {seed_name}, subsets of {fraction:g}")
def _single_run(task: Network, subsets: Tensor, /, *, network: int, **_: Any) -> dict[str, Any]:
    return task.at(network).retrained_losses(subset_weights(subsets), network)


@unit("bank/standard", version=1, about="standard, {start} of {seed_name}, subsets of {fraction:g}")
def _standard(task: Network, subsets: Tensor, number: int, /, **_: Any) -> dict[str, Any]:
    return task.losses_alone(subsets, number)


def _stacked(losses: list[Tensor]) -> np.ndarray:
    return torch.stack([own.cpu().float() for own in losses]).numpy()


@contextmanager
def task_of(name: str) -> Iterator[tuple[Run, Network]]:
    """Open the task of a bank by the bank's name: its data, and `at(k).trained(k)`, its k-th scored network."""
    target, known = all_targets()["benchmarks/board"], []
    for preset in PRESETS:
        cfg = load_config(target, [f"preset={preset}", "tracker=none", "progress=false"])
        for task, settings in task_settings(cfg).items():
            known.append(str(settings.bank))
            if settings.bank == name:
                with start(cfg, key=target.key, title=target.title) as run:
                    yield run, Network.of(Task.load(run, task, settings))
                return
    raise ValueError(f"no task has a bank {name!r}; there are {', '.join(sorted(set(known)))}")


def largest_difference(bank: Bank, other: Bank) -> float:
    """Return how far the losses of two banks of one recipe are apart, over all networks, subsets and queries."""
    if not np.array_equal(bank.subsets, other.subsets):
        return float("nan")
    pairs = zip((bank.single_run, bank.standard), (other.single_run, other.standard), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def recompute(names: list[str]) -> None:
    """Compute banks and write them; one that is there already is compared first."""
    for name in names:
        path = FOLDER / f"{name}.npz"
        before = load_bank(path) if path.is_file() else None
        path.unlink(missing_ok=True)
        with task_of(name) as (_, network):
            bank = bank_of(network, fraction=float(network.settings.fraction))
        bank.save(path)
        told = f"{path}: {path.stat().st_size / 1024:.0f} KiB, {bank.single_run.shape} and {bank.standard.shape}"
        if before is not None and before.single_run.shape == bank.single_run.shape:
            told += f", largest difference to the one before {largest_difference(before, bank):.2g}"
        print(told, flush=True)
