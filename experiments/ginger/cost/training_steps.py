"""Measured cost of whole training steps, both gradients included."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from curvlab.lab import Run
from curvlab.lab.models import build_model
from curvlab.training import Learner, MeanLoss, TrainingBatch
from experiments.ginger.cost.optimizers import make_optimizer, step_of
from experiments.ginger.step_cost import step_cost

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
            config = {
                "network": OmegaConf.to_container(network.model, resolve=True),
                "input_shape": list(network.input_shape),
                "batch_size": network.batch_size,
                "step": OmegaConf.to_container(step, resolve=True),
                "num_repeats": settings.num_repeats,
                "threads": torch.get_num_threads(),
                "device": run.device.type,
            }
            measure = partial(_measured, run, network, config)
            about = f"steps of {step.optimizer} on {name}"
            found = run.unit("ginger/step-cost", config, measure, version=1, about=about)
            place = {"network": str(name), "batch_size": network.batch_size, "threads": config["threads"]}
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


def _measured(run: Run, network: DictConfig, config: dict[str, Any]) -> dict[str, Any]:
    generator = run.generator("step cost")
    model = build_model(
        partial(instantiate, network.model),
        input_shape=config["input_shape"],
        num_outputs=NUM_CLASSES,
        generator=generator,
    ).to(run.device)
    model.train()
    inputs = torch.randn(config["batch_size"], *config["input_shape"], generator=generator)
    targets = torch.randint(NUM_CLASSES, (config["batch_size"],), generator=generator)
    step = config["step"]
    optimizer = make_optimizer(step["optimizer"], model.parameters(), step.get("rank"))
    cost = step_cost(
        Learner(model, MeanLoss(nn.CrossEntropyLoss()), optimizer),
        TrainingBatch(inputs.to(run.device), targets.to(run.device)),
        step=step_of(step["optimizer"], step.get("forward")),
        num_warmup=1,
        num_repeats=config["num_repeats"],
    )
    return {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops": cost.flops,
        "peak_bytes": cost.peak_bytes,
        "seconds": list(cost.all_seconds),
        "wall_seconds": cost.wall_seconds,
    }
