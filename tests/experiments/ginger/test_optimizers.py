"""The optimizers of the races: their steps against steps written out, and Muon against its two parts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from curvlab.lab.models import ResNet20
from curvlab.training import Learner, MeanLoss, TrainingBatch, gradient_step
from experiments.ginger.optimizers import (
    MuonWithAdam,
    augmented,
    data_label_step,
    gradients_per_step,
    make_optimizer,
    why_unavailable,
)

GINGER = {"optimizer": "ginger", "labels": "sampled", "scope": "global", "momentum": 0.9, "decay": 0.99}


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
