from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from curvlab.problem.memory import MemoryWarning
from curvlab.training import evaluate

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
    with pytest.raises(ValueError, match="reduction='mean', got 'sum'"):
        evaluate(nn.Identity(), nn.CrossEntropyLoss(reduction="sum"), data)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        evaluate(nn.Identity(), nn.CrossEntropyLoss(), data, batch_size=0)
    with pytest.raises(ValueError, match="the data set is empty"):
        evaluate(nn.Identity(), nn.CrossEntropyLoss(), (LOGITS[:0], torch.zeros(0, dtype=torch.long)))


def test_batches_are_halved_when_memory_runs_out() -> None:
    class Limited(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return x

    targets = torch.tensor([0, 1, 1, 1, 0])
    model = Limited().train()
    with pytest.warns(MemoryWarning, match="a pass now takes 2 examples"):
        found = evaluate(model, nn.CrossEntropyLoss(), (LOGITS, targets))
    assert found == evaluate(nn.Identity(), nn.CrossEntropyLoss(), (LOGITS, targets), batch_size=2)
    assert model.training
