"""Fig. 4, traces of both sides of condition C.1 from random quadratic forms."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from curvlab.curvature import GaussNewtonOperator
from curvlab.lab import Run
from curvlab.lab.data.token_splits import IGNORED
from curvlab.linalg import LinearOperator
from experiments.shared.spectrum import SEQUENCES_AT_A_TIME, gauss_newton
from experiments.shared.task import TrainedTask


def sampling_gap(run: Run, task: TrainedTask, cfg: DictConfig, *, batch_size: int) -> dict[str, Any]:
    """Return tr(E G̃² - G²)/P for batches of `batch_size` examples: mean and standard error.

    E ‖G̃'g - G̃''g‖² / 2 with two independent batches for each normal vector g of variance 1/P. The paper takes
    E ‖G̃ g‖² - ‖G g‖²; the difference of two batches has the same mean and needs no product with all the data.
    """

    def compute() -> dict[str, Any]:
        operator, generator = gauss_newton(task), run.generator("sampling gap", task.seed_name, batch_size)
        values = []
        for _ in run.progress(range(cfg.condition.num_realizations), f"{task.label}, |B| = {batch_size}"):
            pair = [operator.sample(batch_size, generator) for _ in range(2)]
            values.append(_half_square(operator, pair, generator))
        run.add_matvecs(2 * len(values))
        return _mean(torch.stack(values))

    settings = {"batch_size": batch_size, "num_realizations": cfg.condition.num_realizations}
    about = f"gap of batches of {task.label}, |B| = {batch_size}"
    return run.unit("lissa/sampling_gap", task.key | settings, compute, version=1, about=about)


def token_gap(run: Run, task: TrainedTask, cfg: DictConfig) -> dict[str, Any]:
    """Return the same for batches of single tokens: one of each of `token_batch` sequences, all else ignored.

    These are independent, which the tokens of one sequence are not: the ratio of the two gaps at the same number
    of tokens is what their coherence costs (B.3, where it is bounded by R).
    """
    num = cfg.condition.token_batch

    def compute() -> dict[str, Any]:
        operator, generator = gauss_newton(task), run.generator("token gap", task.seed_name)
        values = []
        for _ in run.progress(range(cfg.condition.num_realizations), f"{task.label}, single tokens"):
            pair = [_token_batch(task, num, generator) for _ in range(2)]
            values.append(_half_square(operator, pair, generator))
        run.add_matvecs(2 * len(values))
        return _mean(torch.stack(values))

    settings = {"token_batch": num, "num_realizations": cfg.condition.num_realizations}
    about = f"gap of single tokens of {task.label}"
    return run.unit("lissa/token_gap", task.key | settings, compute, version=1, about=about)


def _half_square(operator: LinearOperator, pair: list[Any], generator: torch.Generator) -> Tensor:
    vector = operator.randn(1, generator) / operator.shape[0] ** 0.5
    difference = pair[0] @ vector - pair[1] @ vector
    return operator.inner(difference, difference).double().cpu()[0] / 2


def _token_batch(task: TrainedTask, num: int, generator: torch.Generator) -> GaussNewtonOperator:
    """Return G̃ of `num` independent tokens, each uniform over all predicted ones (sequences of equal length)."""
    inputs, targets = task.train
    rows = torch.randint(len(targets), (num,), generator=generator)
    chosen = targets[rows]
    columns = torch.randint(chosen.shape[1], (num, 1), generator=generator).to(chosen.device)
    kept = torch.full_like(chosen, IGNORED).scatter(1, columns, chosen.gather(1, columns))
    return GaussNewtonOperator(task.model, task.loss, (inputs[rows], kept), batch_size=SEQUENCES_AT_A_TIME)


def _mean(values: Tensor) -> dict[str, Any]:
    return {"value": float(values.mean()), "stderr": float(values.std()) / len(values) ** 0.5}
