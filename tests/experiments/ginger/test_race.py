"""The parts of the race: equal budgets, the steps of each optimizer, divergence, and what a training records."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from curvlab import runs
from curvlab.models import ResNet20
from curvlab.optim import PUBLISHED_GINGER
from curvlab.runs import Run, Store
from curvlab.training import Learner, MeanLoss, StepInfo, TrainingBatch, gradient_step, shared_curvature_step
from experiments.ginger.race.final import final_run
from experiments.ginger.race.muon import MuonWithAdam
from experiments.ginger.race.optimizers import (
    augmented,
    data_label_step,
    gradients_per_step,
    make_optimizer,
    why_unavailable,
)
from experiments.ginger.race.paired import best_of, of_racer
from experiments.ginger.race.racers import Racer, load_racers
from experiments.ginger.race.task import RaceTask, load_race_task
from experiments.ginger.race.training import trained
from experiments.ginger.race.tuning import round_sizes, seeds_and_steps, tune
from experiments.target import load_config, task_settings
from experiments.target.discovery import all_targets

GINGER = {"optimizer": "ginger", "labels": "sampled", "scope": "global", "momentum": 0.9, "decay": 0.99}


@pytest.fixture
def race(tmp_path: Path) -> Iterator[tuple[Run, RaceTask, Any]]:
    """Return an open run, its task and the task's settings, at smoke scale."""
    target = all_targets()["ginger/tab1"]
    folders = [f"results.root={tmp_path / 'results'}", f"store.root={tmp_path / 'store'}"]
    cfg = load_config(target, ["preset=smoke", "tracker=none", "progress=false", *folders])
    ((name, settings),) = task_settings(cfg).items()
    with runs.start(cfg, key=target.key, title=target.title) as run:
        yield run, load_race_task(run, name, settings), settings


def racer(name: str = "adam", **changes: Any) -> Racer:
    settings = {"optimizer": "adam", "momentum": 0.9, "decay": 0.99}
    fields: dict[str, Any] = {"label": name, "kind": "paper", "settings": settings, "candidates": ({},)}
    fields |= {"ranks": (None,), "tuned_as": name, "batch_factor": 1, "epoch_factor": 1}
    return Racer(name=name, **(fields | changes))


# ----------------------------------------------------------------------------------------- the budget
def test_rounds_shrink_by_one_factor_to_the_finalists() -> None:
    assert round_sizes(40, 3) == [40, 9, 2]
    assert round_sizes(8, 3) == [8, 4, 2]
    assert round_sizes(2, 3) == [2, 2, 2]
    assert round_sizes(1, 2) == [1, 1]
    assert round_sizes(5, 1) == [5]


@pytest.mark.parametrize(
    ("share", "expected"), [(10.0, (1, 10)), (100.0, (1, 100)), (250.0, (3, 83)), (0.2, (1, 1))]
)
def test_what_is_longer_than_a_final_run_goes_into_seeds(share: float, expected: tuple[int, int]) -> None:
    assert seeds_and_steps(share, 100) == expected


def test_every_racer_tunes_with_the_same_number_of_gradients(race: tuple[Run, RaceTask, Any]) -> None:
    run, task, settings = race
    settings.tuning, settings.num_epochs = {"num_gradients": 240, "num_rounds": 3}, 20
    candidates = ({"damping": 0.1, "clip": None}, {"damping": 1.0, "clip": None})
    spent = {}
    for one in (
        racer(),
        racer("two", batch_factor=2),
        racer("ginger", settings=GINGER, candidates=candidates, ranks=(1, 2)),
    ):
        tuned = tune(run, task, one, settings)
        spent[one.name] = sum(row["gradients"] for row in tuned.rows)
        assert sum(row["chosen"] for row in tuned.rows) == 1
        chosen = next(row for row in tuned.rows if row["chosen"])
        assert chosen["validation_loss"] == min(r["validation_loss"] for r in tuned.rows if r["round"] == 3)
        assert tuned.chosen == {**chosen["candidate"], "lr": chosen["lr"]}
    assert spent == pytest.approx(dict.fromkeys(spent, 240), rel=0.08)  # whole steps


def test_a_setting_that_diverges_is_chosen_last(race: tuple[Run, RaceTask, Any]) -> None:
    run, task, settings = race
    settings.lrs = [1e9, 0.05]
    plain = racer("momentum", settings={"optimizer": "momentum", "momentum": 0.9})
    tuned = tune(run, task, plain, settings)
    assert tuned.chosen == {"lr": 0.05}
    assert {row["lr"] for row in tuned.rows if math.isinf(row["validation_loss"])} == {1e9}


