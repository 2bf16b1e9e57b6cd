"""Banks of retrainings: how they are computed, where they are kept, and how a stranger gets the networks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlab.influence import subset_weights
from curvlab.influence.bank import Bank, load_bank
from curvlab.lab import Run, all_targets, load_config, start, task_settings
from curvlab.lab.runs.record import read_commit, versions
from experiments.benchmarks.attribution.network import Network
from experiments.shared.task import files_by_name

FOLDER = Path("results/banks")
PRESETS = ("embedded", "laptop", "paper", "smoke")


def bank_of(run: Run, network: Network, *, fraction: float = 0.5, num_standard: int | None = None) -> Bank:
    """Return the task's bank: the committed one where its recipe is this config's, or else one computed now."""
    settings = network.settings
    sizes = {
        "fraction": fraction,
        "num_subsets": settings.num_subsets,
        "num_networks": settings.num_networks,
        "num_standard": settings.num_standard if num_standard is None else num_standard,
    }
    key = files_by_name(network.key | sizes | {"num_queries": settings.num_queries, "seed": run.cfg.seed})
    path = FOLDER / f"{settings.bank}.npz"
    if settings.bank and fraction == settings.fraction and path.is_file():
        committed = load_bank(path)
        if committed.recipe["config"] == key:
            return committed
    return _computed(run, network, sizes, key)


def _computed(run: Run, network: Network, sizes: dict[str, Any], config: dict[str, Any]) -> Bank:
    commit, settings, size = read_commit(), network.settings, max(1, int(sizes["fraction"] * network.num_train))
    generator = run.generator("subsets", settings.seed_name)
    drawn = torch.rand(settings.num_subsets, network.num_train, generator=generator)
    subsets = drawn.argsort(1).argsort(1) < size
    common = network.key | {name: sizes[name] for name in ("fraction", "num_subsets")}
    common |= {"num_queries": settings.num_queries}
    single, alone = [], []
    for k in range(sizes["num_networks"]):
        retrain = partial(network.at(k).retrained_losses, subset_weights(subsets), k)
        about = f"single run {k} of {network.label}, {len(subsets)} subsets of {sizes['fraction']:g}"
        single.append(run.unit("bank/single_run", common | {"network": k}, retrain, version=1, about=about))
    for k in range(sizes["num_standard"]):
        about = f"standard {k} of {network.label}, {len(subsets)} subsets of {sizes['fraction']:g}"
        retrain = partial(network.losses_alone, subsets, k)
        alone.append(run.unit("bank/standard", common | {"start": f"alone {k}"}, retrain, version=1, about=about))
    scored = [network.at(k).trained(k) for k in range(sizes["num_networks"])]
    losses = [network.losses_of(trained.model) for trained in scored]
    recipe = {
        "command": f"make bank BANK={settings.bank}",
        "task": network.label,
        "preset": run.cfg.preset,
        "config": config,
        "commit": commit.commit,
        "clean": commit.clean,
        "versions": versions(),
        "learning_rate": [float(trained.run.learning_rates[0]) for trained in scored],
        "num_steps": [trained.run.num_steps for trained in scored],
        "seconds": {
            "one training": [trained.seconds for trained in scored],
            "single run": [float(unit["seconds"]) for unit in single],
            "standard": [float(unit["seconds"]) for unit in alone],
        },
    }
    return Bank(
        name=str(settings.bank or network.label),
        subsets=subsets.numpy(),
        single_run=_stacked([unit["losses"] for unit in single]),
        standard=_stacked([unit["losses"] for unit in alone]),
        scored=_stacked(losses),
        queries=network.queries.numpy(),
        recipe=recipe,
    )


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
                    yield run, Network(run, task, settings)
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
        with task_of(name) as (run, network):
            bank = bank_of(run, network, fraction=float(network.settings.fraction))
        bank.save(path)
        told = f"{path}: {path.stat().st_size / 1024:.0f} KiB, {bank.single_run.shape} and {bank.standard.shape}"
        if before is not None and before.single_run.shape == bank.single_run.shape:
            told += f", largest difference to the one before {largest_difference(before, bank):.2g}"
        print(told, flush=True)
