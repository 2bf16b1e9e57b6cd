"""Derivatives of a training are those of two retrainings with slightly other weights."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from curvlab.influence import SegmentResponse, UnrolledResponse, segment_response, unrolled_response
from curvlab.training import SGDRule, TrainingRun, train
from tests.refusals import refuses

FP64 = torch.float64
NUM_EXAMPLES, NUM_STEPS = 18, 13
POINTS = [0, 7, 17]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd with momentum": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "nesterov": {"optimizer": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.8, nesterov=True), "lr": 0.1},
    "adam": {"optimizer": "adam", "lr": 0.02, "weight_decay": 0.01},
    "adamw": {"optimizer": lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.3), "lr": 0.02},
}
NETS = ["mlp", "squares", "convolution", "loop"]


@dataclass(frozen=True)
class Trained:
    model: nn.Module
    loss: nn.Module
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    run: TrainingRun

    def test_losses(self) -> Tensor:
        outputs = self.model(self.test[0]).detach()
        own = [self.loss(o[None], y[None]) for o, y in zip(outputs, self.test[1], strict=True)]
        return torch.stack(own)


def trained(net: str, optimizer: str, weights: Tensor | None = None, num_steps: int = NUM_STEPS) -> Trained:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    loss: nn.Module = nn.CrossEntropyLoss()

    def inputs(count: int) -> Tensor:
        shape = (count, 1, 4, 4) if net == "convolution" else (count, 4)
        return torch.randn(shape, generator=generator, dtype=FP64)

    def targets(count: int) -> Tensor:
        drawn = torch.randint(3, (count,), generator=generator)
        return drawn if net not in ("squares", "huber") else nn.functional.one_hot(drawn, 3).to(FP64)

    data, test = (inputs(NUM_EXAMPLES), targets(NUM_EXAMPLES)), (inputs(5), targets(5))
    if net == "convolution":
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).to(FP64)
    else:
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(FP64)
    if net in ("squares", "huber"):
        loss = nn.MSELoss() if net == "squares" else nn.HuberLoss(delta=0.5)
    if net == "loop":  # as for Hugging Face models, no vmap around the forward
        model.config = SimpleNamespace()
    settings = OPTIMIZERS[optimizer] | {"num_steps": num_steps, "batch_size": 7, "example_weights": weights}
    history = train(model, loss, data, **settings, record=True, generator=2)
    return Trained(model, loss, data, test, TrainingRun.of(history))


@cache
def retrained(net: str, optimizer: str, weighted: bool) -> tuple[Trained, Tensor]:
    """A training and its derivatives by retraining: the same for every mode."""
    weights = torch.linspace(0.5, 1.5, NUM_EXAMPLES, dtype=FP64) if weighted else None
    return trained(net, optimizer, weights), by_retraining(net, optimizer, weights, POINTS, step=1e-4)


def by_retraining(net: str, optimizer: str, weights: Tensor | None, points: list[int], step: float) -> Tensor:
    """N [m(w + h) - m(w - h)] / 2h for each of some points, (num_test, num_points)."""
    base = torch.ones(NUM_EXAMPLES, dtype=FP64) if weights is None else weights
    columns = []
    for point in points:
        direction = step * nn.functional.one_hot(torch.tensor(point), NUM_EXAMPLES).to(FP64)
        up, down = (trained(net, optimizer, base + sign * direction).test_losses() for sign in (1, -1))
        columns.append(NUM_EXAMPLES * (up - down) / (2 * step))
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("mode", ["reverse", "forward"])
@pytest.mark.parametrize(
    ("net", "optimizer", "weighted"),
    [(net, "sgd with momentum", False) for net in NETS if net != "mlp"]
    + [("mlp", optimizer, weighted) for optimizer in OPTIMIZERS for weighted in (False, True)]
    + [("convolution", "adam", False), ("loop", "adam", True)],
)
def test_equals_finite_differences_of_two_retrainings(net: str, optimizer: str, weighted: bool, mode: Any) -> None:
    case, expected = retrained(net, optimizer, weighted)
    found = unrolled_response(case.model, case.loss, case.train, case.test, run=case.run, points=POINTS, mode=mode)
    assert found.mode == mode
    assert found.gap < 1e-12
    assert float((found.scores - expected).norm() / expected.norm()) < 1e-5
    torch.testing.assert_close(found.scores, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_a_loss_of_ones_own_goes_backwards_where_forward_mode_may_not_exist() -> None:
    case, expected = retrained("huber", "sgd with momentum", False)
    found = unrolled_response(case.model, case.loss, case.train, case.test, run=case.run, points=POINTS)
    assert found.mode == "reverse"
    torch.testing.assert_close(found.scores, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_the_most_helpful_points_are_indices_and_a_file_knows_its_data(tmp_path: Path) -> None:
    case, _ = retrained("mlp", "sgd with momentum", False)
    found = unrolled_response(case.model, case.loss, case.train, case.test, run=case.run, points=POINTS)
    assert found.top(1)[:, 0].tolist() == [POINTS[column] for column in found.scores.argmin(1).tolist()]
    assert found.table(1)["point"][0] == found.top(1)[0, 0]
    assert "(negative: helps; nats per unit of weight)" in str(found)
    found.save(tmp_path / "scores")
    again = UnrolledResponse.load(tmp_path / "scores", case.model, case.loss, case.train)
    assert torch.equal(again.scores, found.scores)
    flipped, text = tuple(part.flip(0) for part in case.train), "scores are of other training examples or order"
    refuses(text, UnrolledResponse.load, tmp_path / "scores", case.model, case.loss, flipped)


class Named(nn.Module):
    """A model that takes its inputs by name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("mode", ["reverse", "forward", "segments"])
