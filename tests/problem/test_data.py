"""The forms that data may take, all of the same matrix; what a batch is, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from curvlab.curvature import FisherOperator, GaussNewtonOperator, HessianOperator
from curvlab.linalg import LinearOperator
from curvlab.problem import Batches
from tests.curvature.curvature_cases import Problem, language_problem, problem


class Pairs(Dataset):
    """Map-style, and nothing but __len__ and __getitem__."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.inputs[index], self.targets[index]


class Reiterable:
    """Starts anew each time; batches of 1, 3 and 1."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.inputs.split([1, 3, 1]), self.targets.split([1, 3, 1]), strict=True)


class Stream(IterableDataset):
    def __init__(self, batches: Reiterable) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return 3


FORMS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "tensor dataset": TensorDataset,
    "map-style": Pairs,
    "list of one batch": lambda x, y: [(x, y)],
    "ragged batches": lambda x, y: list(zip(x.split([1, 4]), y.split([1, 4]), strict=True)),
    "batches as lists": lambda x, y: [[x[:2], y[:2]], [x[2:], y[2:]]],
    "re-iterable": Reiterable,
    "loader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=2),
    "list of two tensors": lambda x, y: [x, y],
    "tuple of batches": lambda x, y: tuple(zip(x.split([1, 4]), y.split([1, 4]), strict=True)),
    "batches, empty ones too": lambda x, y: [(x[:0], y[:0]), (x[:2], y[:2]), (x[2:2], y[2:2]), (x[2:], y[2:])],
    "iterable dataset of known length": lambda x, y: Stream(Reiterable(x, y)),
    "not contiguous": lambda x, y: (x.T.contiguous().T, y.T.contiguous().T if y.ndim > 1 else y),
}
OPERATORS = [
    GaussNewtonOperator,
    HessianOperator,
    lambda *args, **kw: FisherOperator(*args, kind="empirical", **kw),
]


def check_products(found: LinearOperator, expected: LinearOperator) -> None:
    """With three random vectors: a matrix that is wrong anywhere has wrong products with them."""
    vectors = expected.randn(3, torch.Generator().manual_seed(0))
    assert_close(found @ vectors, expected @ vectors, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loss", ["ce_ignore", "ce_sum", "mse"])
def test_every_form_gives_the_same_matrix(form: str, loss: str) -> None:
    case = problem("mlp_tanh", loss)
    data = FORMS[form](case.inputs, case.targets)
    for operator in OPERATORS:
        check_products(operator(case.model, case.loss, data), operator(*case))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize("form", ["pair", "dataset"])
@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_batch_size_does_not_matter(batch_size: int, form: str, loss: str) -> None:
    case = language_problem(loss)  # sequences have 4, 2, 0, 3 and 1 predicted tokens
    data = (case.inputs, case.targets) if form == "pair" else TensorDataset(case.inputs, case.targets)
    for operator in OPERATORS:
        check_products(operator(case.model, case.loss, data, batch_size=batch_size), operator(*case))


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_batch_norm_in_eval_mode_does_not_couple_examples(batch_size: int) -> None:
    case = problem("conv_batch_norm", "ce")
    split = GaussNewtonOperator(*case, batch_size=batch_size)
    assert_close(split.to_dense(), GaussNewtonOperator(*case).to_dense(), rtol=1e-10, atol=1e-12)


def test_sequences_of_different_lengths_in_batches_of_their_own() -> None:
    case = language_problem("mean")
    short, long = (case.inputs[:2, :3], case.targets[:2, :3]), (case.inputs[2:], case.targets[2:])
    padded = torch.where(torch.arange(4) < 3, case.targets[:2], -100)  # causal: what follows changes nothing
    reference = (case.inputs, torch.cat([padded, case.targets[2:]]))
    op = GaussNewtonOperator(case.model, case.loss, [short, long])
    assert_close(op.to_dense(), GaussNewtonOperator(case.model, case.loss, reference).to_dense())
    samples = [
        GaussNewtonOperator(case.model, case.loss, data).sample(6, torch.Generator().manual_seed(2)).to_dense()
        for data in ([short, long], reference)
    ]
    assert_close(*samples)
    monte_carlo = FisherOperator(
        case.model, case.loss, [short, long], kind="monte_carlo", generator=torch.Generator().manual_seed(0)
    )
    assert torch.linalg.matrix_rank(monte_carlo.to_dense(), rtol=1e-10) <= 9
    assert monte_carlo.sample(6, torch.Generator().manual_seed(2)).shape == op.shape


def test_samples_scale_by_what_the_dataset_returns() -> None:
    class OneHot(Pairs):
        """As torchvision's data sets with a target_transform: `targets` holds what is transformed."""

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            inputs, target = super().__getitem__(index)
            return inputs, torch.nn.functional.one_hot(target, 3).double()

    case = problem("linear", "ce")
    one_hot = torch.nn.functional.one_hot(case.targets, 3).double()
    samples = [
        GaussNewtonOperator(case.model, nn.MSELoss(), data).sample(4, torch.Generator().manual_seed(1)).to_dense()
        for data in (OneHot(case.inputs, case.targets), (case.inputs, one_hot))
    ]
    assert_close(*samples)


def test_no_predicted_token_is_refused() -> None:
    case = language_problem("mean")
    op = GaussNewtonOperator(case.model, case.loss, (case.inputs, torch.full_like(case.targets, -100)))
    with pytest.raises(ValueError, match="every target is ignored"):
        op @ op.randn(1, torch.Generator())


