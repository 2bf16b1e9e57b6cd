"""What the measurements along a training share, and what its columns are."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from curvlab import iterate
from curvlab.curvature import FisherOperator
from curvlab.lab import start
from curvlab.optim import ExactNGD
from curvlab.sampling import SGLDSettings
from curvlab.training import Learner, MeanLoss, StepInfo, TrainingBatch, evaluate
from experiments.ngd import sampling
from experiments.ngd.trajectories import Network, last_state, make_optimizer, trajectory
from tests.refusals import refuses

MEASURES = {
    "llc": {"num_draws": 20, "num_burnin_steps": 10, "step_size": 1e-3, "batch_size": 64, "localization": 100},
    "trace": {"num_train": 100, "num_matvecs": 10, "max_matvecs": 10},
}


@pytest.fixture
def cfg(config_of) -> OmegaConf:
    cfg = config_of("ngd/fig6")
    OmegaConf.set_struct(cfg, False)
    (own,) = cfg.tasks.values()
    return OmegaConf.merge(cfg, MEASURES, {"data": own.data, "model": own.model, "seed_name": "ffnn"})


def measured(cfg: OmegaConf, optimizer: dict[str, object], **training: object) -> tuple[Network, pd.DataFrame]:
    cfg = OmegaConf.merge(cfg, {"training": training})
    with start(cfg, key="ngd/fig6", title="test") as run:
        network = Network.load(run, "ffnn", cfg)
        return network, trajectory(network, optimizer, cfg, seed=0)


def test_equal_weights_give_equal_numbers_at_every_checkpoint(cfg: OmegaConf) -> None:
    """The same probes, examples and chains: a difference between checkpoints is one between weights."""
    _, table = measured(cfg, {"name": "sgd", "lr": 1e-30}, num_epochs=3, batch_size=50, checkpoints=[1, 3])
    for column in ("trace", "llc", "wbic", "train_loss", "validation_loss"):
        assert table[column].nunique() == 1


def test_each_state_may_have_a_step_size_of_its_own(cfg: OmegaConf) -> None:
    """Null: chosen for each state; the chains are then those of that step size."""
    training = {"num_epochs": 2, "batch_size": 50, "checkpoints": [1, 2]}
    chosen = OmegaConf.merge(cfg, {"llc": {"step_size": None}, "trace": None})
    _, table = measured(chosen, {"name": "sgd", "lr": 0.1}, **training)
    assert table.step_size.nunique() == 2
    fixed = OmegaConf.merge(cfg, {"llc": {"step_size": float(table.step_size.iloc[0])}, "trace": None})
    _, again = measured(fixed, {"name": "sgd", "lr": 0.1}, **training)
    assert again.llc.iloc[0] == table.llc.iloc[0]
    assert table.curvature_cutoff.nunique() == 1  # or the states could not be compared


def test_a_state_without_a_step_size_is_not_valid(cfg: OmegaConf, monkeypatch: pytest.MonkeyPatch) -> None:
    found = sampling.choose_sgld_settings

    def not_converged(*args: object, **settings: object) -> SGLDSettings:
        return replace(found(*args, **settings, num_steps=4), converged=False)

    monkeypatch.setattr(sampling, "choose_sgld_settings", not_converged)
    chosen = OmegaConf.merge(cfg, {"llc": {"step_size": None}, "trace": None})
    _, table = measured(chosen, {"name": "sgd", "lr": 0.1}, num_epochs=1, batch_size=50, checkpoints=[1])
    assert not table.valid.any()
    assert table.problem.str.startswith("no step size keeps both limits").all()


def test_the_llc_is_measured_from_the_minimum(cfg: OmegaConf) -> None:
    """After one epoch the loss can still fall far: the raw estimate lacks it, and says so."""
    training = {"num_epochs": 1, "batch_size": 50, "checkpoints": [1]}
    task, table = measured(cfg, {"name": "sgd", "lr": 0.1}, **training)
    row = table.iloc[0]
    assert row.llc == pytest.approx(row.llc_raw + row.descent)
    assert row.descent > 0.1 * row.llc
    assert "the start lies above the minimum near it" in row.raw_problem
    assert "the start lies above" not in row.problem
    nbeta, size = 200 / math.log(200), len(task.train[1])
    assert size == 200
    assert row.wbic == pytest.approx(size * (row.train_loss + row.llc_raw / nbeta), rel=1e-5)


def test_update_norm_is_the_gradients_for_one_step_of_sgd(cfg: OmegaConf) -> None:
    everything = {"num_epochs": 1, "batch_size": 200, "checkpoints": [1]}
    for lr in (0.1, 0.4):
        task, table = measured(cfg, {"name": "sgd", "lr": lr}, **everything)
        model = task.start(0)
        nn.CrossEntropyLoss()(model(task.train[0]), task.train[1]).backward()
        norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
        assert table.update_norm[0] == pytest.approx(float(norm), rel=1e-4)


def test_interrupted_trainings_and_chains_end_at_the_same_numbers(
    cfg: OmegaConf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint after every step; broken off in the first training, and in the chains of the second LLC.

    Of the optimizer whose state is the largest: others' states are in tests/optim/test_optimizers.
    """
    monkeypatch.setattr(iterate, "SECONDS_BETWEEN_SAVES", 0.0)
    monkeypatch.setattr(iterate, "MAX_SHARE", math.inf)
    optimizer = {"name": "ngd", "lr": 0.01, "alpha": 1.0}
    training = {"num_epochs": 2, "batch_size": 50, "checkpoints": [1, 2]}
    _, whole = measured(OmegaConf.merge(cfg, {"store": {"root": str(tmp_path / "whole")}}), optimizer, **training)
    save, saved = iterate.SaveFile.save, Counter()

    def save_and_break_off(self: iterate.SaveFile, state: dict[str, object]) -> None:
        save(self, state)
        kind = self.path.name.split("_")[0]
        saved[kind] += 1
        if (kind, saved[kind]) in (("training.pt", 5), ("chains", 41)):  # a file holds both chains
            raise KeyboardInterrupt

    monkeypatch.setattr(iterate.SaveFile, "save", save_and_break_off)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            measured(cfg, optimizer, **training)
    _, resumed = measured(cfg, optimizer, **training)
    assert saved["training.pt"] == 7  # of eight steps: none was taken twice, and the last ends the work
    pd.testing.assert_frame_equal(resumed, whole, check_exact=True)


