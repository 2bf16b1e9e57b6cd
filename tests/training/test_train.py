"""Training, means of losses, labels drawn from the model, evaluation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from curvlab.curvature import FisherOperator
from curvlab.lab.data import load_digits
from curvlab.lab.models import MLP, build_model
from curvlab.training import MeanLoss, TrainingDivergedError, evaluate, sampled_label_loss, train
from tests.refusals import refuses

SETTINGS = {"num_epochs": 3, "batch_size": 16, "lr": 0.05}


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
        ({"optimizer": "rmsprop"}, "unknown optimizer 'rmsprop': choose sgd, adam or lbfgs"),
        ({"schedule": "step"}, "unknown schedule 'step': choose constant or cosine"),
    ],
)
def test_wrong_settings_are_refused(setting: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        train(linear_model(), nn.MSELoss(), regression(), generator=torch.Generator(), **{**SETTINGS, **setting})


# ----------- What the loss of a batch is divided by, and what weights of examples do to it
def examples(kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a loss with outputs and targets of five examples."""
    generator = torch.Generator().manual_seed(0)
    shape = (5, 4, 3) if kind == "tokens" else (5, 3)
    outputs = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind in ("classes", "tokens"):
        targets = torch.randint(3, shape[:-1], generator=generator)
        if kind == "tokens":
            targets[0, 1:] = -100
        return nn.CrossEntropyLoss(), outputs, targets
    values = torch.rand(shape, generator=generator, dtype=torch.float64)
    loss = {"squares": nn.MSELoss(), "binary": nn.BCEWithLogitsLoss(), "other": nn.L1Loss()}[kind]
    return loss, outputs, values


@pytest.mark.parametrize("kind", ["classes", "tokens", "squares", "binary", "other"])
def test_weights_of_one_change_nothing(kind: str) -> None:
    loss, outputs, targets = examples(kind)
    plain = loss(outputs.flatten(0, 1), targets.flatten()) if kind == "tokens" else loss(outputs, targets)
    mean = MeanLoss(loss)
    torch.testing.assert_close(mean(outputs, targets), plain)
    torch.testing.assert_close(mean(outputs, targets, torch.ones(5, dtype=torch.float64)), plain)
    torch.testing.assert_close(mean.per_example(outputs, targets).mean(), plain)


@pytest.mark.parametrize("kind", ["classes", "squares"])
def test_the_sum_is_divided_by_the_number_of_examples_not_by_the_weights(kind: str) -> None:
    loss, outputs, targets = examples(kind)
    weights = torch.tensor([0.0, 2.0, 1.0, 0.0, 0.5], dtype=torch.float64)
    own = torch.stack([loss(outputs[i : i + 1], targets[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(MeanLoss(loss)(outputs, targets, weights), (weights * own).sum() / 5)


def test_sequences_are_weighted_by_their_tokens() -> None:
    loss, outputs, targets = examples("tokens")
    removed = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    others = nn.CrossEntropyLoss(reduction="sum")(outputs[1:].flatten(0, 1), targets[1:].flatten())
    torch.testing.assert_close(MeanLoss(loss)(outputs, targets, removed), others / (targets != -100).sum())


def test_a_sum_has_no_weighted_mean() -> None:
    _, outputs, targets = examples("classes")
    with pytest.raises(ValueError, match="needs reduction='mean'"):
        MeanLoss(nn.CrossEntropyLoss(reduction="sum"))(outputs, targets, torch.ones(5))


# --- The gradient of sampled_label_loss against the definition, draw by draw, and against the Fisher matrix
CLASSES = torch.tensor([0, 2, 1, 1, 0])
TOKENS = torch.tensor([[0, 2], [1, -100], [2, 2]])
CASES = {
    "classes": (nn.CrossEntropyLoss(), (5, 4), CLASSES),
    "smoothed classes": (nn.CrossEntropyLoss(label_smoothing=0.3), (5, 4), CLASSES),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), (5, 4), CLASSES),
    "tokens": (nn.CrossEntropyLoss(), (3, 4), TOKENS),
    "gaussian": (nn.MSELoss(), (5, 4), torch.zeros(5, 3)),
    "bernoulli": (nn.BCEWithLogitsLoss(), (5, 4), torch.zeros(5, 3)),
}


class Model(nn.Module):
    """Linear; for tokens, two predictions of three classes."""

    def __init__(self, num_predictions: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3 * num_predictions, bias=False)
        self.num_predictions = num_predictions

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.linear(inputs)
        return outputs if self.num_predictions == 1 else outputs.unflatten(1, (self.num_predictions, 3))


@pytest.mark.parametrize("name", CASES)
def test_outer_products_average_to_the_fisher_matrix(name: str, generator: torch.Generator) -> None:
    loss, shape, targets = CASES[name]
    model = Model(2 if name == "tokens" else 1).double()
    with torch.no_grad():
        model.linear.weight.copy_(torch.randn(model.linear.weight.shape, generator=generator))
    inputs = torch.randn(shape, dtype=torch.float64, generator=generator)
    targets = targets.double() if targets.is_floating_point() else targets
    expected = FisherOperator(model, loss, (inputs, targets)).to_dense()
    outputs = model(inputs).detach().requires_grad_()
    draws = []
    for _ in range(400):
        value = sampled_label_loss(loss, outputs, targets, generator=generator)
        draws.append(torch.autograd.grad(value, outputs)[0].flatten(1))
    d = torch.einsum("kno,ni->koi", torch.stack(draws), inputs).flatten(1)  # by the weights
    outer = torch.einsum("ki,kj->kij", d, d)
    mean, count = outer.mean(0), len(d)
    standard_error = (outer.var(0) / count).sum().sqrt()
    assert (mean - expected).norm() <= 2.5 * standard_error
    assert standard_error < 0.2 * expected.norm()  # the comparison means something


def test_its_value_is_the_likelihood_of_the_labels_drawn(generator: torch.Generator) -> None:
    outputs = torch.tensor([[50.0, 0.0], [0.0, 50.0], [50.0, 0.0]], requires_grad=True)  # certain labels
    value = sampled_label_loss(nn.CrossEntropyLoss(), outputs, torch.tensor([1, 1, 1]), generator=generator)
    assert float(value.detach()) < 1e-12
    fair = torch.zeros(4, 2, requires_grad=True)
    value = sampled_label_loss(nn.CrossEntropyLoss(), fair, torch.tensor([0, 0, 0, -100]), generator=generator)
    assert float(value.detach()) == pytest.approx(3 * 0.693147 / 3**0.5, rel=1e-5)


def test_a_generator_fixes_the_draw_and_targets_must_fit() -> None:
    outputs, targets = torch.linspace(-1, 1, 15).view(5, 3), CLASSES
    first, again = (
        sampled_label_loss(nn.CrossEntropyLoss(), outputs, targets, generator=torch.Generator().manual_seed(3))
        for _ in range(2)
    )
    assert first == again
    with pytest.raises(ValueError, match="needs integer class indices of shape"):
        sampled_label_loss(nn.CrossEntropyLoss(), outputs, targets[:3], generator=torch.Generator())


# ----------------------------------------------------------------------------------------
LOGITS = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0], [0.0, 0.5], [1.0, 0.0]])