# --------------------------------------------------------------------------------------- one training
def test_a_training_records_every_epoch_and_shares_its_start(race: tuple[Run, RaceTask, Any]) -> None:
    run, task, _ = race
    settings = {"optimizer": "momentum", "lr": 0.1, "momentum": 0.9}
    found = trained(run, task, settings, num_steps=10, batch_size=40, seed=0, with_test=True)
    assert found["step"] == [0, 4, 8, 10]  # 160 images in batches of 40; the last pass is cut short
    assert len(found["step_losses"]) == 10
    assert len(found["epoch_losses"]) == 3
    assert found["seconds"] == sorted(found["seconds"])
    assert found["seconds"][0] == 0.0 < found["seconds"][1]
    assert not found["diverged"]
    other = trained(
        run,
        task,
        GINGER | {"lr": 0.01, "rank": 2, "damping": 0.1},
        num_steps=4,
        batch_size=40,
        seed=0,
        with_test=False,
    )
    assert other["validation_loss"][0] == found["validation_loss"][0]  # one start
    assert other["step_losses"][0] == pytest.approx(
        float(found["step_losses"][0]), rel=1e-6
    )  # and one first batch
    assert "test_loss" not in other
    assert len(task.train[1]) + len(task.validation[1]) == 200


def test_a_training_that_diverges_is_a_result(race: tuple[Run, RaceTask, Any]) -> None:
    run, task, settings = race
    optimizer = {"optimizer": "momentum", "lr": 1e30, "momentum": 0.9}
    one = racer("momentum", settings={"optimizer": "momentum", "momentum": 0.9})
    row, curve = final_run(run, task, one, optimizer, settings, seed=0)
    assert row["diverged"]
    assert row["best_epoch"] == 0  # the start
    assert 0 <= row["test_accuracy"] < 0.4
    assert math.isnan(row["min_train_loss"])
    assert curve.empty
    curvature = {**GINGER, "lr": 0.5, "rank": 2, "damping": 1e-5, "clip": None}
    assert final_run(run, task, one, curvature, settings, seed=0)[0]["diverged"]


@pytest.mark.parametrize("lr", [1e4, 1e30])
@pytest.mark.parametrize("name", ["ginger", "qng", "ngd", "muon", "soap"])
def test_no_optimizer_stops_the_race(race: tuple[Run, RaceTask, Any], name: str, lr: float) -> None:
    run, task, settings = race
    own = {"ginger": {**GINGER, "damping": 1e-5}, "qng": {**GINGER, "optimizer": "qng"}, "ngd": {}}
    optimizer = {"optimizer": name} | own.get(name, {"momentum": 0.9, "decay": 0.99}) | {"lr": lr}
    optimizer |= {"rank": 2} if name in ("ginger", "qng") else {}
    if why_unavailable(optimizer):
        pytest.skip("pytorch-optimizer is an extra")
    row, _ = final_run(run, task, racer(name, settings=optimizer), optimizer, settings, seed=0)
    assert row["diverged"]
    assert 0 <= row["test_accuracy"] < 0.5


def test_final_runs_report_the_epoch_that_validation_prefers(race: tuple[Run, RaceTask, Any]) -> None:
    run, task, settings = race
    settings.num_epochs = 5
    row, curve = final_run(run, task, racer(), {**racer().settings, "lr": 0.05}, settings, seed=1)
    assert row["accuracy"] == curve.validation_accuracy.max()
    assert curve.validation_accuracy.iloc[row["best_epoch"] - 1] == row["accuracy"]
    assert row["gradients"] == 5 * 4 == curve.step.iloc[-1]


@pytest.mark.parametrize("diverges_after", [None, 9])
def test_an_interrupted_training_ends_as_if_it_had_not_been(
    race: tuple[Run, RaceTask, Any], monkeypatch: pytest.MonkeyPatch, diverges_after: int | None
) -> None:
    run, task, _ = race
    settings = {**GINGER, "lr": 0.02, "rank": 2, "damping": 0.1}
    how = {"num_steps": 12, "batch_size": 40, "with_test": False}
    calls, kill_at = 0, None

    def step(learner: Learner, batch: TrainingBatch) -> StepInfo:
        nonlocal calls
        calls += 1
        if calls == kill_at:
            raise KeyboardInterrupt
        taken = max((int(state["step"]) for state in learner.optimizer.state.values()), default=0)
        return StepInfo(math.nan) if taken == diverges_after else shared_curvature_step(learner, batch)

    monkeypatch.setattr("experiments.ginger.race.optimizers.shared_curvature_step", step)
    expected = trained(run, task, settings, **how, seed="a")
    run.store = Store(Path(run.store.root) / "other")
    monkeypatch.setattr("curvlab.checkpoint.SECONDS_BETWEEN_SAVES", 0.0)
    monkeypatch.setattr("curvlab.checkpoint.MAX_SHARE", math.inf)
    calls, kill_at = 0, 7
    with pytest.raises(KeyboardInterrupt):
        trained(run, task, settings, **how, seed="a")
    found = trained(run, task, settings, **how, seed="a")
    assert found["diverged"] is (diverges_after is not None)
    for name in ("validation_loss", "epoch_losses", "step"):
        assert found[name] == expected[name]
    assert torch.equal(found["step_losses"], expected["step_losses"])
    # Seven until the kill, then those that are left; one that diverges is done once more from its start.
    assert calls == (7 + 12 - 6 if diverges_after is None else 7 + 4 + 10)


