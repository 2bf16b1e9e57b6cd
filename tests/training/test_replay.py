"""A run walked through again is the training itself, backwards too, with few states in memory."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlab.iterate import Checkpoint
from curvlab.linalg import flatten
from curvlab.training import (
    AdamRule,
    Replay,
    RunLength,
    SGDRule,
    TrainingRun,
    UpdateRule,
    shuffled_batches,
    train,
)
from tests.refusals import refuses, stopped

FP64 = torch.float64
NUM_EXAMPLES, BATCH_SIZE = 20, 6


def problem() -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(FP64)
    inputs = torch.randn(NUM_EXAMPLES, 4, generator=generator, dtype=FP64)
    return model, nn.CrossEntropyLoss(), (inputs, torch.randint(3, (NUM_EXAMPLES,), generator=generator))


def adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1)


def nesterov(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.8, nesterov=True, weight_decay=0.1)


OPTIMIZERS: dict[str, tuple[dict[str, Any], UpdateRule]] = {
    "sgd": ({"momentum": 0.9, "weight_decay": 0.1}, SGDRule(0.9, 0.1)),
    "plain sgd": ({"momentum": 0.0, "schedule": "cosine"}, SGDRule()),
    "nesterov": ({"optimizer": nesterov}, SGDRule(0.8, 0.1, nesterov=True)),
    "adam": ({"optimizer": "adam", "weight_decay": 0.1}, AdamRule(weight_decay=0.1)),
    "adam betas": ({"optimizer": partial(torch.optim.Adam, betas=(0.5, 0.7))}, AdamRule(betas=(0.5, 0.7))),
    "adamw": ({"optimizer": adamw}, AdamRule(weight_decay=0.1, decoupled=True)),
}


def flat(model: nn.Module) -> Tensor:
    return flatten(model.parameters()).detach().clone()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_replay_ends_where_the_training_did(name: str, weighted: bool) -> None:
    model, loss, data = problem()
    settings, rule = OPTIMIZERS[name]
    weights = torch.linspace(0, 2, NUM_EXAMPLES) if weighted else None
    start = flat(model)
    history = train(
        model,
        loss,
        data,
        num_steps=11,
        batch_size=BATCH_SIZE,
        lr=0.05,
        example_weights=weights,
        record=True,
        generator=5,
        **settings,
    )
    run = TrainingRun.of(history)
    assert run.rule == rule
    assert torch.equal(run.start, start)
    end = Replay(model, loss, data, run=run).end()
    assert float((flat(model) - start).norm()) > 0.01
    torch.testing.assert_close(end[0], flat(model), rtol=1e-12, atol=1e-13)


@dataclass(frozen=True)
class WatchedRule:
    """Knows how many of the positions that it returned are still alive."""

    rule: UpdateRule
    alive: weakref.WeakSet[Tensor] = field(default_factory=weakref.WeakSet, compare=False)

    @property
    def num_buffers(self) -> int:
        return self.rule.num_buffers

    def update(self, state: tuple[Tensor, ...], gradient: Tensor, *, lr: float, step: int) -> tuple[Tensor, ...]:
        after = self.rule.update(state, gradient, lr=lr, step=step)
        self.alive.add(after[0])
        return after


@pytest.mark.parametrize("num_steps", [1, 2, 3, 9, 10, 50, 170])
def test_way_back_meets_the_same_states_and_holds_few(num_steps: int) -> None:
    model, loss, data = problem()
    start, rule = flat(model), WatchedRule(SGDRule(0.9))
    batches = tuple(torch.tensor([step % NUM_EXAMPLES, 3]) for step in range(num_steps))
    replay = Replay(model, loss, data, run=TrainingRun(start, batches, (0.01,) * num_steps, rule))
    sums = [float(replay.first_state()[0].sum())]
    sums += [float(state[0].sum()) for state in replay.forwards()]
    most = 0
    for number, step in zip(reversed(range(num_steps)), replay.backwards(), strict=True):
        assert step.number == number
        assert torch.equal(step.indices, batches[number])
        assert float(step.state[0].sum()) == sums[number]
        most = max(most, len(rule.alive))
        del step
    assert most <= replay.peak_states <= 2 * math.sqrt(num_steps) + 1
    assert replay.peak_states >= math.isqrt(num_steps)


def test_start_of_another_size_is_refused() -> None:
    model, loss, data = problem()
    run = TrainingRun(torch.zeros(3), (torch.tensor([0]),), (0.1,), SGDRule())
    refuses(r"start has shape \(3,\), but the model has 43 parameters", Replay, model, loss, data, run=run)


def test_other_data_is_refused() -> None:
    model, loss, data = problem()
    run = TrainingRun(flat(model), (torch.tensor([20]),), (0.1,), SGDRule())
    refuses(r"batches name example 20, but there are 20: pass the data", Replay, model, loss, data, run=run)
    run = TrainingRun(flat(model), (torch.tensor([1]),), (0.1,), SGDRule(), torch.ones(4))
    refuses(r"example_weights have shape \(4,\)", Replay, model, loss, data, run=run)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(5)])
def test_models_that_differ_in_training_are_refused(layer: nn.Module) -> None:
    _, loss, data = problem()
    model = nn.Sequential(nn.Linear(4, 5), layer, nn.Linear(5, 3)).to(FP64)
    run = TrainingRun(flat(model), (torch.tensor([1]),), (0.1,), SGDRule())
    with pytest.raises(ValueError, match=r"module '1' .* differs in training and in evaluation.*train the model"):
        Replay(model, loss, data, run=run)


def history_of(**settings: Any) -> tuple[Any, Tensor]:
    model, loss, data = problem()
    start = flat(model)
    settings = ({} if "batches" in settings else {"num_steps": 4}) | settings
    return train(model, loss, data, batch_size=6, lr=0.05, generator=0, **settings), start


def test_given_batches_are_recorded_as_they_are_and_a_resumed_training_too(tmp_path: Path) -> None:
    batches = shuffled_batches(20, batch_size=6, num_epochs=1, generator=torch.Generator())
    run = TrainingRun.of(history_of(batches=batches, record=True)[0])
    assert all(torch.equal(a, b) for a, b in zip(run.batches, batches, strict=True))
    whole = TrainingRun.of(history_of(record=True)[0])
    place = Checkpoint(tmp_path / "run.pt", every=1)
    stopped(3, history_of, record=True, checkpoint=place)
    again = TrainingRun.of(history_of(record=True, checkpoint=place)[0])
    assert torch.equal(again.start, whole.start)
    assert [batch.tolist() for batch in again.batches] == [batch.tolist() for batch in whole.batches]


def test_what_cannot_be_repeated_is_not_recorded() -> None:
    history, start = history_of()
    refuses(r"no record of the run's start .* train\(..., record=True\)", TrainingRun.of, history)
    with pytest.raises(ValueError, match="3 batches and 4 learning rates"):
        TrainingRun(start, (torch.tensor([0]),) * 3, history.learning_rates, SGDRule())
    refuses("without clipping, keep='best' and step", history_of, record=True, max_gradient_norm=1.0)
    with pytest.raises(ValueError, match="knows the steps of SGD, Adam and AdamW, not of Adagrad"):
        history_of(record=True, optimizer=torch.optim.Adagrad)
    with pytest.raises(ValueError, match="cannot repeat an optimizer with amsgrad"):
        history_of(record=True, optimizer=partial(torch.optim.Adam, amsgrad=True))


# ------------------------------------------------------------------------------- length of a run
def test_effective_rates_are_the_displacements_by_single_gradients() -> None:
    rates = (0.1, 0.3, 0.2, 0.2)
    for number, effective in enumerate(RunLength(rates, momentum=0.9).effective_rates):
        state = (torch.zeros(1, dtype=FP64), torch.zeros(1, dtype=FP64))
        for step, rate in enumerate(rates):
            gradient = torch.full((1,), float(step == number), dtype=FP64)
            state = SGDRule(0.9).update(state, gradient, lr=rate, step=step + 1)
        assert effective == pytest.approx(-float(state[0]), rel=1e-12)


def test_length_of_a_long_run_is_rate_times_steps_over_one_minus_momentum() -> None:
    length = RunLength.constant(0.2, 10_000, momentum=0.9, weight_decay=0.01)
    assert length.time == pytest.approx(0.2 * 10_000 / 0.1, rel=1e-3)
    assert length.damping == pytest.approx(0.01 + 0.1 / (0.2 * 10_000), rel=1e-3)


def test_length_of_a_history_and_of_a_run_agree() -> None:
    history, _ = history_of(momentum=0.7, weight_decay=0.2, record=True)
    assert RunLength.of(history) == RunLength.of(TrainingRun.of(history)) == RunLength((0.05,) * 4, 0.7, 0.2)


def test_adam_has_no_length() -> None:
    history, _ = history_of(optimizer="adam", record=True)
    refuses(r"not of SGD .* pass a damping, or RunLength", RunLength.of, history)
    refuses(r"not one of AdamRule.* unrolled_response", RunLength.of, TrainingRun.of(history))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rates": ()}, "at least one step with a positive learning rate"),
        ({"learning_rates": (0.1, -0.1)}, "none below 0"),
        ({"learning_rates": (0.1,), "momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"learning_rates": (0.1,), "weight_decay": -1.0}, "weight_decay at least 0"),
    ],
)
def test_lengths_out_of_range(settings: dict[str, Any], message: str) -> None:
    refuses(message, RunLength, **settings)
