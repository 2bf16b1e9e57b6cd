"""Lemma 1 along a training run: the eigenvalues of what Ginger multiplies gradients by, in single precision."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from curvlab.lab import Run
from curvlab.lab.data import DataSplits
from curvlab.lab.models import MLP, build_model
from curvlab.linalg import flatten
from curvlab.optim import Ginger
from curvlab.training import curvature_step, train


def eigenvalue_bounds(run: Run, splits: DataSplits, settings: DictConfig) -> list[dict[str, Any]]:
    """Train a small network by Ginger, and return a row for each checkpoint (a number of updates).

    Columns: updates; sigma, the largest eigenvalue of U diag(σ) Uᵀ; sigma_bound, (1 - αᵗ) max ‖d‖², which bounds
    that of any moving average; smallest and largest, eigenvalues of G⁻¹ as it is applied (a product for each
    parameter), and largest_by_damping, the same times γ, which Lemma 1 says is 1; gram_error, the largest entry
    of UᵀU - I.

    Args:
        run: seeds and device.
        splits: a classification.
        settings: `hidden_sizes`, `num_updates`, `checkpoints`, `batch_size`, and `ginger`, its settings.
    """
    model = build_model(
        partial(MLP, hidden_sizes=list(settings.hidden_sizes)),
        input_shape=splits.input_shape,
        num_outputs=splits.num_outputs,
        generator=run.generator("start", "lemma 1"),
    ).to(run.device)
    optimizer = _Measured(model.parameters(), settings.checkpoints, **settings.ginger)
    train(
        model,
        nn.CrossEntropyLoss(),
        splits.train,
        num_steps=settings.num_updates,
        batch_size=settings.batch_size,
        optimizer=optimizer,
        step=curvature_step,
        generator=run.generator("batches", "lemma 1"),
    )
    return optimizer.rows


class _Measured(Ginger):
    """Ginger that measures itself after some of its updates."""

    def __init__(self, params: Any, checkpoints: list[int], **settings: Mapping[str, Any]) -> None:
        super().__init__(params, **settings)  # type: ignore[arg-type]  # settings by name
        self.rows: list[dict[str, Any]] = []
        self._checkpoints = set(checkpoints)
        self._updates, self._longest = 0, 0.0

    def update_curvature(self, **settings: Any) -> None:
        members = [parameter for group in self.param_groups for parameter in group["params"]]
        d = flatten(parameter.grad for parameter in members)
        self._longest = max(self._longest, float(d.norm()) ** 2)
        super().update_curvature(**settings)
        self._updates += 1
        if self._updates in self._checkpoints:
            self.rows.append(self._row(d))

    def _row(self, like: Tensor) -> dict[str, Any]:
        settings = self.param_groups[0]
        ((sigma, basis),) = self.eigendecompositions()
        columns = [self.inverse_product(column) for column in torch.eye(len(like), dtype=like.dtype)]
        inverse = torch.stack([column.cpu() for column in columns], 1).double()
        values = torch.linalg.eigvalsh((inverse + inverse.T) / 2)
        gram = basis.T @ basis
        return {
            "damping": settings["damping"],
            "rank": settings["rank"],
            "num_parameters": len(like),
            "updates": self._updates,
            "sigma": float(sigma[0]),
            "sigma_bound": (1 - settings["decay"] ** self._updates) * self._longest,
            "smallest": float(values[0]),
            "largest": float(values[-1]),
            "largest_by_damping": float(values[-1]) * settings["damping"],
            "gram_error": float((gram - torch.eye(len(gram), dtype=gram.dtype)).abs().max()),
        }