# --------------------------------------------------------------------------------------- the optimizers
def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def batch() -> TrainingBatch:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(9, 3, generator=generator, dtype=torch.float64)
    return TrainingBatch(inputs, torch.randint(3, (9,), generator=generator))


def test_the_datas_labels_give_the_sum_of_gradients_over_the_root_of_the_batch() -> None:
    model, seen = network(), []

    class Recorder(torch.optim.SGD):
        def update_curvature(self) -> None:
            seen.extend(parameter.grad.clone() for parameter in model.parameters())

    reference = copy.deepcopy(model)
    loss = nn.CrossEntropyLoss(reduction="sum")(reference(batch().inputs), batch().targets) / 3  # root of 9
    expected = torch.autograd.grad(loss, list(reference.parameters()))
    data_label_step(Learner(model, MeanLoss(nn.CrossEntropyLoss()), Recorder(model.parameters(), lr=0.1)), batch())
    torch.testing.assert_close(seen, list(expected))
    plain = Learner(reference, MeanLoss(nn.CrossEntropyLoss()), torch.optim.SGD(reference.parameters(), lr=0.1))
    gradient_step(plain, batch())
    torch.testing.assert_close(list(model.parameters()), list(reference.parameters()))


def test_without_curvature_ginger_is_the_clipped_average_gradient_over_the_damping() -> None:
    model, reference = network(), network()
    settings = {**GINGER, "labels": "none", "lr": 0.1, "rank": 4, "damping": 0.5, "clip": 0.01}
    optimizer, step = make_optimizer(model, settings)
    average = [torch.zeros_like(parameter) for parameter in reference.parameters()]
    for count in range(1, 4):
        step(Learner(model, MeanLoss(nn.CrossEntropyLoss()), optimizer), batch())
        loss = nn.CrossEntropyLoss()(reference(batch().inputs), batch().targets)
        gradients = torch.autograd.grad(loss, list(reference.parameters()))
        with torch.no_grad():
            for parameter, mean, gradient in zip(reference.parameters(), average, gradients, strict=True):
                mean.mul_(0.9).add_(0.1 * gradient)
                parameter.sub_(0.1 * (mean / (1 - 0.9**count) / 0.5).clamp(-0.01, 0.01))
    torch.testing.assert_close(list(model.parameters()), list(reference.parameters()))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (GINGER, 2),
        ({**GINGER, "labels": "data"}, 1),
        ({**GINGER, "labels": "none"}, 1),
        ({**GINGER, "optimizer": "qng"}, 2),
        ({"optimizer": "adam"}, 1),
    ],
)
def test_gradients_of_a_step(settings: dict[str, Any], expected: int) -> None:
    assert gradients_per_step(settings) == expected


def test_unknown_names_and_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown optimizer 'sgd': choose ginger, qng, momentum"):
        make_optimizer(network(), {"optimizer": "sgd", "lr": 0.1})
    with pytest.raises(ValueError, match="unknown labels 'true': choose sampled, data, none"):
        make_optimizer(network(), {**GINGER, "labels": "true"})
    assert why_unavailable({"optimizer": "adam"}) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "curvlab[benchmark]" in str(why_unavailable({"optimizer": "soap"}))


def test_soap_trains() -> None:
    pytest.importorskip("pytorch_optimizer")
    model = network().float()
    optimizer, step = make_optimizer(model, {"optimizer": "soap", "lr": 0.05, "momentum": 0.9, "decay": 0.99})
    examples = TrainingBatch(batch().inputs.float(), batch().targets)
    learner = Learner(model, MeanLoss(nn.CrossEntropyLoss()), optimizer)
    losses = [step(learner, examples).loss for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]


def test_augmented_steps_see_changed_images_of_the_same_classes() -> None:
    images = TrainingBatch(torch.rand(6, 3, 16, 16), torch.arange(6))
    seen: list[TrainingBatch] = []
    augmented(lambda learner, batch: seen.append(batch))(None, images)  # type: ignore[arg-type,return-value,func-returns-value]
    assert seen[0].inputs.shape == images.inputs.shape
    assert not torch.equal(seen[0].inputs, images.inputs)
    assert torch.equal(seen[0].targets, images.targets)


