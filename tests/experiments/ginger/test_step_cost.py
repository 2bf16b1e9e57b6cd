"""Costs of steps against what was counted by hand."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvlab.optim import QNG, Ginger
from curvlab.training import (
    Learner,
    MeanLoss,
    TrainingBatch,
    curvature_step,
    gradient_step,
    shared_curvature_step,
)
from experiments.ginger.step_cost import Cost, call_cost, step_cost

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


def batch() -> TrainingBatch:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH, LAYERS[0], generator=generator)
    return TrainingBatch(inputs, torch.randint(LAYERS[-1], (BATCH,), generator=generator))


def cost(make: Any, **settings: Any) -> Cost:
    return step_cost(learner(make), batch(), **settings)


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
    with pytest.raises(ValueError, match="num_repeats must be at least 1, got 0"):
        cost(torch.optim.SGD, step=gradient_step, num_repeats=0)


def test_a_shared_forward_pass_is_the_same_step_without_layers_that_differ_in_training() -> None:
    ends = []
    for step in (curvature_step, shared_curvature_step):
        stepped = learner(partial(Ginger, rank=3, decay=0.9, damping=0.1))
        torch.manual_seed(5)
        infos = [step(stepped, batch()) for _ in range(4)]
        ends.append((infos, nn.utils.parameters_to_vector(stepped.model.parameters())))
    assert [info.loss for info in ends[0][0]] == [info.loss for info in ends[1][0]]
    torch.testing.assert_close(ends[0][1], ends[1][1], rtol=1e-6, atol=1e-7)
