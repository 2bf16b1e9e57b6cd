"""What `train` can be told beside the basics: order, weights, optimizers, schedules, validation, interruptions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import Dataset, Subset

from curvlab.iterate import Checkpoint
from curvlab.training import (
    TrainingHistory,
    closure_step,
    cosine_after_warmup,
    evaluate,
    shuffled_batches,
    train,
)
from tests.refusals import refuses, stopped


def network(*, normalised: bool = False, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    hidden = [nn.BatchNorm1d(6)] if normalised else []
    return nn.Sequential(nn.Linear(3, 6), *hidden, nn.ReLU(), nn.Dropout(dropout), nn.Linear(6, 2))


def classes(size: int = 40, *, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 3, generator=generator)
    return inputs, (inputs[:, 0] + torch.randn(size, generator=generator) > 0).long()


def fit(model: nn.Module, data: Any = None, loss: Any = None, **settings: Any) -> TrainingHistory:
    defaults = {"num_epochs": 4, "batch_size": 8, "generator": torch.Generator().manual_seed(0)}
    if not isinstance(settings.get("optimizer"), torch.optim.Optimizer):
        defaults["lr"] = 0.05
    return train(model, loss or nn.CrossEntropyLoss(), data or classes(), **(defaults | settings))


def weights(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters()).detach()


def test_the_record_says_what_the_steps_were() -> None:
    history = fit(network(), schedule="cosine", momentum=0.7, weight_decay=0.01)
    assert (history.num_steps, history.batch_size, history.num_examples) == (20, 8, 40)
    assert (history.momentum, history.weight_decay) == (0.7, 0.01)
    assert len(history.learning_rates) == len(history.step_losses) == 20
    assert history.learning_rates[0] == 0.05
    assert history.learning_rates[10] == pytest.approx(0.025)
    assert history.losses[1] == pytest.approx(sum(history.step_losses[5:10]) / 5)


def test_a_given_order_decides_steps_and_epochs() -> None:
    model, other = network(), network()
    order = [torch.tensor([0, 1, 2]), torch.tensor([5]), torch.tensor([0, 0]), torch.tensor([7, 8])]
    history = fit(model, batches=iter(order), num_epochs=2, momentum=0.0)
    assert history.num_steps == 4
    assert len(history.losses) == 2
    inputs, targets = classes()
    for indices in order:
        nn.CrossEntropyLoss()(other(inputs[indices]), targets[indices]).backward()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.sub_(0.05 * parameter.grad)
                parameter.grad = None
    torch.testing.assert_close(weights(model), weights(other))
    assert len(fit(network(), batches=order, num_epochs=None).losses) == 1


@pytest.mark.parametrize(
    ("batches", "settings", "text"),
    [
        ([[0], [1], [2]], {"num_epochs": 2}, "3 batches cannot be split into num_epochs=2 equal epochs"),
        ([[0], [1]], {"num_epochs": None, "num_steps": 3}, "2 batches for num_steps=3: they must agree"),
        ([[0], [40]], {}, "indices from 0 to 39"),
        ([], {}, "there are 0 batches"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(batches: list, settings: dict, text: str) -> None:
    refuses(text, fit, network(), batches=[torch.tensor(b) for b in batches], **{"num_epochs": 1} | settings)


def test_weight_zero_removes_an_example() -> None:
    """With full batches: the same as training without it on N/(N-1) times smaller a rate."""
    inputs, targets = classes()
    removed = torch.ones(40)
    removed[3] = 0.0
    kept = removed.bool()
    model, without = network(), network()
    fit(model, batch_size=40, example_weights=removed)
    fit(without, (inputs[kept], targets[kept]), batch_size=39, lr=0.05 * 39 / 40)
    torch.testing.assert_close(weights(model), weights(without), rtol=1e-5, atol=1e-6)
    refuses(r"one weight for each of 40 examples, got shape \(3,\)", fit, network(), example_weights=torch.ones(3))


def test_any_optimizer() -> None:
    by_name, by_factory, instance = network(), network(), network()
    fit(by_name, momentum=0.5)
    fit(by_factory, optimizer=partial(torch.optim.SGD, momentum=0.5))
    fit(instance, optimizer=torch.optim.SGD(instance.parameters(), lr=0.05, momentum=0.5))
    assert torch.equal(weights(by_name), weights(by_factory))
    assert torch.equal(weights(by_name), weights(instance))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1.0), "lr": 0.1}, "leave lr out"),
        ({"optimizer": torch.optim.SGD, "weight_decay": 0.1}, "set it in the optimizer that you pass"),
        ({"num_steps": 3}, "give num_epochs or num_steps, not both"),
        ({"num_epochs": None}, "say how long to train"),
        ({"keep": "best"}, "needs a validation set"),
    ],
)
def test_settings_that_contradict_are_refused(settings: dict, text: str) -> None:
    refuses(text, fit, network(), **settings)


def test_a_number_of_steps_cuts_the_last_epoch_short() -> None:
    whole, cut = network(), network()
    fit(whole, num_epochs=1)
    history = fit(cut, num_epochs=None, num_steps=7)
    assert history.num_steps == 7
    assert len(history.losses) == 2
    again = network()
    fit(again, num_epochs=None, num_steps=5)
    assert torch.equal(weights(whole), weights(again))


def test_a_schedule_gives_the_factor_of_every_step() -> None:
    history = fit(network(), schedule=lambda step, num_steps: 1 / (1 + step))
    assert history.learning_rates == pytest.approx([0.05 / (1 + step) for step in range(20)])
    warm = fit(network(), schedule=cosine_after_warmup(5)).learning_rates
    assert warm[:6] == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05, 0.05])
    assert warm[-1] < 0.002


def test_groups_keep_the_ratio_of_their_rates() -> None:
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[-1].parameters(), "lr": 0.01}]
    optimizer = torch.optim.SGD(groups)
    fit(model, optimizer=optimizer, schedule=lambda step, num_steps: 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.005]


def test_the_weights_of_the_best_epoch_are_kept() -> None:
    held_out = classes(60, seed=2)
    states: list[dict[str, Tensor]] = []
    model = network(normalised=True)

    def keep_state(epoch: int, loss: float) -> None:
        states.append({name: value.clone() for name, value in model.state_dict().items()})

    # Validation gets worse in the end: the rate is raised a hundredfold after two epochs.
    history = fit(
        model,
        validation=held_out,
        keep="best",
        schedule=lambda step, num_steps: 1.0 if step < 10 else 100.0,
        on_epoch_end=keep_state,
    )
    best = min(range(4), key=history.validation.__getitem__)
    assert history.best_epoch == best < 3
    for name, value in model.state_dict().items():
        assert torch.equal(value, states[best][name]), name
    assert evaluate(model, nn.CrossEntropyLoss(), held_out).loss == history.validation[best]


def test_validation_may_be_any_number() -> None:
    history = fit(network(), validation=lambda model: -float(weights(model).norm()), keep="best")
    assert len(history.validation) == 4
    assert history.best_epoch is not None


SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"schedule": "cosine"},
    "adam": {"optimizer": "adam", "num_epochs": None, "num_steps": 18},
    "best": {"validation": classes(60, seed=2), "keep": "best", "measure_updates": True},
    "given": {"batches": shuffled_batches(40, batch_size=8, num_epochs=4, generator=torch.Generator())},
}


@pytest.mark.parametrize("kind", list(SETTINGS))
@pytest.mark.parametrize("end", [1, 7, 10, 18])
def test_an_interrupted_training_ends_at_the_same_weights(tmp_path: Path, kind: str, end: int) -> None:
    """Also with dropout and running statistics, and at the end of an epoch (10)."""

    def run(**changes: Any) -> tuple[nn.Module, TrainingHistory, torch.Generator]:
        model = network(normalised=True, dropout=0.3)
        generator = torch.Generator().manual_seed(0)
        settings = {"on_epoch_end": lambda epoch, loss: {"epoch": epoch, "at": weights(model)}, **SETTINGS[kind]}
        return model, fit(model, generator=generator, **(settings | changes)), generator

    whole, history, generator = run()
    checkpoint = {"checkpoint": Checkpoint(tmp_path / "training.pt", every=3)}
    stopped(end, run, **checkpoint)
    steps: list[int] = []
    resumed, again, resumed_generator = run(**checkpoint, callback=lambda state: steps.append(state.num_steps))
    assert steps[0] == (end - 1) // 3 * 3 + 1  # a kill loses fewer than three steps
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    for name in ("losses", "step_losses", "learning_rates", "validation", "best_epoch", "update_norms"):
        assert getattr(again, name) == getattr(history, name), name
    for first, second in zip(history.records, again.records, strict=True):
        assert first["epoch"] == second["epoch"]
        assert torch.equal(first["at"], second["at"])
    assert torch.equal(generator.get_state(), resumed_generator.get_state())
    assert list(tmp_path.iterdir()) == []


def focal(outputs: Tensor, targets: Tensor, *, gamma: float) -> Tensor:
    likelihood = outputs.log_softmax(1).gather(1, targets[:, None])
    return -((1 - likelihood.exp()) ** gamma * likelihood).mean()


class Shifted(Dataset):
    """A map-style data set of one's own."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = classes()
        return inputs[index] + self.by, targets[index]


