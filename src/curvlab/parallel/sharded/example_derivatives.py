"""First derivatives of a sharded model example by example, see curvlab.influence.example_derivatives."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import jvp

from curvlab.influence.example_derivatives import Measurement
from curvlab.parallel.sharded.operators import ShardedOperator
from curvlab.problem import Batches, Data


@torch.inference_mode(False)
def per_example_gradients(operator: ShardedOperator, data: Data, measurement: Measurement) -> Tensor:
    """Return this rank's part of each example's gradient of `measurement`, (N, P_r).

    Args:
        operator: says the model and the loss.
        data: the same on every rank.
        measurement: (outputs, targets) -> (N,), one number for each example.

    Cost: 4F of each example on every rank, F a forward. Memory: N P_r.
    """
    model, ranks = operator.model, operator.ranks
    examples = Batches(data, batch_size=1, device=operator.device, dtype=operator.dtype).in_fixed_order()
    ranks.agree(torch.tensor(examples.num_examples), "how many examples they measure: pass the same on every rank")
    rows = torch.zeros(examples.num_examples, operator.num_rows, dtype=operator.dtype, device=operator.device)
    for index, row in enumerate(rows):
        inputs, targets = examples.select(torch.tensor([index]))[0]
        with model.set_up():
            recorded = model.record(inputs)
            outputs = recorded.values[0].requires_grad_()
            operator.loss.check(outputs.detach(), targets)
            with torch.enable_grad():
                (signal,) = torch.autograd.grad(_measured(measurement, outputs, targets).sum(), outputs)
            # All ranks have gone through the same example, and what they pull back is summed.
            recorded.pull_back(signal if ranks.is_first else torch.zeros_like(signal), row=row)
    return rows


@torch.inference_mode(False)
def directional_derivatives(operator: ShardedOperator, directions: Tensor, measurement: Measurement) -> Tensor:
    """Return the derivative of `measurement` at each own example along directions, (P_r, K) -> (N_r, K).

    In the order of this rank's data. Cost: 2F of the data a direction.
    """
    model, vectors = operator.model, directions.T.contiguous()
    rows = []
    for (inputs, targets), weight in operator.whole_in_step():
        columns = []
        for vector in vectors:
            with model.set_up():
                outputs, tangents = model.push_forward(inputs, vector)
            operator.loss.check(outputs, targets)

            def measured(outputs: Tensor, targets: Tensor = targets) -> Tensor:
                return _measured(measurement, outputs, targets)

            columns.append(jvp(measured, (outputs,), (tangents,))[1])
        if weight:
            rows.append(torch.stack(columns, dim=1))
    return torch.cat(rows)


def _measured(measurement: Measurement, outputs: Tensor, targets: Tensor) -> Tensor:
    values = measurement(outputs, targets)
    if values.shape != targets.shape[:1]:
        raise ValueError(
            f"measurement must return one number for each example, shape {tuple(targets.shape[:1])}, got "
            f"{tuple(values.shape)}"
        )
    return values
