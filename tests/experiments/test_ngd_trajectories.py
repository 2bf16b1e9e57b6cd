"""What the measurements along a training share, and what its columns are."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from curvlab import runs
from experiments.ngd.trajectories import Problem, load_problem, trajectory


@pytest.fixture
def cfg(tmp_path: Path) -> OmegaConf:
    folders = [f"results.root={tmp_path / 'results'}", f"store.root={tmp_path / 'store'}", "tracker=none"]
    return runs.load_config("ngd/fig2_llc_trace_epochs", ["preset=smoke", *folders])


def measured(cfg: OmegaConf, optimizer: dict[str, object], **training: object) -> tuple[Problem, pd.DataFrame]:
    cfg = OmegaConf.merge(cfg, {"training": training})
    with runs.start(cfg, paper="ngd", item="fig2", title="test") as run:
        problem = load_problem(run, cfg.data, cfg.models.ffnn, "ffnn")
        return problem, trajectory(run, problem, optimizer, cfg, seed=0)


def test_equal_weights_give_equal_numbers_at_every_checkpoint(cfg: OmegaConf) -> None:
    """The same probes, examples and chains: a difference between checkpoints is one between weights."""
    _, table = measured(cfg, {"name": "sgd", "lr": 1e-30}, num_epochs=3, batch_size=50, checkpoints=[1, 3])
    for column in ("trace", "llc", "wbic", "train_loss", "validation_loss"):
        assert table[column].nunique() == 1


def test_update_norm_is_the_gradients_for_one_step_of_sgd(cfg: OmegaConf) -> None:
    everything = {"num_epochs": 1, "batch_size": 200, "checkpoints": [1]}
    for lr in (0.1, 0.4):
        problem, table = measured(cfg, {"name": "sgd", "lr": lr}, **everything)
        with runs.start(cfg, paper="ngd", item="fig2", title="test") as run:
            model = problem.build(run, 0)
        nn.CrossEntropyLoss()(model(problem.train[0]), problem.train[1]).backward()
        norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
        assert table.update_norm[0] == pytest.approx(float(norm), rel=1e-4)
