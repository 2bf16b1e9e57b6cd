"""Passes over data that must be equal, and calls that are recorded and replayed."""

import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.testing import assert_close
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from curvlab.curvature import GaussNewtonOperator
from curvlab.problem import Batches, ModelFunction
from curvlab.problem.closed_forms import CrossEntropy
from curvlab.problem.records import Records
from tests.curvature.curvature_cases import Problem, problem
from tests.refusals import refuses


# --- Data that is another at each pass is noticed when an operator is built, and refused
@pytest.fixture
def case() -> Problem:
    """Eleven different examples."""
    small = problem("mlp_tanh", "ce")
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(11, *small.inputs.shape[1:], dtype=torch.float64, generator=generator)
    return Problem(small.model, small.loss, inputs, torch.arange(11) % 3)


def dense(case: Problem, data: object) -> Tensor:
    return GaussNewtonOperator(case.model, case.loss, data).to_dense()


def whole(case: Problem) -> Tensor:
    return dense(case, (case.inputs, case.targets))


def read(case: Problem, data: object) -> Tensor:
    """All inputs in the order of a pass."""
    return torch.cat([x for x, _ in Batches.of(ModelFunction(case.model), data, batch_size=4)])


# ------------------------------------------------------------------------------- read in one order
def test_dropping_without_shuffling_leaves_out_the_same_examples(case: Problem) -> None:
    loader = DataLoader(TensorDataset(case.inputs, case.targets), batch_size=4, drop_last=True)
    op = GaussNewtonOperator(case.model, case.loss, loader)
    assert op.num_examples == 8
    assert_close(op.to_dense(), dense(case, (case.inputs[:8], case.targets[:8])))
    sampled = op.sample(64, torch.Generator().manual_seed(0))
    assert all((case.inputs[:8] == row).all(1).any() for x, _ in sampled.batches for row in x)


def test_the_users_random_numbers_are_left_alone(case: Problem) -> None:
    torch_state, numpy_state, python_state = (
        torch.get_rng_state(),
        np.random.get_state()[1].copy(),  # noqa: NPY002
        random.getstate(),
    )
    dense(case, Augmented(case, "seeded"))
    GaussNewtonOperator(case.model, case.loss, DataLoader(Augmented(case, "seeded"), batch_size=4))
    refuses("each time it is read", dense, case, Augmented(case, "numpy"))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert (np.random.get_state()[1] == numpy_state).all()  # noqa: NPY002
    assert random.getstate() == python_state


@pytest.mark.parametrize("num_examples", [1, 11])
@pytest.mark.parametrize(
    "settings", [{"batch_size": 4}, {"batch_size": None}, {"batch_size": 4, "drop_last": True}]
)
def test_a_loader_that_shuffles_is_refused_and_the_advice_works(
    case: Problem, settings: dict[str, Any], num_examples: int
) -> None:
    dataset = TensorDataset(case.inputs[:num_examples], case.targets[:num_examples])
    if settings["batch_size"] is None:
        dataset = [(case.inputs[:num_examples], case.targets[:num_examples])]
    with pytest.raises(ValueError, match=r"the loader shuffles.*shuffle=False.*list\(loader\)"):
        dense(case, DataLoader(dataset, shuffle=True, **settings))
    if num_examples == 11:
        batches = list(DataLoader(dataset, shuffle=True, **settings | {"drop_last": False}))
        assert_close(dense(case, batches), whole(case), rtol=1e-10, atol=1e-12)


def test_what_is_small_is_read_once(case: Problem) -> None:
    class Counted(Dataset):
        reads = 0

        def __len__(self) -> int:
            return 11

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            self.reads += 1
            return case.inputs[index], case.targets[index]

    for form in (lambda data: data, lambda data: DataLoader(data, batch_size=4)):
        counted = Counted()
        op = GaussNewtonOperator(case.model, case.loss, form(counted))
        compared = counted.reads  # two examples, twice, and once for the model
        for _ in range(3):
            op @ op.randn(2, torch.Generator())
        assert (compared, counted.reads - compared) == (6, 11)


class Reversed(Sampler):
    """A sampler of the user's own that repeats itself."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size - 1, -1, -1))

    def __len__(self) -> int:
        return self.size


class Shuffled(Reversed):
    """One that does not; its numbers are PyTorch's."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.size)


def test_samplers_of_ones_own(case: Problem) -> None:
    dataset = TensorDataset(case.inputs, case.targets)
    assert torch.equal(read(case, DataLoader(dataset, sampler=Reversed(11))), case.inputs.flip(0))
    groups = [[3, 1], [0], [10, 4, 5]]
    assert torch.equal(read(case, DataLoader(dataset, batch_sampler=groups)), case.inputs[[3, 1, 0, 10, 4, 5]])