class Normalised(nn.Sequential):
    def __init__(self, input_shape: list[int], num_outputs: int, **ignored: object) -> None:
        first = nn.Linear(math.prod(input_shape), 4)
        super().__init__(nn.Flatten(), first, nn.BatchNorm1d(4), nn.Linear(4, num_outputs))


def test_label_noise_changes_that_share_of_the_training_labels(cfg: OmegaConf) -> None:
    with start(cfg, key="ngd/fig6", title="test") as run:
        plain, noisy = (
            Network.load(run, "ffnn", OmegaConf.merge(cfg, {"label_noise": share})) for share in (0.0, 0.4)
        )
        refuses("from 0 to below 1, got 1", Network.load, run, "ffnn", OmegaConf.merge(cfg, {"label_noise": 1.0}))
    assert int((noisy.train[1] != plain.train[1]).sum()) == 80  # of 200: no label is drawn as it was
    assert noisy.train[1].min() >= 0
    assert noisy.train[1].max() <= 9
    assert noisy.key != plain.key  # else the store would mix them up


def test_running_statistics_belong_to_the_state(cfg: OmegaConf) -> None:
    changed = {"model": {"_target_": f"{__name__}.Normalised"}, "trace": None, "llc": None}
    training = {"num_epochs": 2, "batch_size": 50, "checkpoints": [1, 2]}
    cfg = OmegaConf.merge(cfg, changed, {"training": training})
    optimizer = {"name": "sgd", "lr": 0.1}
    with start(cfg, key="ngd/fig6", title="test") as run:
        task = Network.load(run, "ffnn", cfg)
        table = trajectory(task, optimizer, cfg, seed=0)
        state = last_state(task, optimizer, cfg, seed=0)
        model = task.start(0)
        before = evaluate(model, task.loss, task.train).loss
        state.write_to(model)
        onward = trajectory(task, {"name": "sgd", "lr": 1e-30}, cfg, seed=0, start=state)
    assert state.buffers["2.num_batches_tracked"] == 2 * len(task.train[1]) // 50
    assert evaluate(model, task.loss, task.train).loss == table.train_loss.iloc[-1] < before
    assert onward.epoch.tolist() == [3, 4]
    # The weights stand still, and the statistics are those of the same weights after a few more batches.
    assert onward.train_loss.iloc[-1] == pytest.approx(table.train_loss.iloc[-1], rel=0.1)


# ------------------------------------------------------------------------------- the optimizers
def batch() -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(3, 2, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.randn(2, 3, dtype=torch.float64, generator=generator))
    inputs = torch.randn(8, 3, dtype=torch.float64, generator=generator)
    return model, inputs, torch.randint(2, (8,), generator=generator)


@pytest.mark.parametrize("name", ["sgd", "ngd", "exact_ngd"])
def test_every_optimizer_goes_downhill(name: str) -> None:
    model, inputs, targets = batch()
    step = make_step(model, inputs, targets, {"name": name, "lr": 0.05})
    losses = [step(TrainingBatch(inputs, targets)).loss for _ in range(20)]
    assert losses[-1] < losses[0]


def make_step(
    model: nn.Module, inputs: Tensor, targets: Tensor, settings: dict[str, Any]
) -> Callable[[TrainingBatch], StepInfo]:
    loss = nn.CrossEntropyLoss()
    optimizer, step = make_optimizer(model, loss, (inputs, targets), settings)
    return partial(step, Learner(model, MeanLoss(loss), optimizer))


def test_exact_ngd_takes_the_fisher_matrix_of_its_batch() -> None:
    model, inputs, targets = batch()
    loss = nn.CrossEntropyLoss()
    step = make_step(model, inputs, targets, {"name": "exact_ngd", "lr": 1.0, "alpha": 0.5, "rescale": True})
    step(TrainingBatch(inputs, targets))
    start = [parameter.detach().clone() for parameter in model.parameters()]
    step(TrainingBatch(inputs[:4], targets[:4]))
    own = FisherOperator(linear := copy_of(model, start), loss, (inputs[:4], targets[:4]))
    loss(linear(inputs[:4]), targets[:4]).backward()
    ExactNGD(linear.parameters(), own, 1.0, alpha=0.5, rescale=True).step()
    for expected, found in zip(linear.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def copy_of(model: nn.Module, values: list[Tensor]) -> nn.Module:
    other = copy.deepcopy(model)
    other.zero_grad()
    with torch.no_grad():
        for parameter, value in zip(other.parameters(), values, strict=True):
            parameter.copy_(value)
    return other


def test_unknown_optimizer() -> None:
    refuses("choose sgd, ngd or exact_ngd", make_step, *batch(), {"name": "adam", "lr": 0.1})
