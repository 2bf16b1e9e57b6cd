"""Measurements of a spectrum against the dense matrix; constants in units of predictions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from curvlab.lab.data import TokenSplits
from experiments.shared.spectrum import constants, gauss_newton, spectrum, trace
from experiments.shared.task import TrainedTask

SETTINGS = OmegaConf.create(
    {
        "spectrum": {"trace_probes": 8, "rtol": 0.01},
        "constant": {"num_leading": 4, "num_random": 4, "num_examples": 8, "num_batches": 16, "batch_size": 16},
    }
)


class FakeRun:
    """Computes every unit and keeps its key."""

    def __init__(self) -> None:
        self.keys: dict[str, dict] = {}

    def unit(self, name: str, key: dict, compute, *, version: int, about: str) -> dict:
        self.keys[name] = key
        return compute()

    def generator(self, *names: object) -> torch.Generator:
        return torch.Generator().manual_seed(sum(str(names).encode()))

    def add_matvecs(self, count: int) -> None:
        pass


def small_task(**changes: Any) -> TrainedTask:
    torch.manual_seed(0)
    inputs, targets = torch.randn(40, 5), torch.randint(3, (40,))
    values: dict[str, Any] = {
        "run": None,
        "name": "linear",
        "settings": OmegaConf.create({}),
        "splits": SimpleNamespace(task="classification", num_outputs=3),
        "data_key": {},
        "model": nn.Linear(5, 3).eval(),
        "train": (inputs, targets),
        "train_indices": torch.arange(40),
        "trained_key": {"model": "linear"},
        "num_parameters": 18,
        "train_loss": 1.0,
        "test_loss": float("nan"),
        "test_accuracy": None,
    }
    return TrainedTask(**(values | changes))


def test_trace_and_largest_eigenvalue_are_those_of_the_dense_matrix() -> None:
    run = FakeRun()
    task = small_task(run=run)
    found = spectrum(run, task, SETTINGS)
    assert run.keys["spectrum/largest"] == {"model": "linear", "rtol": 0.01}
    dense = gauss_newton(task).to_dense().double()
    assert found["largest_eigenvalue"] == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=0.02)
    assert found["trace"] == pytest.approx(float(dense.trace()), rel=1e-6)
    assert found["trace_stderr"] == 0
    many = small_task(run=run, splits=SimpleNamespace(task="classification", num_outputs=1000))
    by_probes = trace(run, many, SETTINGS)  # cheaper than a gradient for each of 1,000 classes
    assert 0 < abs(by_probes["trace"] - float(dense.trace())) < 5 * by_probes["trace_stderr"]


def test_constants_of_language_models_count_tokens() -> None:
    """The same examples as sequences of four predictions each: C is four times larger, |B| being in tokens."""
    images = small_task()
    repeated = (images.train[0][:, None].expand(-1, 4, -1), images.train[1][:, None].expand(-1, 4))
    splits = TokenSplits.__new__(TokenSplits)
    object.__setattr__(splits, "task", "classification")
    sequences = small_task(train=repeated, splits=splits)
    assert [sequences.predictions_per_example, images.predictions_per_example] == [4, 1]
    trace = float(gauss_newton(images).to_dense().trace())
    found = [constants(FakeRun(), task, SETTINGS, trace=trace) for task in (images, sequences)]
    assert found[1]["largest"] == pytest.approx(4 * found[0]["largest"], rel=1e-4)
