"""The learning rate of a base network, from a list: by what it is chosen, and what a kill leaves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from curvlab.lab import load_config, runs, task_settings
from experiments.pbrf import networks
from experiments.pbrf.networks import _learning_rate, _validated, load_network
from experiments.pbrf.tab4 import TARGET


@dataclass(frozen=True)
class Stub:
    """As much of a network as the choice reads."""

    train: tuple[torch.Tensor, torch.Tensor]
    model: nn.Module
    loss: nn.Module
    lr: float = math.nan
    label: str = "stub"
    settings: Any = field(default_factory=lambda: SimpleNamespace(seed_name="stub"))
    run: Any = field(
        default_factory=lambda: SimpleNamespace(
            generator=lambda *words: torch.Generator().manual_seed(0), progress=lambda items, about: items
        )
    )


def network() -> Stub:
    x = torch.randn(100, 3, generator=torch.Generator().manual_seed(1))
    return Stub((x, (x[:, 0] > 0).long()), nn.Linear(3, 2), nn.CrossEntropyLoss())


def test_accuracy_and_loss_may_disagree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = {1.0: (0.3, 0.8), 0.1: (0.5, 0.9), 0.01: (0.4, 0.9), 0.001: (math.inf, 0.0)}
    monkeypatch.setattr(networks, "_validated", lambda own, held_out, unfinished: found[own.lr])
    chosen = {by: _learning_rate(network(), list(found), by, tmp_path / by) for by in ("loss", "accuracy")}
    assert chosen["loss"]["lr"] == 1.0
    assert chosen["accuracy"]["lr"] == 0.01  # of the two, the one with the lower loss
    assert chosen["loss"]["losses"] == [0.3, 0.5, 0.4, math.inf]


def test_what_has_ended_is_not_trained_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trained: list[tuple[float, Path]] = []

    def validated(own: Stub, held_out: tuple[torch.Tensor, torch.Tensor], unfinished: Path) -> tuple[float, float]:
        trained.append((own.lr, unfinished))
        assert (len(own.train[1]), len(held_out[1])) == (90, 10)
        if trained == [(1.0, unfinished)] or len(trained) > 2:
            return 1.0, 0.5
        raise KeyboardInterrupt

    monkeypatch.setattr(networks, "_validated", validated)
    with pytest.raises(KeyboardInterrupt):
        _learning_rate(network(), [1.0, 0.1], "loss", tmp_path)
    _learning_rate(network(), [1.0, 0.1], "loss", tmp_path)
    assert [lr for lr, _ in trained] == [1.0, 0.1, 0.1]
    assert trained[0][1] != trained[1][1] == trained[2][1]  # a checkpoint for each rate, found again


def test_loss_and_accuracy_are_those_of_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = replace(network(), model=nn.Linear(3, 2))
    end = nn.Linear(3, 2)
    monkeypatch.setattr(
        networks, "_end_of_base_run", lambda own, unfinished: parameters_to_vector(end.parameters())
    )
    x, y = network().train
    with torch.no_grad():
        outputs = end(x)
        expected = (float(nn.functional.cross_entropy(outputs, y)), float((outputs.argmax(1) == y).float().mean()))
    assert _validated(own, (x, y), tmp_path) == pytest.approx(expected, rel=1e-5)


def test_an_unknown_measure_is_refused(tmp_path: Path) -> None:
    folders = [f"results.root={tmp_path / 'results'}", f"store.root={tmp_path / 'store'}"]
    cfg = load_config(TARGET, ["preset=smoke", "tracker=none", "progress=false", *folders])
    ((name, settings),) = task_settings(cfg).items()
    settings.training = {**settings.training, "lr": [0.1, 0.01], "select_by": "perplexity"}
    with (
        runs.start(cfg, key=TARGET.key, title="") as run,
        pytest.raises(ValueError, match="choose one of loss, accuracy"),
    ):
        load_network(run, name, settings, 0)