def test_mappings_and_loaders_are_data_as_for_influence(mode: Any) -> None:
    """What `train` and `influence` read, a run through it is differentiated on: the same scores as of tensors."""
    case = trained("mlp", "sgd with momentum")
    named, (x, y) = Named(case.model), case.train
    test = ({"x": case.test[0]}, case.test[1])
    pairs = DataLoader(TensorDataset(x, y), batch_size=4)
    found = []
    for model, data, tested in (
        (case.model, case.train, case.test),
        (named, ({"x": x}, y), test),
        (case.model, pairs, case.test),
    ):
        if mode == "segments":
            settings = {"num_segments": 2, "rtol": 1e-8}
            found.append(segment_response(model, case.loss, data, tested, run=case.run, **settings).scores)
        else:
            run = unrolled_response(model, case.loss, data, tested, run=case.run, mode=mode)
            assert len(repr(run).splitlines()) <= 3
            found.append(run.scores)
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found[2], found[0], rtol=1e-6, atol=1e-8)


def test_shared_measurement_is_the_mean_of_the_columns() -> None:
    case = trained("mlp", "adam")
    arguments = (case.model, case.loss, case.train, case.test)

    def margin(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[:, 0] - outputs[:, 1]

    for measurement in (None, margin):
        each = unrolled_response(*arguments, run=case.run, measurement=measurement)
        mean = unrolled_response(*arguments, run=case.run, measurement=measurement, reduction="mean")
        torch.testing.assert_close(mean.scores, each.scores.mean(0, keepdim=True), rtol=1e-9, atol=1e-11)


def test_measurement_is_differentiated_in_the_place_of_the_loss() -> None:
    case = trained("mlp", "sgd with momentum")
    settings = {"points": [4], "measurement": lambda outputs, targets: outputs[:, 1]}
    found = unrolled_response(case.model, case.loss, case.train, case.test, run=case.run, **settings)
    step, ends = 1e-4, []
    for sign in (1, -1):
        weights = torch.ones(NUM_EXAMPLES, dtype=FP64)
        weights[4] += sign * step
        ends.append(trained("mlp", "sgd with momentum", weights).model(case.test[0])[:, 1].detach())
    expected = NUM_EXAMPLES * (ends[0] - ends[1]) / (2 * step)
    torch.testing.assert_close(found.scores[:, 0], expected, rtol=1e-6, atol=1e-8)


def test_the_smaller_side_decides_the_mode() -> None:
    case = trained("mlp", "sgd with momentum")
    arguments = (case.model, case.loss, case.train, case.test)
    assert unrolled_response(*arguments, run=case.run).mode == "reverse"
    few = unrolled_response(*arguments, run=case.run, points=torch.tensor([3, 1]))
    assert few.mode == "forward"
    assert few.num_stored_states == 0
    everything = unrolled_response(*arguments, run=case.run)
    torch.testing.assert_close(few.scores, everything.scores[:, [3, 1]], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("num_steps", [1, 16, 60])
def test_reverse_mode_stores_few_states(num_steps: int) -> None:
    # Replay's own count is held against live tensors in tests/training/test_replay.py.
    case = trained("mlp", "adam", num_steps=num_steps)
    found = unrolled_response(case.model, case.loss, case.train, case.test, run=case.run, mode="reverse")
    assert 1 <= found.num_stored_states <= 2 * math.sqrt(num_steps) + 1


def test_units_that_never_fire_do_not_make_adam_infinite() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).to(FP64)
    with torch.no_grad():
        model[0].bias[:2] = -100.0
    data = (torch.randn(6, 4, dtype=FP64), torch.tensor([0, 1, 2, 0, 1, 2]))
    settings = {"num_steps": 5, "batch_size": 3, "lr": 0.01, "optimizer": "adam"}
    history = train(model, nn.CrossEntropyLoss(), data, record=True, generator=0, **settings)
    reverse, forward = (
        unrolled_response(model, nn.CrossEntropyLoss(), data, data, run=history, mode=mode).scores
        for mode in ("reverse", "forward")
    )
    assert bool(reverse.isfinite().all())
    torch.testing.assert_close(reverse, forward, rtol=1e-9, atol=1e-11)


def test_an_example_twice_in_a_batch_counts_twice() -> None:
    case = trained("mlp", "sgd with momentum")
    batches = (torch.tensor([2, 2, 5]), torch.tensor([5, 1]))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(FP64)
    run = train(model, case.loss, case.train, batch_size=3, batches=batches, lr=0.1, record=True, generator=0)
    reverse, forward = (
        unrolled_response(model, case.loss, case.train, case.test, run=run, mode=mode).scores
        for mode in ("reverse", "forward")
    )
    torch.testing.assert_close(reverse, forward, rtol=1e-9, atol=1e-11)
    assert bool((reverse[:, 2] != 0).all())
    assert bool((reverse[:, [0, 3, 4]] == 0).all())


# ---------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize("settings", [{"padding_idx": 0}, {"scale_grad_by_freq": True}], ids=str)
def test_a_training_with_gradients_of_an_embeddings_own_is_refused_by_name(settings: dict[str, Any]) -> None:
    data = torch.tensor([[0, 1], [2, 0], [3, 4], [5, 5], [0, 0]]), torch.arange(5) % 3
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4, **settings), nn.Flatten(), nn.Linear(8, 3)).to(FP64)
    run = train(model, nn.CrossEntropyLoss(), data, num_epochs=3, batch_size=5, lr=0.5, record=True, generator=0)
    with pytest.raises(
        ValueError, match=f"ends elsewhere than the model: .*{next(iter(settings))}.*train without"
    ):
        unrolled_response(model, nn.CrossEntropyLoss(), data, data, run=run)


