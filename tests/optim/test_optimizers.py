"""What holds of every optimizer, and how many calls a step makes."""

from __future__ import annotations

import doctest
import io
import pickle
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from curvlab import optim
from curvlab.lab.models import LeNet5
from curvlab.linalg import LinearOperator
from curvlab.optim import NGD, UniformDirection, exact_ngd, fisher_newton, ginger, ngd, qng, uniform_direction
from tests.optim.conformance import ENTRIES, Counter, Entry, Regression, twin
from tests.refusals import refuses


def over(wanted: Callable[[Entry], bool]) -> pytest.MarkDecorator:
    """Run a test over the entries of one kind."""
    chosen = [(entry, f"{index}-{entry}") for index, entry in enumerate(ENTRIES) if wanted(entry)]
    return pytest.mark.parametrize("entry", [entry for entry, _ in chosen], ids=[name for _, name in chosen])


each_entry = over(lambda entry: True)
each_of_ours = over(lambda entry: entry.kind is not torch.optim.SGD)


def state_tensors(value: Any) -> list[Any]:
    """Everything in a nested state, in order."""
    if isinstance(value, dict):
        return [leaf for key in value for leaf in [key, *state_tensors(value[key])]]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in state_tensors(item)]
    return [value]


def assert_same(first: Any, second: Any) -> None:
    a, b = state_tensors(first), state_tensors(second)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        same = torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, torch.Tensor) else x == y or x != x
        assert same


@each_entry
def test_it_lowers_the_loss_and_keeps_the_dtype_and_single_precision_follows_double(entry: Entry) -> None:
    ends = []
    for dtype in (torch.float64, torch.float32):
        problem = Regression(dtype)
        optimizer, before = entry.build(problem), float(problem.value())
        entry.step(problem, optimizer, 5)
        ends.append(problem.vector().double())
        entry.step(problem, optimizer, 7)
        assert float(problem.value()) < 0.8 * before
        assert all(parameter.dtype == dtype for parameter in problem.parameters)
    if not entry.keywords(problem):  # draws of the two precisions are different numbers
        torch.testing.assert_close(ends[0], ends[1], rtol=1e-3, atol=1e-4)


@each_entry
def test_a_saved_state_continues_bit_for_bit(entry: Entry) -> None:
    problem = Regression()
    optimizer = entry.build(problem)
    entry.step(problem, optimizer, 13)  # where NGD updates in one step of four
    saved = io.BytesIO()
    torch.save([problem.model.state_dict(), optimizer.state_dict(), problem.generator.get_state()], saved)
    saved.seek(0)
    weights, state, drawn = torch.load(saved, weights_only=True)
    resumed = Regression()
    resumed.model.load_state_dict(weights)
    loaded = entry.build(resumed, lr=0.123)  # settings come from the state, too
    loaded.load_state_dict(state)
    resumed.generator.set_state(drawn)
    for _ in range(2):
        entry.step(problem, optimizer, 3)
        entry.step(resumed, loaded, 3)
        assert torch.equal(problem.vector(), resumed.vector())
    assert_same(optimizer.state_dict(), loaded.state_dict())


@each_entry
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_and_pickles_go_on_alone(entry: Entry, way: str) -> None:
    problem = Regression()
    optimizer = entry.build(problem)
    entry.step(problem, optimizer, 3)
    pair = (problem, optimizer)
    other, copied = twin(*pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))  # noqa: S301
    before = other.vector()
    entry.step(problem, optimizer, 3)
    assert torch.equal(other.vector(), before)
    entry.step(other, copied, 3)
    assert torch.equal(problem.vector(), other.vector())


