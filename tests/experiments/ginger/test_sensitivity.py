"""Ginger: sensitivity, optimizers, the cost of a step."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from curvlab.lab.models import ResNet20
from curvlab.optim import QNG, Ginger
from curvlab.training import Learner, MeanLoss, TrainingBatch, curvature_step, gradient_step, shared_curvature_step
from experiments.ginger.optimizers import (
    MuonWithAdam,
    augmented,
    data_label_step,
    gradients_per_step,
    make_optimizer,
    why_unavailable,
)
from experiments.ginger.sensitivity import between_cells, between_printed, without_diverged
from experiments.ginger.step_cost import Cost, call_cost, step_cost
from tests.refusals import refuses


def noisy(effects: np.ndarray, seeds: int, noise: float, generator: np.random.Generator) -> pd.DataFrame:
    """Return runs of cells with these effects, and one more effect for each seed."""
    values = effects[:, None] + generator.normal(size=seeds) + noise * generator.normal(size=(len(effects), seeds))
    cell, seed = np.indices(values.shape)
    return pd.DataFrame({"cell": cell.ravel(), "seed": seed.ravel(), "quantity": values.ravel()})


def test_what_seeds_change_is_no_difference_between_settings() -> None:
    generator = np.random.default_rng(0)
    found = [between_cells(noisy(np.zeros(9), 4, 1.0, generator), "quantity", ["cell"]) for _ in range(200)]
    assert np.median([value for value, _ in found]) < 0.3  # the range of single runs is 3
    assert np.mean([interval.low == 0 for _, interval in found]) > 0.93


def test_intervals_between_settings_cover() -> None:
    generator, effects = np.random.default_rng(1), np.linspace(-1, 1, 6)
    spread = effects.std(ddof=1)
    found = [between_cells(noisy(effects, 3, 0.5, generator), "quantity", ["cell"])[1] for _ in range(200)]
    assert 0.9 < np.mean([interval.low <= spread <= interval.high for interval in found]) <= 1.0
    generator = np.random.default_rng(2)  # of single runs that another prints, with our noise: as of one seed
    ours = noisy(np.zeros(9), 3, 0.5, generator)
    found = [
        between_printed(effects + 0.5 * generator.normal(size=6), ours, "quantity", ["cell"])[1]
        for _ in range(200)
    ]
    assert 0.85 < np.mean([interval.low <= spread <= interval.high for interval in found]) <= 1.0
    exact_value, exact_interval = between_cells(noisy(effects, 3, 0.0, generator), "quantity", ["cell"])
    assert exact_value == pytest.approx(spread) == exact_interval.low == exact_interval.high


def test_a_damping_is_drawn_where_no_seed_diverged() -> None:
    swept = pd.DataFrame([{"damping": damping, "seed": seed} for damping in (1e-5, 0.1, 1.0) for seed in range(3)])
    swept["diverged"] = (swept.damping == 1e-5) & (swept.seed == 0)  # one seed is enough
    swept = swept.assign(task="m", sweep="damping", decay=0.99, rank=4, clip=np.nan)
    assert sorted(without_diverged(swept).damping.unique()) == [0.1, 1.0]


# --- The optimizers of the races: their steps against steps written out, and Muon against its two parts
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
    refuses("takes no closure", optimizer.step, lambda: None)


# ----------------------------------------- Costs of steps against what was counted by hand
CPU = torch.device("cpu")
LAYERS = (30, 50, 40, 10)
BATCH = 16
SIZE = sum(n * m + m for n, m in pairwise(LAYERS))
FORWARD = 2 * BATCH * sum(n * m for n, m in pairwise(LAYERS))
# of the gradients with respect to weights and, but for the first layer, inputs
BACKWARD = 2 * FORWARD - 2 * BATCH * LAYERS[0] * LAYERS[1]


def learner(make: Any) -> Learner:
    torch.manual_seed(0)
    layers = [[nn.Linear(n, m), nn.Tanh()] for n, m in pairwise(LAYERS)]
    model = nn.Sequential(*[layer for pair in layers for layer in pair][:-1])
    return Learner(model, MeanLoss(nn.CrossEntropyLoss()), make(model.parameters(), lr=1e-3))


def training_batch() -> TrainingBatch:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH, LAYERS[0], generator=generator)
    return TrainingBatch(inputs, torch.randint(LAYERS[-1], (BATCH,), generator=generator))


def cost(make: Any, **settings: Any) -> Cost:
    return step_cost(learner(make), training_batch(), **settings)


def test_a_gradient_step_has_the_products_of_its_layers() -> None:
    assert cost(torch.optim.SGD).flops == FORWARD + BACKWARD
    assert cost(torch.optim.Adam).flops == FORWARD + BACKWARD  # elementwise: not counted


@pytest.mark.parametrize("rank", [3, 6])
def test_low_rank_optimizers_have_their_products_with_the_rows(rank: int) -> None:
    # Ginger, update: BBᵀ is not measured in this one; four products with the rows, a reflection of as many
    # as two; step: two. QNG: three and two. 2 Pτ each, and smaller ones of τ x τ that the host does.
    for make, products in ((Ginger, 8), (QNG, 5)):
        settings = {"rank": rank, "decay": 0.9} | ({"damping": 1.0} if make is Ginger else {})
        found = cost(partial(make, **settings), step=shared_curvature_step)
        own = found.flops - FORWARD - 2 * BACKWARD
        assert own == pytest.approx(products * 2 * SIZE * rank, rel=0.01)


def test_a_forward_pass_is_shared_or_not() -> None:
    make = partial(QNG, rank=2, decay=0.9)
    shared, apart = (cost(make, step=step).flops for step in (shared_curvature_step, curvature_step))
    assert apart - shared == FORWARD


def test_memory_has_parameters_state_gradients_and_activations() -> None:
    activations = BATCH * (2 * 50 + 2 * 40 + 2 * 10)
    for make, of_state in ((torch.optim.SGD, 0), (torch.optim.Adam, 2)):
        found = cost(make, num_repeats=1).peak_bytes / 4
        held = (1 + of_state) * SIZE + BATCH * LAYERS[0]
        assert held + SIZE <= found <= held + 2 * SIZE + 2 * activations
    assert cost(torch.optim.Adam).peak_bytes - cost(torch.optim.SGD).peak_bytes >= 4 * 2 * SIZE


def test_memory_has_the_state_of_an_optimizer_that_is_made_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def peak() -> int:
        own = learner(torch.optim.SGD)
        muon = MuonWithAdam(own.model, 1e-3, momentum=0.9, decay=0.99)
        return step_cost(replace(own, optimizer=muon), training_batch()).peak_bytes

    with_state = peak()
    monkeypatch.setattr(MuonWithAdam, "state_dict", lambda _: {})
    # Two numbers for each of Adam's entries, one for each hidden weight.
    assert with_state - peak() == pytest.approx(4 * (2 * SIZE - 30 * 50 - 50 * 40), rel=0.01)


def test_the_peak_is_what_lives_at_one_time() -> None:
    held = torch.zeros(1000)

    def work() -> Tensor:
        first = torch.zeros(2000)
        first.add_(1)[:7].view(-1)  # the same memory
        second = first + 1
        del first
        return second + torch.ones(3000)[:2000]

    found = call_cost(work, held=[held, held[:5]], device=CPU)
    assert found.peak_bytes == 4 * (1000 + 2000 + 3000 + 2000)
    assert call_cost(work, held=[], device=CPU, num_repeats=1).peak_bytes == 4 * 7000


@pytest.mark.parametrize(
    ("work", "flops"),
    [
        (lambda A, v: A.mv(v), 2 * 5 * 7),
        (lambda A, v: v.dot(v), 2 * 7),
        (lambda A, v: torch.addmv(v[:5], A, v), 2 * 5 * 7),
        (lambda A, v: A.clone().addr_(v[:5], v), 2 * 5 * 7),
        (lambda A, v: A.mT @ A, 2 * 7 * 5 * 7),
        (lambda A, v: A.new_zeros(5, 5).addmm_(A, A.mT), 2 * 5 * 7 * 5),
        (lambda A, v: A.new_zeros(2, 5, 5).baddbmm_(A.expand(2, 5, 7), A.mT.expand(2, 7, 5)), 2 * 2 * 5 * 7 * 5),
        (lambda A, v: A.exp().sum() + torch.linalg.vector_norm(v), 0),
    ],
)
def test_what_counts(work: Any, flops: int) -> None:
    A, v = torch.ones(5, 7), torch.ones(7)
    assert call_cost(lambda: work(A, v), held=(), device=CPU, num_repeats=1).flops == flops


def test_seconds_are_those_of_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    processor, elapsed, durations = [0.0], [0.0], iter([9.0, 9.0, 3.0, 2.0, 4.0])  # the first two are counted in
    monkeypatch.setattr("time.process_time", lambda: processor[0])
    monkeypatch.setattr("time.perf_counter", lambda: elapsed[0])

    def work() -> None:
        taken = next(durations)
        processor[0] += taken
        elapsed[0] += 10 * taken

    found = call_cost(work, held=(), device=CPU, num_repeats=3)
    assert found.all_seconds == (3.0, 2.0, 4.0)
    assert found.seconds == 2.0
    assert found.wall_seconds == 20.0


def test_a_time_needs_a_call() -> None:
    refuses("num_repeats must be at least 1, got 0", cost, torch.optim.SGD, step=gradient_step, num_repeats=0)
