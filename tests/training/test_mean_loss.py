"""What the loss of a batch is divided by, and what weights of examples do to it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from curvlab.training import MeanLoss


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