@each_entry
def test_schedulers_change_the_step(entry: Entry) -> None:
    problem = Regression()
    optimizer = entry.build(problem)
    other, copied = twin(problem, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(copied, 0.25)
    before = problem.vector()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a scheduler's step before the optimizer's
        scheduler.step()
    assert copied.param_groups[0]["lr"] == 0.25 * optimizer.param_groups[0]["lr"]
    entry.step(problem, optimizer)
    entry.step(other, copied)
    torch.testing.assert_close(other.vector() - before, 0.25 * (problem.vector() - before), rtol=1e-9, atol=1e-12)


@each_entry
def test_parameters_without_gradient_and_frozen_ones_stay(entry: Entry) -> None:
    problem = Regression()
    matrix, vector = problem.parameters
    frozen = problem.model[0].weight
    # Operators are of the parameters that require gradients; the frozen one may be passed all the same.
    optimizer = entry.build(problem, [frozen, matrix, vector])
    entry.step(problem, optimizer, 2)
    before, moved = vector.detach().clone(), matrix.detach().clone()
    problem.set_gradients()
    vector.grad = None
    optimizer.step()
    assert torch.equal(vector, before)
    assert not torch.equal(matrix, moved)
    assert torch.equal(frozen, torch.ones(4, dtype=torch.float64))
    entry.step(problem, optimizer, 2)  # it goes on when the gradient is back
    assert not torch.equal(vector, before)


@each_of_ours  # torch's own takes every gradient
@pytest.mark.parametrize(("num_steps", "value"), [(0, torch.nan), (3, torch.inf)])
def test_gradients_that_are_not_finite_do_no_damage(entry: Entry, num_steps: int, value: float) -> None:
    problem = Regression()
    optimizer = entry.build(problem)
    entry.step(problem, optimizer, num_steps)
    other, untouched = twin(problem, optimizer)
    before = problem.vector()
    if entry.needs == "curvature":
        problem.set_gradients()
        problem.parameters[0].grad[0, 0] = value
        with pytest.warns(RuntimeWarning, match="NaN or infinity in the sampled gradient.*left the curvature as"):
            optimizer.update_curvature()
    problem.set_gradients()
    problem.parameters[1].grad[2] = value
    if entry.needs == "curvature":
        with pytest.warns(RuntimeWarning, match="NaN or infinity in the gradient.*took no step"):
            optimizer.step()
    else:
        refuses(r"NaN or infinity in .*the iteration has diverged", optimizer.step)
    assert torch.equal(problem.vector(), before)
    entry.step(problem, optimizer, 3)
    entry.step(other, untouched, 3)
    assert torch.equal(problem.vector(), other.vector())


@each_entry
def test_the_closure_is_called_once_with_gradients_enabled(entry: Entry) -> None:
    problem = Regression()
    optimizer = entry.build(problem)
    other, copied = twin(problem, optimizer)
    calls = []

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        value = problem.value()
        value.backward()
        calls.append(value)
        return value

    with torch.no_grad():
        returned = optimizer.step(closure)
    assert len(calls) == 1
    assert float(returned) == float(calls[0].detach())
    gradients = [parameter.grad.clone() for parameter in problem.parameters]
    other.set_gradients()
    assert copied.step() is None
    assert torch.equal(problem.vector(), other.vector())
    for gradient, parameter in zip(gradients, other.parameters, strict=True):
        assert torch.equal(parameter.grad, gradient)  # a step leaves the gradients alone
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in problem.parameters)
    assert all(parameter.requires_grad for parameter in problem.parameters)


@over(lambda entry: entry.offers("maximize"))
def test_maximize_goes_uphill(entry: Entry) -> None:
    problem, uphill = Regression(), Regression()
    optimizer, maximizer = entry.build(problem), entry.build(uphill, maximize=True)
    for _ in range(14):
        for case, stepper, sign in ((problem, optimizer, 1.0), (uphill, maximizer, -1.0)):
            if entry.needs == "curvature":
                case.set_sampled_gradients()
                stepper.update_curvature()
            case.set_gradients(sign)
            stepper.step()
    assert torch.equal(problem.vector(), uphill.vector())


@over(lambda entry: entry.offers("weight_decay") and entry.needs != "curvature")  # theirs is decoupled
def test_weight_decay_is_a_penalty_on_the_loss(entry: Entry) -> None:
    penalised, decayed = Regression(), Regression()
    optimizer, decaying = entry.build(penalised), entry.build(decayed, weight_decay=0.1)
    for _ in range(14):
        for case, stepper in ((penalised, optimizer), (decayed, decaying)):
            case.set_gradients()
            if stepper is optimizer:
                for parameter in case.parameters:
                    parameter.grad.add_(parameter.detach(), alpha=0.1)
            stepper.step()
    torch.testing.assert_close(penalised.vector(), decayed.vector(), rtol=1e-12, atol=1e-12)


@each_entry
def test_groups_have_a_learning_rate_of_their_own(entry: Entry) -> None:
    problem = Regression()
    matrix, vector = problem.parameters
    groups = [{"params": [matrix]}, {"params": [vector], "lr": 0.0}]
    if entry.one_group:
        refuses("takes one parameter group, got 2", entry.build, problem, groups)
        return
    optimizer = entry.build(problem, groups)
    start = [parameter.detach().clone() for parameter in (matrix, vector)]
    entry.step(problem, optimizer, 3)
    assert not torch.equal(matrix, start[0])
    assert torch.equal(vector, start[1])
    added = entry.build(problem, groups[:1])
    added.add_param_group({"params": [vector]})
    entry.step(problem, added)
    assert not torch.equal(vector, start[1])


@pytest.mark.parametrize(
    ("entry", "settings", "message"),
    [(entry, *bad) for entry in ENTRIES for bad in entry.bad],
    ids=[f"{entry}-{next(iter(settings))}" for entry in ENTRIES for settings, _ in entry.bad],
)
def test_bad_settings_are_refused(entry: Entry, settings: dict[str, Any], message: str) -> None:
    problem = Regression()
    refuses(message, entry.build, problem, **settings)
    if not entry.one_group and entry.kind is not torch.optim.SGD:
        optimizer = entry.build(problem, problem.parameters[:1])
        with pytest.raises(ValueError, match=message):  # in a group, which is then not kept
            optimizer.add_param_group({"params": problem.parameters[1:], **settings})
        assert len(optimizer.param_groups) == 1


