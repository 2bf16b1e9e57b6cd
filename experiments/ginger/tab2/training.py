"""One fine-tuning, a unit of work that tuning and final runs share; and what one of its steps costs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from curvlab.lab import Run
from curvlab.lab.models import EncoderDecoder
from curvlab.training import (
    Learner,
    MeanLoss,
    TrainingBatch,
    TrainingDivergedError,
    evaluate,
    train,
)
from experiments.ginger.race.optimizers import make_optimizer
from experiments.ginger.step_cost import step_cost
from experiments.ginger.tab2.rouge import KINDS, rouge
from experiments.ginger.tab2.task import SummaryTask

HIGHER = 1.5  # a validation loss so many times that at the start has diverged, though it is a number
NUM_EXAMPLES = 3  # summaries that are kept to be read


@dataclass(frozen=True)
class FineTuning:
    """What one run does.

    Attributes:
        weights: "full" or "lora".
        optimizer: settings, see `make_optimizer`.
        num_steps: how long; the last pass is cut short.
        repeat: seed of the order of batches and of the adapters, shared by all optimizers.
    """

    weights: str
    optimizer: Mapping[str, Any]
    num_steps: int
    repeat: int | str


def fine_tuned(run: Run, task: SummaryTask, own: FineTuning, *, with_test: bool) -> dict[str, Any]:
    """Fine-tune once; return what was measured at the end, and the steps' losses.

    `validation_loss`, infinite where `diverged`; `step_losses` (S,), each of its batch. Where `with_test` is set:
    `test_loss`; `train_loss`, of the leading training pairs, in eval mode; ROUGE of the test summaries (0 where it
    diverged; the losses are nan there), and `examples` that it wrote.

    Args:
        run: seeds, store, device.
        task: pairs and network.
        own: what is run.
        with_test: measure on the test pairs, too.
    """
    key = task.key | asdict(own) | ({"measuring": dict(task.measuring)} if with_test else {})
    compute = partial(_fine_tuned, run, task, own, with_test=with_test)
    return run.unit("ginger/fine_tuned", key, compute, version=1)


def cost_of_a_step(run: Run, task: SummaryTask, own: FineTuning) -> dict[str, Any]:
    """Return `flops` and `memory` (bytes, at most alive at one time) of one step, see `step_cost.Cost`."""
    key = task.key | {"weights": own.weights, "optimizer": dict(own.optimizer)}

    def compute() -> dict[str, Any]:
        model = task.build(run, own.weights, own.repeat).train()
        optimizer, step = make_optimizer(model, own.optimizer)
        inputs, targets = (part[: task.batch_size].to(run.device) for part in task.splits.train)
        learner = Learner(model, MeanLoss(nn.CrossEntropyLoss()), optimizer)
        cost = step_cost(learner, TrainingBatch(inputs, targets), step=step, num_repeats=1)
        return {"flops": cost.flops, "memory": cost.peak_bytes}

    return run.unit("ginger/fine_tuning_cost", key, compute, version=1)


def _fine_tuned(run: Run, task: SummaryTask, own: FineTuning, *, with_test: bool) -> dict[str, Any]:
    model = task.build(run, own.weights, own.repeat)
    optimizer, step = make_optimizer(model, own.optimizer)
    found: dict[str, Any] = {"validation_loss": math.inf, "diverged": True, "step_losses": torch.empty(0)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of steps that were not taken: `diverged` says it
        try:
            history = train(
                model,
                nn.CrossEntropyLoss(),
                task.splits.train,
                num_steps=own.num_steps,
                batch_size=task.batch_size,
                optimizer=optimizer,
                step=step,
                generator=run.generator("batches", task.seed_name, own.repeat),
                progress=run.bar(f"{own.weights} {own.optimizer['optimizer']}"),
            )
        except TrainingDivergedError:
            pass
        else:
            loss = _loss(model, task, task.splits.validation)
            found["step_losses"] = torch.tensor(history.step_losses)
            if loss < HIGHER * task.start_loss:
                found |= {"validation_loss": loss, "diverged": False}
    if not with_test:
        return found
    if found["diverged"]:
        return found | {"test_loss": math.nan, "train_loss": math.nan, "examples": []} | dict.fromkeys(KINDS, 0.0)
    return found | _measured(model, task)


def _measured(model: EncoderDecoder, task: SummaryTask) -> dict[str, Any]:
    splits, device = task.splits, next(model.parameters()).device
    texts: list[str] = []
    for inputs in splits.test[0].split(task.measuring["batch_size"]):
        tokens = model.generate(
            inputs.to(device), max_length=splits.input_shape[1], num_beams=task.measuring["num_beams"]
        )
        texts += splits.decode(tokens.cpu())
    inputs, targets = (part[: task.measuring["num_train"]] for part in splits.train)
    losses = {
        "test_loss": _loss(model, task, splits.test),
        "train_loss": _loss(model, task, (inputs, targets)),
    }
    return losses | {"examples": texts[:NUM_EXAMPLES]} | rouge(texts, splits.test_summaries)


def _loss(model: nn.Module, task: SummaryTask, pairs: tuple[Tensor, Tensor]) -> float:
    return evaluate(model, nn.CrossEntropyLoss(), pairs, batch_size=task.measuring["batch_size"]).loss