def test_one_example() -> None:
    case: Problem = problem("mlp_tanh", "ce").part(2)
    assert torch.linalg.matrix_rank(GaussNewtonOperator(*case).to_dense(), rtol=1e-10) == 2  # rank of S: C - 1


def test_single_precision_data_are_cast() -> None:
    case = problem("mlp_tanh", "mse")
    single = Problem(case.model, case.loss, case.inputs.float(), case.targets.float())
    expected = GaussNewtonOperator(*case).to_dense()
    assert_close(GaussNewtonOperator(*single).to_dense(), expected, rtol=1e-5, atol=1e-6)


def test_empty_batches_are_skipped_in_samples_and_draws() -> None:
    case = problem("mlp_tanh", "mse")
    batches = FORMS["batches, empty ones too"](case.inputs, case.targets)
    op = GaussNewtonOperator(case.model, case.loss, batches)
    sampled = [o.sample(3, torch.Generator().manual_seed(0)).to_dense() for o in (op, GaussNewtonOperator(*case))]
    assert_close(*sampled)
    drawn = FisherOperator(case.model, case.loss, batches, kind="monte_carlo", generator=torch.Generator())
    assert torch.linalg.matrix_rank(drawn.to_dense(), rtol=1e-10) == 5


class Listed(Dataset):
    """Lists its targets, as torchvision's data sets do, and counts how often an example is read."""

    def __init__(self, inputs: Tensor, returned: Tensor, targets: object) -> None:
        self.inputs, self.returned, self.targets, self.num_reads = inputs, returned, targets, 0

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.num_reads += 1
        return self.inputs[index], self.returned[index]


@pytest.mark.parametrize("known", ["right", "wrong", "transformed", "strings", "too few"])
def test_listed_targets_are_compared_with_what_is_returned(known: str) -> None:
    case = problem("linear", "ce_ignore")  # the last of the targets is ignored: a wrong list gives another scale
    wrong = torch.tensor([0, -1, 1, 2, 2])
    targets = {"right": case.targets.tolist(), "strings": list("abcde"), "too few": case.targets[:3]}.get(
        known, wrong
    )
    dataset = Listed(case.inputs, case.targets, targets)
    if known == "transformed":
        dataset.target_transform = lambda target: target
    op = GaussNewtonOperator(case.model, case.loss, dataset)
    sampled = [o.sample(2, torch.Generator().manual_seed(3)).to_dense() for o in (op, GaussNewtonOperator(*case))]
    assert_close(*sampled)
    repeated = 2 * 2 + 2  # whether two are the same when they are read again, and in a batch
    assert dataset.num_reads == repeated + 2 + 2 if known == "right" else dataset.num_reads >= repeated + 2 + 5


@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        (torch.int32, "list of two tensors"),
        (torch.int16, "tensor dataset"),
        (torch.uint8, "ragged batches"),
        (torch.uint8, "loader"),
    ],
)
@pytest.mark.parametrize("operator", OPERATORS)
def test_classes_of_every_integer_type(dtype: torch.dtype, form: str, operator) -> None:
    case = problem("mlp_tanh", "ce")
    op = operator(
        case.model, nn.CrossEntropyLoss(ignore_index=-200), FORMS[form](case.inputs, case.targets.to(dtype))
    )
    assert_close(op.to_dense(), operator(*case).to_dense())
    samples = [o.sample(3, torch.Generator().manual_seed(0)).to_dense() for o in (op, operator(*case))]
    assert_close(*samples)  # -200 is 56 in 8 bits


def test_a_pair_of_vectors_that_may_be_a_batch_of_numbers_is_refused() -> None:
    examples = [(vector, vector) for vector in torch.randn(3, 4)]
    for data in (examples, Stream(examples)):
        with pytest.raises(ValueError, match=r"shape \(4,\) can be one example or a batch of 4: pass two tensors"):
            GaussNewtonOperator(nn.Linear(4, 4), nn.MSELoss(), data)
    table = nn.Embedding(5, 5)
    batch = (torch.arange(4), torch.tensor([1, 0, 2, 4]))  # class indices are no vector of one example
    assert GaussNewtonOperator(table, nn.CrossEntropyLoss(), [batch, batch]).num_examples == 8


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_notices_changes_of_its_own_tensors_alone(copied) -> None:
    given = torch.randn(4, 2).zero_(), torch.zeros(4, dtype=torch.long)  # changed before it is opened
    batches = Batches(given, batch_size=2, device=torch.device("cpu"), dtype=torch.float64)
    list(batches)  # held in another dtype
    inputs, other = (given[0], copied(batches)) if copied is copy.copy else copied((given[0], batches))
    assert_close(list(other), list(batches))
    inputs.add_(1)
    with pytest.raises(ValueError, match="changed in place"):
        list(other)
    with pytest.raises(ValueError, match="changed in place") if inputs is given[0] else nullcontext():
        list(batches)


READINGS = {
    "pass": list,
    "in turn": lambda batches: list(batches.in_turn(2)),
    "together": lambda batches: batches.together(torch.arange(2)),
    "selected": lambda batches: batches.select(torch.arange(2)),
    "targets": lambda batches: list(batches.targets()),
    "described": lambda batches: batches.depends_on(),
}


@pytest.mark.parametrize("reading", READINGS)
def test_every_reading_notices_data_that_was_changed(reading: str) -> None:
    inputs, targets = torch.randn(4, 2), torch.zeros(4, dtype=torch.long)
    batches = Batches((inputs, targets), batch_size=2, device=torch.device("cpu"), dtype=torch.float64)
    moved = batches.on_device(2)
    inputs.add_(1)
    for data in (batches, moved):
        with pytest.raises(ValueError, match="changed in place"):
            READINGS[reading](data)