@each_entry
def test_a_step_without_any_gradient_moves_nothing(entry: Entry) -> None:
    problem = Regression()
    optimizer, before = entry.build(problem), problem.vector()
    if entry.one_group:
        refuses(r"found no gradients: call loss.backward\(\) first", optimizer.step)
    else:
        optimizer.step()
    assert torch.equal(problem.vector(), before)


@over(lambda entry: entry.one_group)
def test_an_operator_of_another_size_is_refused(entry: Entry) -> None:
    problem = Regression()
    text = r"got 12 parameters and a \w+ of size 15: both must be the parameters that"
    refuses(text, entry.build, problem, problem.parameters[:1])


# --- A step by a uniform direction costs O(n): what the operations of one step touch, counted
class Diagonal(LinearOperator):
    def matmat(self, vectors: Tensor) -> Tensor:
        return torch.linspace(1, 2, len(vectors), dtype=vectors.dtype)[:, None] * vectors


def counted_step(size: int, **settings: Any) -> Counter:
    x = nn.Parameter(torch.ones(size, dtype=torch.float64))
    optimizer = UniformDirection([x], Diagonal(size, dtype=torch.float64, device="cpu"), **settings)
    x.grad = torch.ones_like(x)
    with Counter() as counter:
        optimizer.step()
    return counter


@pytest.mark.parametrize(
    "settings",
    [
        {"sigma": 1.0, "hessian_lipschitz": 1.0},
        {"sigma": 1.0, "hessian_lipschitz": 1.0, "symmetrize": False, "safeguard": False},
        {"sigma": 1.0, "num_directions": 8},  # M estimated
    ],
)
def test_twice_the_parameters_cost_twice_as_much(settings: dict[str, Any]) -> None:
    once, twice = counted_step(20_000, **settings), counted_step(40_000, **settings)
    assert twice.entries / once.entries == pytest.approx(2, rel=0.02)
    assert once.entries > 20_000 * 5  # the count sees the step at all
    assert once.largest <= 20_000 * 2 * settings.get("num_directions", 1)


def test_a_step_of_ngd_between_updates_waits_once() -> None:
    # Every read of a number by the host is a wait for the device; the check of the gradients needs one.
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in [(6, 5), (6, 5), (7,), (4, 3, 2)]]
    optimizer = NGD(parameters, lr=0.1)
    for _ in range(11):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    with Counter() as counter:
        optimizer.step()
    assert counter.host_reads == 1


def test_small_networks_take_few_calls() -> None:
    # A call takes microseconds, more than its arithmetic: 10 tensors and 18 axes once took 1,563 and 423.
    generator = torch.Generator().manual_seed(0)
    parameters = list(LeNet5(input_shape=[1, 28, 28], num_outputs=10).parameters())
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer = NGD(parameters, lr=0.1)
    calls = []
    for _ in range(16):
        with Counter() as counter:
            optimizer.step()
        calls.append(counter.calls)
    assert calls[12] <= 400  # an update
    assert max(calls[13:16]) <= 75


def test_the_counter_sees_a_dense_matrix() -> None:
    x = torch.ones(300)
    with Counter() as counter:
        torch.outer(x, x).sum()
    assert counter.largest == 300**2


# --- The examples in docstrings and in docs/library.md run, and lower the loss
LIBRARY = Path(__file__).parents[2] / "docs" / "library.md"


def test_the_example_trains() -> None:
    text = optim.__doc__ or ""
    example = textwrap.dedent(text.split("::\n", 1)[1].split("\n`ExactNGD`")[0])
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(example, names)  # noqa: S102
    model, loss, inputs, targets = (names[name] for name in ("model", "loss", "inputs", "targets"))
    torch.manual_seed(0)
    start = torch.nn.Linear(20, 10)
    assert float(loss(model(inputs), targets)) < 0.9 * float(loss(start(inputs), targets))


@pytest.mark.parametrize("module", [exact_ngd, fisher_newton, ginger, ngd, qng, uniform_direction])
def test_examples_of_optimizers_print_what_they_say(module: ModuleType) -> None:
    torch.manual_seed(0)
    failed, attempted = doctest.testmod(module)
    assert attempted > 3
    assert failed == 0


def test_the_ginger_of_the_library_page_trains() -> None:
    # At lr=0.1 and damping 1e-2 without normalize=True, as the page had it, the loss went to 30.
    text = LIBRARY.read_text()
    start = text.index("optimizer = Ginger(")
    made, step = text[start : text.index("\n```", start)].split("\n", 1)
    inputs, targets = (torch.tensor(part[:1000]) for part in load_digits(return_X_y=True))
    inputs = inputs.float() / 16
    torch.manual_seed(0)
    names: dict[str, Any] = {
        "model": nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)),
        "loss": nn.CrossEntropyLoss(),
        "generator": torch.Generator().manual_seed(0),
        "Ginger": optim.Ginger,
        "sampled_label_loss": optim.sampled_label_loss,
    }
    exec(made, names)  # noqa: S102
    for _ in range(20):
        for batch in torch.randperm(1000).split(500):
            exec(step, names | {"inputs": inputs[batch], "targets": targets[batch]})  # noqa: S102
    assert float(names["loss"](names["model"](inputs), targets)) < 0.4