@pytest.mark.parametrize(
    ("before", "changes", "named"),
    [
        ({}, {"lr": 0.06}, "optimizer"),
        ({}, {"batch_size": 10}, "batches"),
        ({}, {"schedule": "cosine"}, "schedule"),
        ({"schedule": cosine_after_warmup(2)}, {"schedule": cosine_after_warmup(15)}, "schedule"),
        ({}, {"generator": torch.Generator().manual_seed(5)}, "generator"),
        ({}, {"example_weights": torch.full((40,), 2.0)}, "example_weights"),
        ({}, {"data": classes(seed=4)}, "data"),
        ({"data": Shifted(0.0)}, {"data": Shifted(0.1)}, "data"),
        ({"data": Subset(Shifted(0.0), range(30))}, {"data": Subset(Shifted(0.0), range(10, 40))}, "data"),
        ({"loss": nn.CrossEntropyLoss()}, {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]))}, "loss"),
        ({}, {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "loss"),
        ({"loss": partial(focal, gamma=1.0)}, {"loss": partial(focal, gamma=2.0)}, "loss"),
        ({}, {"model": network(dropout=0.5)}, "model"),
        ({}, {"step": closure_step}, "step"),
    ],
)
def test_a_checkpoint_of_other_work_is_refused(tmp_path: Path, before: dict, changes: dict, named: str) -> None:
    place = Checkpoint(tmp_path / "training.pt", every=1)
    first: dict[str, Any] = {"model": network()} | before
    stopped(2, fit, **first, checkpoint=place)
    with pytest.raises(ValueError, match=rf"belongs to other work \({named} differs?\)"):
        fit(**({"model": network()} | before | changes), checkpoint=place)
    fit(**({"model": network()} | before), checkpoint=place)  # its own goes on


def test_divergence_names_the_optimizer_and_the_step() -> None:
    with pytest.raises(ArithmeticError, match=r"in epoch \d+ \(step \d+\) with adagrad at lr=1e\+38"):
        fit(network(), optimizer=torch.optim.Adagrad, lr=1e38)
