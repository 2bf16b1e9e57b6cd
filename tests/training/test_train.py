from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import Dataset, TensorDataset

from curvlab.lab.data import load_digits
from curvlab.lab.models import MLP, build_model
from curvlab.training import TrainingDivergedError, evaluate, train

SETTINGS = {"num_epochs": 3, "batch_size": 16, "lr": 0.05}


class Lazy(Dataset):
    """The same examples, one at a time."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


def regression(num_examples: int = 40, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_examples, 3, generator=generator, dtype=dtype)
    noise = 0.1 * torch.randn(num_examples, 1, generator=generator, dtype=dtype)
    return inputs, inputs @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=dtype) + 0.3 + noise


def linear_model() -> nn.Module:
    model = nn.Linear(3, 1, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def test_full_batch_sgd_is_gradient_descent_with_momentum_weight_decay_and_a_schedule() -> None:
    inputs, targets = regression()
    model = linear_model()
    history = train(
        model,
        nn.MSELoss(),
        (inputs, targets),
        num_epochs=7,
        batch_size=40,
        lr=0.1,
        momentum=0.8,
        weight_decay=0.3,
        schedule="cosine",
        generator=0,
    )
    design = torch.cat([inputs, torch.ones(40, 1, dtype=torch.float64)], 1)
    w, velocity, losses = torch.zeros(4, 1, dtype=torch.float64), 0.0, []
    rates = [0.05 * (1 + math.cos(math.pi * step / 7)) for step in range(7)]
    for rate in rates:
        residual = design @ w - targets
        losses.append(float((residual**2).mean()))
        velocity = 0.8 * velocity + 2 / 40 * design.T @ residual + 0.3 * w
        w = w - rate * velocity
    torch.testing.assert_close(torch.cat([model.weight, model.bias[None]], 1).T, w, rtol=1e-12, atol=1e-12)
    assert history.losses == pytest.approx(losses, rel=1e-12)
    assert history.learning_rates == pytest.approx(rates, rel=1e-12)
    assert history.final_lr == history.learning_rates[-1]
    assert not model.training


def test_each_epoch_visits_every_example_once() -> None:
    seen: list[float] = []

    class Spy(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            assert self.training
            seen.extend(inputs[:, 0].tolist())
            return super().forward(inputs)

    inputs = torch.arange(10.0)[:, None]
    history = train(
        Spy(1, 1),
        nn.MSELoss(),
        (inputs, torch.zeros(10, 1)),
        num_epochs=2,
        batch_size=4,
        lr=1e-6,
        generator=torch.Generator().manual_seed(0),
    )
    assert sorted(seen[:10]) == sorted(seen[10:]) == inputs.flatten().tolist()
    assert seen[:10] != seen[10:]
    assert history.num_steps == 6


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_same_seed_same_weights_bit_for_bit(optimizer: str) -> None:
    splits = load_digits(num_train=100)
    ends = []
    for seed, noise in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        model = build_model(MLP, input_shape=(1, 8, 8), num_outputs=10, generator=torch.Generator().manual_seed(5))
        model.layers.insert(3, nn.Dropout(0.5))  # draws from the global state
        generator = torch.Generator().manual_seed(seed)
        train(model, nn.CrossEntropyLoss(), splits.train, optimizer=optimizer, generator=generator, **SETTINGS)
        ends.append(parameters_to_vector(model.parameters()))
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_every_form_of_data_gives_the_same_weights() -> None:
    inputs, targets = regression()
    ends = []
    for data in ((inputs, targets), TensorDataset(inputs, targets), Lazy(inputs, targets)):
        model = linear_model()
        train(model, nn.MSELoss(), data, generator=torch.Generator().manual_seed(0), **SETTINGS)
        ends.append(parameters_to_vector(model.parameters()))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def test_mlp_learns_digits() -> None:
    splits = load_digits()
    generator = torch.Generator().manual_seed(0)
    model = build_model(MLP, input_shape=(1, 8, 8), num_outputs=10, generator=generator)
    settings = {"num_epochs": 15, "batch_size": 32, "lr": 0.1, "schedule": "cosine"}
    train(model, nn.CrossEntropyLoss(), splits.train, generator=generator, **settings)
    assert evaluate(model, nn.CrossEntropyLoss(), splits.test).accuracy > 0.95


def test_frozen_parameters_stay() -> None:
    model = linear_model()
    model.bias.requires_grad_(False)
    train(model, nn.MSELoss(), regression(), generator=torch.Generator().manual_seed(0), **SETTINGS)
    assert model.bias.item() == 0.0
    assert model.weight.abs().min() > 0.1
    assert all(parameter.grad is None for parameter in model.parameters())
    model.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires gradients: freeze fewer"):
        train(model, nn.MSELoss(), regression(), generator=torch.Generator(), **SETTINGS)


def test_callbacks_see_every_step_and_every_epoch_and_a_seed_is_a_generator() -> None:
    steps, ended = [], []
    history = train(
        linear_model(),
        nn.MSELoss(),
        regression(),
        generator=0,
        callback=lambda state: steps.append((state.num_steps, state.step_losses[-1], state.num_epochs)),
        on_epoch_end=lambda epoch, loss: ended.append((epoch, loss)),
        **SETTINGS,
    )
    assert steps == [(k + 1, loss, (k + 1) // 3) for k, loss in enumerate(history.step_losses)]
    assert ended == list(enumerate(history.losses))
    settings = SETTINGS | {"generator": torch.Generator().manual_seed(0)}
    assert train(linear_model(), nn.MSELoss(), regression(), **settings).losses == history.losses


def test_divergence_says_what_to_change() -> None:
    settings = {"num_epochs": 200, "batch_size": 40, "lr": 50.0}
    text = r"training diverged: the loss became (inf|nan) in epoch \d+ .* with sgd at lr=50. .* to lr=5,"
    with pytest.raises(TrainingDivergedError, match=text):
        train(linear_model(), nn.MSELoss(), regression(), generator=torch.Generator().manual_seed(0), **settings)


def test_weights_lost_in_the_very_last_step_are_noticed() -> None:
    settings = {"num_epochs": 1, "batch_size": 40, "lr": 1e308}
    with pytest.raises(TrainingDivergedError, match="training diverged"):
        train(linear_model(), nn.MSELoss(), regression(), generator=torch.Generator().manual_seed(0), **settings)


def test_nan_in_the_data_is_told_apart_from_divergence() -> None:
    inputs, targets = regression()
    inputs[:] = float("nan")
    with pytest.raises(TrainingDivergedError, match="nan before the first step: look for NaN"):
        train(linear_model(), nn.MSELoss(), (inputs, targets), generator=torch.Generator(), **SETTINGS)


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"num_epochs": 0}, "must be at least 1, got 0 and 16"),
        ({"batch_size": 0}, "must be at least 1, got 3 and 0"),
        ({"lr": 0.0}, "lr must be positive, got 0.0"),
        ({"lr": float("nan")}, "lr must be positive, got nan"),
        ({"optimizer": "rmsprop"}, "unknown optimizer 'rmsprop': choose sgd, adam or lbfgs"),
        ({"schedule": "step"}, "unknown schedule 'step': choose constant or cosine"),
    ],
)
def test_wrong_settings_are_refused(setting: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        train(linear_model(), nn.MSELoss(), regression(), generator=torch.Generator(), **{**SETTINGS, **setting})


def test_empty_or_unequal_data_is_refused() -> None:
    for size, text in ((0, "the data set is empty"), (3, "3 inputs and 2 targets")):
        data = (torch.zeros(size, 3, dtype=torch.float64), torch.zeros(max(size - 1, 0), 1))
        with pytest.raises(ValueError, match=text):
            train(linear_model(), nn.MSELoss(), data, generator=torch.Generator(), **SETTINGS)