def test_loaders_of_whole_batches(case: Problem) -> None:
    class Blocks(Dataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            rows = slice(6 * index, 6 * index + 6)
            return case.inputs[rows], case.targets[rows]

    loader = DataLoader(Blocks(), batch_size=None)
    assert torch.equal(read(case, loader), case.inputs)
    assert GaussNewtonOperator(case.model, case.loss, loader).num_examples == 11


def test_worker_processes(case: Problem) -> None:
    dataset = TensorDataset(case.inputs, case.targets)
    loader = DataLoader(dataset, batch_size=4, num_workers=1)
    assert torch.equal(read(case, loader), case.inputs)
    flipped = DataLoader(Augmented(case), batch_size=11, num_workers=1)
    refuses("begin with different batches", read, case, flipped)


# --------------------------------------------------------------------------------------------- refused
class Augmented(Dataset):
    """Flips the sign of its inputs, or not; from one of the generators that augmentations draw from."""

    def __init__(self, case: Problem, source: str = "torch") -> None:
        self.case, self.source, self.own = case, source, torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return len(self.case.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        coin = {
            "torch": lambda: torch.rand(()) < 0.5,
            "numpy": lambda: np.random.rand() < 0.5,  # noqa: NPY002
            "python": lambda: random.random() < 0.5,
            "own": lambda: torch.rand((), generator=self.own) < 0.9,
            "seeded": lambda: random.Random(index).random() < 0.5,
            "reseeded": lambda: bool(np.random.seed(index)) or np.random.rand() < 0.5,  # noqa: NPY002
        }[self.source]()
        sign = -1 if coin else 1
        return sign * self.case.inputs[index], self.case.targets[index]


@pytest.mark.parametrize("source", ["torch", "numpy", "python"])
@pytest.mark.parametrize("form", ["data set", "loader"])
@pytest.mark.parametrize("seed", range(3))
def test_random_augmentation_is_refused(case: Problem, source: str, form: str, seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)
    dataset = Augmented(case, source)
    with pytest.raises(ValueError, match=r"another one each time it is read .* list\(DataLoader"):
        GaussNewtonOperator(
            case.model, case.loss, dataset if form == "data set" else DataLoader(dataset, batch_size=4)
        )
    batches = list(DataLoader(dataset, batch_size=4))  # what the message says
    assert_close(dense(case, batches), dense(case, batches))


@pytest.mark.parametrize("source", ["seeded", "reseeded"])
def test_augmentation_that_depends_on_the_example_alone_is_taken(case: Problem, source: str) -> None:
    assert_close(dense(case, Augmented(case, source)), dense(case, list(DataLoader(Augmented(case, source)))))


def test_a_collator_that_draws_is_refused(case: Problem) -> None:
    def collate(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        inputs = torch.stack([x for x, _ in examples])
        return inputs * torch.bernoulli(torch.full_like(inputs, 0.85)), torch.stack([y for _, y in examples])

    loader = DataLoader(TensorDataset(case.inputs, case.targets), batch_size=4, collate_fn=collate)
    refuses("a collator that draws masks", dense, case, loader)


SAMPLERS = {
    "with replacement": lambda data: {"sampler": RandomSampler(data, replacement=True), "batch_size": 4},
    "some": lambda data: {"sampler": RandomSampler(data, num_samples=6), "batch_size": 4},
    "weighted": lambda data: {"sampler": WeightedRandomSampler(torch.arange(11.0), 11), "batch_size": 4},
    "shuffled": lambda data: {"sampler": Shuffled(11), "batch_size": 4},
    "subset": lambda data: {"sampler": SubsetRandomSampler([7, 2, 5]), "batch_size": 4},
    "grouped anew": lambda data: {"batch_sampler": Grouped(Shuffled(11), 4, drop_last=False)},
}


class Grouped(BatchSampler):
    """Any batch sampler of the user's own."""


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_that_choose_anew_are_refused_and_the_advice_works(case: Problem, name: str) -> None:
    dataset = TensorDataset(case.inputs, case.targets)
    loader = DataLoader(dataset, **SAMPLERS[name](dataset))
    refuses("each pass, so each product would belong to another matrix", dense, case, loader)
    if name == "grouped anew":
        drawn = DataLoader(dataset, batch_sampler=list(loader.batch_sampler), collate_fn=loader.collate_fn)
    else:
        drawn = DataLoader(dataset, batch_size=4, sampler=list(loader.sampler))
    op = GaussNewtonOperator(case.model, case.loss, drawn)
    assert torch.equal(op.to_dense(), op.to_dense())


class Stream(IterableDataset):
    def __init__(self, case: Problem, order: str) -> None:
        self.case, self.order = case, order
        self.left = iter(range(11))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        orders = {"fixed": range(11), "shuffled": torch.randperm(11), "once": self.left}
        return ((self.case.inputs[index], self.case.targets[index]) for index in orders[self.order])


@pytest.mark.parametrize(("order", "batch_size"), [("shuffled", 4), ("once", 11)])
def test_streams_that_do_not_repeat_themselves_are_refused(case: Problem, order: str, batch_size: int) -> None:
    message = "begin with different batches" if order == "shuffled" else "a second pass over the data is empty"
    refuses(message, dense, case, DataLoader(Stream(case, order), batch_size=batch_size))
    fixed = DataLoader(Stream(case, "fixed"), batch_size=4)
    assert_close(dense(case, fixed), whole(case), rtol=1e-10, atol=1e-12)


# --- Recorded calls: equal to the calls themselves, number by number, and only where a record is right
class _Counted:
    """Gradients of a network's loss for K copies, and how often Python went through them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        self.scale = torch.ones(2)
        self.num_calls = 0

    def __call__(self, values: dict[str, Tensor], inputs: Tensor, weights: Tensor | None) -> list[Tensor]:
        self.num_calls += 1

        def loss(own: dict[str, Tensor], x: Tensor) -> Tensor:
            outputs = functional_call(self.model, own, (x,)) * self.scale
            losses = outputs.logsumexp(-1)
            return losses.mean() if weights is None else losses @ weights

        gradients, found = vmap(grad_and_value(loss), in_dims=(0, None))(values, inputs)
        return [found, *gradients.values()]

    def arguments(self, seed: int, size: int = 7) -> tuple[dict[str, Tensor], Tensor]:
        generator = torch.Generator().manual_seed(seed)
        copies = {
            name: torch.randn(4, *value.shape, generator=generator)
            for name, value in self.model.named_parameters()
        }
        return copies, torch.randn(size, 3, generator=generator)


def test_replays_are_equal_and_run_no_python() -> None:
    function, direct, records = _Counted(), _Counted(), Records(calls_before=2)
    for seed in range(6):
        for weights in (None, torch.full((7,), 0.5 + seed)):
            arguments = (*function.arguments(seed), weights)
            found = records.call("loss", function, *arguments)
            assert all(map(torch.equal, found, direct(*arguments)))
    # For each of the two: two calls, and at the third the record, a call to check it against.
    assert function.num_calls == 2 * (2 + 2)


def test_each_shape_has_its_own_record_and_tensors_read_beside_are_read_again() -> None:
    function, direct, records = _Counted(), _Counted(), Records(calls_before=0)
    for seed, size in enumerate((7, 4, 7, 4)):
        for each in (function, direct):
            each.scale.fill_(seed + 1)
        arguments = (*function.arguments(seed, size), None)
        found = records.call("loss", function, *arguments)
        assert all(map(torch.equal, found, direct(*arguments)))
    assert function.num_calls == 2 * 2


def test_a_function_that_branches_on_values_is_called_as_before() -> None:
    def function(x: Tensor) -> list[Tensor]:
        return [x.exp() if x.sum() > 0 else -x]

    records = Records(calls_before=1)
    for value in (1.0, 2.0, 3.0, -1.0):
        x = torch.tensor([value])
        (found,) = records.call("branch", function, x)
        assert torch.equal(found, function(x)[0])


def test_the_divergence_of_classes_is_recorded() -> None:
    loss, calls = CrossEntropy(nn.CrossEntropyLoss()), []

    def divergence(outputs: Tensor, reference: Tensor, targets: Tensor) -> list[Tensor]:
        calls.append(1)
        return [loss.bregman_divergence(outputs, reference, targets)]

    records, given = Records(calls_before=0), (torch.randn(5, 3), torch.randn(5, 3), torch.arange(5) % 3)
    found = [records.call("divergence", divergence, *given)[0] for _ in range(3)]
    assert len(calls) == 2  # recorded and checked
    assert torch.equal(found[2], divergence(*given)[0])


@pytest.mark.parametrize("by_chance", [False, True], ids=["counter", "random"])
def test_a_record_that_returns_other_numbers_is_not_used(*, by_chance: bool) -> None:
    calls = []

    def function(x: Tensor) -> list[Tensor]:
        calls.append(1)
        return [x + torch.randn(()) if by_chance else x + len(calls)]

    records = Records(calls_before=1)
    found = [float(records.call("own state", function, torch.zeros(()))[0]) for _ in range(5)]
    assert len(set(found)) == 5
    assert len(calls) >= 5


def test_other_threads_neither_record_nor_replay() -> None:
    function, records = _Counted(), Records(calls_before=0)
    arguments = (*function.arguments(0), None)
    for _ in range(3):
        thread = threading.Thread(target=records.call, args=("loss", function, *arguments))
        thread.start()
        thread.join()
    assert function.num_calls == 3