# -------------------------------------------------------------------------------------------------- Muon
def test_muon_moves_hidden_weights_and_adam_the_rest() -> None:
    model, reference = network().float(), network().float()
    optimizer = MuonWithAdam(model, 0.01, momentum=0.9, decay=0.99)
    hidden = [reference[0].weight, reference[2].weight]
    others = [p for p in reference.parameters() if all(p is not weight for weight in hidden)]
    inner = [
        torch.optim.Muon(hidden, lr=0.01, momentum=0.9, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.Adam(others, lr=0.01, betas=(0.9, 0.99)),
    ]
    examples = batch()
    for _ in range(3):
        for network_ in (model, reference):
            network_.zero_grad()
            nn.CrossEntropyLoss()(network_(examples.inputs.float()), examples.targets).backward()
        optimizer.step()
        for one in inner:
            one.step()
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_muon_takes_kernels_as_matrices_and_resumes() -> None:
    torch.manual_seed(0)
    model = ResNet20((3, 8, 8), 10, width=2)
    images, targets = torch.rand(8, 3, 8, 8), torch.arange(8)
    optimizer = MuonWithAdam(model, 0.01, momentum=0.9, decay=0.99)

    def go(model: nn.Module, optimizer: MuonWithAdam) -> list[torch.Tensor]:
        model.zero_grad()
        nn.CrossEntropyLoss()(model(images), targets).backward()
        optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    before = [parameter.detach().clone() for parameter in model.parameters()]
    after = go(model, optimizer)
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    # Muon's step is orthogonal up to its five iterations: singular values of a kernel's change are alike.
    change = (after[3] - before[3]).flatten(1)
    values = torch.linalg.svdvals(change)
    assert values.max() < 3 * values.min()
    other = copy.deepcopy(model)
    resumed = MuonWithAdam(other, 0.5, momentum=0.9, decay=0.99)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(go(model, optimizer), go(other, resumed), strict=True))
    with pytest.raises(ValueError, match="muon needs a network with a hidden layer"):
        MuonWithAdam(nn.Linear(2, 2), 0.1, momentum=0.9, decay=0.99)
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: None)


# -------------------------------------------------------------------------------------------- the racers
def test_racers_are_read_from_the_config() -> None:
    settings = OmegaConf.create(
        {
            "ranks": [1, 4],
            "racers": {
                "adam": {"label": "Adam", "kind": "paper", "settings": {"optimizer": "adam"}},
                "ginger": {"label": "G", "kind": "paper", "settings": GINGER, "candidates": [{"damping": 1.0}]},
                "tensor": {"label": "T", "kind": "ablation", "settings": GINGER, "ranks": [4]},
                "twice": {"label": "2", "kind": "ablation", "settings": {"optimizer": "adam"}, "tuned_as": "adam"},
                "gone": None,
            },
        }
    )
    racers = load_racers(settings)
    assert {name: one.ranks for name, one in racers.items()} == {
        "adam": (None,),
        "ginger": (1, 4),
        "tensor": (4,),
        "twice": (None,),
    }
    assert racers["ginger"].with_rank(4, lr=0.1, damping=1.0) == {**GINGER, "rank": 4, "lr": 0.1, "damping": 1.0}
    assert racers["ginger"].gradients_per_step == 2
    settings.racers.adam = None
    with pytest.raises(ValueError, match="racers take the tuned settings of adam, which take no part"):
        load_racers(settings)


@pytest.mark.parametrize("preset", ["smoke", "embedded", "laptop", "paper"])
def test_the_config_has_the_published_settings(preset: str) -> None:
    cfg = load_config(all_targets()["ginger/tab1"], [f"preset={preset}"])
    for settings in task_settings(cfg).values():
        racers = load_racers(settings)
        published = racers["ginger_published"].settings
        assert {name: published[name] for name in PUBLISHED_GINGER} == PUBLISHED_GINGER
        control = racers["without_curvature"].settings
        assert control == {**published, "labels": "none"}


def test_best_racer_and_rank_by_validation() -> None:
    table = pd.DataFrame(
        [
            {"racer": racer, "rank": rank, "seed": seed, "accuracy": value, "loss": 1 - value}
            for racer, rank, value in [("qng", 1, 0.7), ("qng", 4, 0.8), ("adam", np.nan, 0.75)]
            for seed in range(2)
        ]
    )
    assert best_of(table, ["qng", "adam"]) == ("qng", 4)
    assert best_of(table, ["qng", "adam"], chosen_by="loss") == ("qng", 4)
    assert best_of(table, ["adam"]) == ("adam", None)
    assert of_racer(table, "qng", "accuracy").tolist() == pytest.approx([0.75, 0.75])
    assert of_racer(table, "qng", "accuracy", 1).tolist() == [0.7, 0.7]
    assert of_racer(table, "muon", "accuracy").empty
