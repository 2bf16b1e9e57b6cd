"""Operations and memory of one training step, the last columns of Table 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from curvlab.lab import Run
from curvlab.training import Learner, MeanLoss, TrainingBatch
from experiments.ginger.race.optimizers import make_optimizer
from experiments.ginger.race.racers import Racer
from experiments.ginger.race.task import RaceTask
from experiments.ginger.step_cost import call_cost

WARM = 2  # steps before: optimizers create their state in them


def cost_of_a_step(run: Run, task: RaceTask, racer: Racer, optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return `flops` and `memory` (bytes, at most alive at one time), counted as `step_cost.Cost` says.

    With all gradients of the step, its state and its batch, without augmentation. What happens in some steps only
    counts where it falls on the third or the fourth: SOAP turns its basis in every tenth.
    """
    count = task.batch_size * racer.batch_factor
    key = task.key | {"optimizer": dict(optimizer), "batch_size": count}

    def compute() -> dict[str, Any]:
        model = task.build(run, 0).train()
        stepper, step = make_optimizer(model, optimizer)
        learner = Learner(model, MeanLoss(nn.CrossEntropyLoss()), stepper)
        batch = TrainingBatch(task.train[0][:count], task.train[1][:count])
        for _ in range(WARM):
            step(learner, batch)
        stepper.zero_grad()
        held = [*tree_leaves(stepper.state_dict()), *model.state_dict().values(), batch.inputs, batch.targets]
        tensors = [tensor for tensor in held if isinstance(tensor, Tensor)]
        cost = call_cost(lambda: step(learner, batch), held=tensors, device=run.device, num_repeats=1)
        return {"flops": cost.flops, "memory": cost.peak_bytes}

    about = f"cost of a step of {racer.name}"
    return run.unit("ginger/race_cost", key, compute, version=1, about=about)
