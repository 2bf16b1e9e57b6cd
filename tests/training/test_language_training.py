"""Training on tokens: it learns what can be known, reproducibly, and says when it cannot go on."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from curvlab.training import TrainingDivergedError, evaluate, train_language_model


class Bigram(nn.Module):
    """Tokens (N, T) -> logits (N, T, V), each from the token before it alone."""

    def __init__(self, size: int = 5) -> None:
        super().__init__()
        self.table = nn.Embedding(size, size)
        nn.init.zeros_(self.table.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


def chain(num_sequences: int = 64, length: int = 12) -> tuple[Tensor, Tensor]:
    """Sequences in which token k is followed by k + 1 (mod 5) with probability 3/4, else by k."""
    generator = torch.Generator().manual_seed(0)
    steps = (torch.rand(num_sequences, length, generator=generator) < 0.75).long()
    tokens = steps.cumsum(1) % 5
    inputs = torch.cat([torch.zeros(num_sequences, 1, dtype=torch.long), tokens[:, :-1]], dim=1)
    return inputs, tokens


def train(model: nn.Module, **settings):
    defaults = {"num_steps": 300, "batch_size": 16, "lr": 0.1, "warmup_steps": 10}
    generator = torch.Generator().manual_seed(0)
    return train_language_model(model, chain(), **(defaults | settings), generator=generator)


def test_a_bigram_model_learns_the_chain() -> None:
    model = Bigram()
    history = train(model)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    measured = evaluate(model, nn.CrossEntropyLoss(), chain())
    assert measured.loss == pytest.approx(entropy, abs=0.03)
    assert measured.accuracy == pytest.approx(0.75, abs=0.03)
    assert (measured.num_examples, measured.num_predictions) == (64, 64 * 12)
    assert history.losses[0] > history.losses[-1]
    assert len(history.losses) == 75  # passes of four batches
    assert len(history.step_losses) == 300
    assert not model.training
    assert model.table.weight.grad is None


def test_ignored_targets_count_neither_in_training_nor_in_evaluation() -> None:
    inputs, targets = chain()
    hidden = targets.clone()
    hidden[:, ::2] = -100
    model = Bigram()
    train_language_model(
        model, (inputs, hidden), num_steps=50, batch_size=16, lr=0.1, generator=torch.Generator().manual_seed(0)
    )
    kept = hidden != -100
    expected = functional.cross_entropy(model(inputs)[kept], targets[kept]).item()
    measured = evaluate(model, nn.CrossEntropyLoss(), (inputs, hidden), batch_size=7)
    assert measured.loss == pytest.approx(expected, rel=1e-5)
    right = (model(inputs).argmax(-1) == targets)[kept]
    assert measured.accuracy == pytest.approx(float(right.double().mean()))
    assert measured.num_predictions == int(kept.sum())
    with pytest.raises(ValueError, match="every target is ignored"):
        evaluate(model, nn.CrossEntropyLoss(), (inputs, torch.full_like(targets, -100)))


def test_learning_rate_warms_up_and_falls_to_nothing() -> None:
    assert train(Bigram(), num_steps=100).final_lr == pytest.approx(
        0.1 * 0.5 * (1 + math.cos(math.pi * 89 / 90)), rel=1e-6
    )
    assert train(Bigram(), num_steps=6, warmup_steps=5, lr=0.2).final_lr == pytest.approx(0.2)


def test_errors_say_what_to_change() -> None:
    with pytest.raises(ValueError, match="num_steps and batch_size must be at least 1"):
        train(Bigram(), num_steps=0, warmup_steps=0)
    with pytest.raises(ValueError, match="warmup_steps < num_steps"):
        train(Bigram(), warmup_steps=300)
    frozen = Bigram()
    frozen.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires gradients"):
        train(frozen)
    broken = Bigram()
    with torch.no_grad():
        broken.table.weight[0, 0] = math.inf
    with pytest.raises(TrainingDivergedError, match=r"nan before the first step: look for NaN or huge values"):
        train(broken)