@pytest.mark.parametrize("batch_size", [1, 2, 5, 100])
def test_cross_entropy_over_uneven_batches(batch_size: int) -> None:
    targets = torch.tensor([0, 1, 1, 1, 0])
    result = evaluate(nn.Identity(), nn.CrossEntropyLoss(), (LOGITS, targets), batch_size=batch_size)
    rows = zip(LOGITS.tolist(), targets.tolist(), strict=True)
    expected = sum(math.log(math.exp(a) + math.exp(b)) - (a, b)[t] for (a, b), t in rows) / 5
    assert result.loss == pytest.approx(expected, rel=1e-6)
    assert result.accuracy == pytest.approx(0.8)
    assert result.num_examples == 5


def test_binary_accuracy_is_by_sign() -> None:
    outputs, targets = torch.tensor([[0.3], [-2.0], [0.1], [-0.1]]), torch.tensor([[1.0], [0.0], [0.0], [1.0]])
    result = evaluate(nn.Identity(), nn.BCEWithLogitsLoss(), (outputs, targets), batch_size=3)
    assert result.accuracy == 0.5
    expected = [math.log1p(math.exp(-z if t else z)) for z, t in ((0.3, 1), (-2, 0), (0.1, 0), (-0.1, 1))]
    assert result.loss == pytest.approx(sum(expected) / 4, rel=1e-6)


def test_examples_with_several_labels_have_the_share_of_right_labels() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(7, 11, generator=generator)
    targets = (torch.rand(7, 11, generator=generator) < 0.5).float()
    result = evaluate(nn.Identity(), nn.BCEWithLogitsLoss(), (outputs, targets), batch_size=3)
    assert result.accuracy == pytest.approx(float(((outputs > 0) == (targets > 0.5)).double().mean()))
    assert (result.num_examples, result.num_predictions) == (7, 77)


def test_regression_has_no_accuracy() -> None:
    result = evaluate(nn.Identity(), nn.MSELoss(), (torch.tensor([[1.0], [4.0]]), torch.zeros(2, 1)))
    assert result.loss == pytest.approx(8.5)
    assert result.accuracy is None


def test_modes_and_running_statistics_are_left_as_they_were() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.9), nn.Linear(2, 2))
    model.train()
    model[0].eval()
    before = model[0].running_mean.clone()
    data = (LOGITS, torch.tensor([0, 1, 1, 1, 0]))
    first = evaluate(model, nn.CrossEntropyLoss(), data, batch_size=2)
    assert [module.training for module in model] == [False, True, True]
    assert model.training
    assert torch.equal(model[0].running_mean, before)
    assert evaluate(model, nn.CrossEntropyLoss(), data, batch_size=2) == first  # dropout was off


def test_bad_settings_are_refused() -> None:
    data = (LOGITS, torch.tensor([0, 1, 1, 1, 0]))
    refuses("reduction='mean', got 'sum'", evaluate, nn.Identity(), nn.CrossEntropyLoss(reduction="sum"), data)