def test_a_run_that_ends_elsewhere_is_refused() -> None:
    case = trained("mlp", "sgd with momentum")
    wrong = TrainingRun(case.run.start, case.run.batches, case.run.learning_rates, SGDRule(0.5))
    arguments = (case.model, case.loss, case.train, case.test)
    for mode in ("reverse", "forward"):
        with pytest.raises(ValueError, match=r"ends elsewhere than the model: .* Check that start, batches"):
            unrolled_response(*arguments, run=wrong, mode=mode)
    refuses("ends elsewhere", segment_response, *arguments, run=wrong)
    settings = {"num_steps": 2, "batch_size": 3, "lr": 0.1}
    history = train(copy.deepcopy(case.model), case.loss, case.train, generator=0, **settings)
    refuses(r"train with train\(..., record=True\)", unrolled_response, *arguments, run=history)


@pytest.mark.parametrize("points", [[], [18], [-1], [[1]]])
def test_points_must_be_indices(points: Any) -> None:
    case = trained("mlp", "adam")
    with pytest.raises(ValueError, match="points must be indices of training examples from 0 to 17"):
        unrolled_response(case.model, case.loss, case.train, case.test, run=case.run, points=points)


def test_unknown_settings_are_refused() -> None:
    case = trained("mlp", "adam")
    arguments = (case.model, case.loss, case.train, case.test)
    with pytest.raises(ValueError, match="reduction must be 'none' or 'mean', got 'sum'"):
        unrolled_response(*arguments, run=case.run, reduction="sum")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mode must be 'auto', 'reverse' or 'forward', got 'backward'"):
        unrolled_response(*arguments, run=case.run, mode="backward")  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------- segments
def least_squares(num_steps: int, lr: float, momentum: float = 0.0, decay: float = 0.0) -> Trained:
    """Full batches of a linear model: the curvature is the same everywhere, and G is the Hessian."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    data, test = (
        (torch.randn(n, 4, generator=generator).to(FP64), torch.randn(n, 2, generator=generator).to(FP64))
        for n in (12, 3)
    )
    model, loss = nn.Linear(4, 2).to(FP64), nn.MSELoss()
    batches = tuple(torch.arange(12) for _ in range(num_steps))
    settings = {"batch_size": 12, "batches": batches, "lr": lr, "momentum": momentum, "weight_decay": decay}
    history = train(model, loss, data, **settings, record=True, generator=0)
    return Trained(model, loss, data, test, TrainingRun.of(history))


def exact_scores(case: Trained) -> Tensor:
    return unrolled_response(case.model, case.loss, case.train, case.test, run=case.run).scores


def distance(case: Trained, exact: Tensor, num_segments: int, per_segment: int = 1) -> float:
    arguments = (case.model, case.loss, case.train, case.test)
    found = segment_response(
        *arguments, run=case.run, num_segments=num_segments, checkpoints_per_segment=per_segment, rtol=1e-8
    )
    assert found.residual.shape == (num_segments, len(case.test[0]))
    assert float(found.residual.max()) <= 1e-8
    assert found.num_matvecs > 0
    return float((found.scores - exact).norm() / exact.norm())


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.3), (0.9, 0.3)])
def test_segments_converge_to_the_unrolled_run(momentum: float, decay: float) -> None:
    """With steps of length 0 in the limit and a segment for each of them nothing is approximated."""
    case = least_squares(200, 0.006 * (1 - momentum), momentum, decay)
    exact = exact_scores(case)
    errors = [distance(case, exact, num_segments) for num_segments in (1, 4, 20)]
    assert errors[0] > errors[1] > errors[2]
    # A gradient takes 1 / (1 - m) = 10 of the 200 steps to arrive, which segments leave out.
    assert errors[2] < (0.005 if momentum == 0 else 0.05)


def test_segments_that_do_not_fit_are_refused() -> None:
    case = least_squares(5, 0.01)
    arguments = (case.model, case.loss, case.train, case.test)
    refuses(r"3 segments of 2 checkpoints do not fit a run of 5 steps", segment_response, *arguments, run=case.run)
    weighted = trained("mlp", "sgd with momentum", torch.ones(NUM_EXAMPLES))
    with pytest.raises(ValueError, match="only unrolled_response takes weights"):
        segment_response(weighted.model, weighted.loss, weighted.train, weighted.test, run=weighted.run)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_segments_are_the_dense_formula(optimizer: str, tmp_path: Path) -> None:
    """Two segments by torch.optim's own states and dense matrices, without parameters that never move."""
    torch.manual_seed(0)
    (x, y), test = (
        (torch.randn(n, 4, dtype=FP64), torch.randint(3, (n,))) for n in (12, 3)
    )  # the last input is never there
    x[:, 3] = test[0][:, 3] = 0
    model, loss, num_steps = nn.Linear(4, 3, bias=False).to(FP64), nn.CrossEntropyLoss(), 20
    decay = 0.3 if optimizer == "adamw" else 0.0
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimizer]
    by_hand = copy.deepcopy(model)
    own, times, places = kind(by_hand.parameters(), 0.02, weight_decay=decay), [], {}
    for step in range(1, num_steps + 1):
        if step - 1 in (2, 7, 12, 17):
            places[step - 1] = copy.deepcopy(by_hand)
        own.zero_grad()
        loss(by_hand(x), y).backward()
        own.step()
        times.append(torch.full((12,), 0.02, dtype=FP64))
        if optimizer != "sgd":
            square = own.state[by_hand.weight]["exp_avg_sq"] / (1 - 0.999**step)
            times[-1] = torch.where(square > 0, 0.02 / (square.sqrt() + 1e-8), 0.0).flatten()
    batches = tuple(torch.arange(12) for _ in range(num_steps))
    settings = {"batch_size": 12, "batches": batches, "lr": 0.02, "record": True, "generator": 0}
    history = train(model, loss, (x, y), optimizer=lambda p, lr: kind(p, lr, weight_decay=decay), **settings)

    def gradients(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        left = net(x).detach().softmax(1) - nn.functional.one_hot(y, 3)
        return torch.einsum("no,ni->noi", left, x).flatten(1)

    def gauss_newton(net: nn.Module) -> Tensor:
        p = net(x).detach().softmax(1)
        inner = torch.diag_embed(p) - p[:, :, None] * p[:, None]
        return torch.einsum("noq,ni,nj->oiqj", inner, x, x).reshape(12, 12) / 12

    moved = times[0] > 0
    assert moved.sum() == (12 if optimizer == "sgd" else 9)
    u, expected = gradients(by_hand, *test)[:, moved], torch.zeros(3, 12, dtype=FP64)
    for first, second in ((12, 17), (2, 7)):
        length = torch.stack(times[first - 2 : second + 3]).sum(0)[moved]
        matrix = sum(gauss_newton(places[k])[moved][:, moved] for k in (first, second)) / 2
        flow = length[:, None] * matrix + decay * 10 * 0.02 * torch.eye(len(length), dtype=FP64)
        exponential = torch.linalg.matrix_exp(-flow)
        # Gradients have no part where the flow is 0, for which a pseudo-inverse gives 0 in place of the time.
        response = torch.linalg.pinv(flow) @ (torch.eye(len(length), dtype=FP64) - exponential) * length
        seen = torch.stack([gradients(places[k], x, y)[:, moved] for k in (first, second)]).mean(0)
        expected -= u @ response @ seen.T
        u = u @ exponential
    found = segment_response(model, loss, (x, y), test, run=history, num_segments=2, rtol=1e-10)
    torch.testing.assert_close(found.scores, expected, rtol=1e-7, atol=1e-9)
    found.save(tmp_path / "scores")
    again = SegmentResponse.load(tmp_path / "scores", model, loss, (x, y))
    assert torch.equal(again.top(2), expected.argsort(dim=1)[:, :2])
    assert again.table(1)["residual"][0] == float(found.residual[:, 0].max())
    assert "negative: helps; nats per unit of weight" in str(again)


def test_segments_of_adam_whose_eps_is_all_are_those_of_sgd() -> None:
    """lr / (sqrt(v̂) + eps) is lr / eps: the same steps, L2 and all, in other units."""
    generator, loss = torch.Generator().manual_seed(0), nn.MSELoss()
    data, test = (tuple(torch.randn(n, k, generator=generator).to(FP64) for k in (4, 2)) for n in (12, 3))
    batches = tuple(torch.arange(12) for _ in range(20))
    settings = {"batch_size": 12, "batches": batches, "record": True, "generator": 0}
    found = []
    for kind in (
        lambda p, lr: torch.optim.SGD(p, lr, weight_decay=0.3),
        lambda p, lr: torch.optim.Adam(p, 1e7 * lr, betas=(0.0, 0.999), eps=1e7, weight_decay=0.3),
    ):
        torch.manual_seed(0)
        model = nn.Linear(4, 2).to(FP64)
        run = train(model, loss, data, optimizer=kind, lr=0.05, **settings)
        found.append(segment_response(model, loss, data, test, run=run, num_segments=2, rtol=1e-10).scores)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
