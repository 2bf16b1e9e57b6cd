"""Ranks and operators of a single process; what several do stands in launched_checks.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from curvlab.curvature import GaussNewtonOperator
from curvlab.parallel import DataParallelOperator, Ranks, joined, launched


def test_shares_lie_one_behind_the_other_and_differ_by_one_at_most() -> None:
    inputs, targets = torch.arange(11.0)[:, None], torch.arange(11)
    batches = [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])]
    for data in ((inputs, targets), TensorDataset(inputs, targets), ({"x": inputs}, targets)):
        shares = [Ranks(rank, 3).share(data) for rank in range(3)]
        assert torch.equal(torch.cat([share[1] for share in shares]), targets)
        assert sorted(len(share[1]) for share in shares) == [3, 4, 4]
    dataset = [(inputs[i], targets[i]) for i in range(11)]

    class Examples:
        def __len__(self) -> int:
            return 11

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return dataset[index]

    assert [len(Ranks(rank, 3).share(Examples())) for rank in range(3)] == [3, 4, 4]
    assert [len(Ranks(rank, 2).share(batches)) for rank in range(2)] == [1, 1]


def test_data_that_cannot_be_shared_is_refused() -> None:
    pair = torch.zeros(3, 1), torch.zeros(3).long()
    with pytest.raises(ValueError, match="3 examples or batches cannot be shared by 4 ranks: start fewer"):
        Ranks(0, 4).share(pair)
    with pytest.raises(TypeError, match="give every rank a loader of its own examples, or pass the data set"):
        Ranks(0, 2).share(DataLoader(TensorDataset(*pair)))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_process_alone_needs_no_launcher(reduction: str) -> None:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(3, 2).double().eval()
    data = torch.randn(7, 3, generator=generator, dtype=torch.float64), torch.arange(7) % 2
    whole = GaussNewtonOperator(model, nn.CrossEntropyLoss(reduction=reduction), data)
    assert not launched()
    with joined() as ranks:
        assert ranks == Ranks(0, 1)
        spread = DataParallelOperator(whole, ranks)
    vectors = whole.randn(2, generator)
    assert_close(spread @ vectors, whole @ vectors)
    assert spread.is_psd
    assert spread.num_examples == 7
    samples = [op.sample(3, torch.Generator().manual_seed(1)) @ vectors for op in (whole, spread)]
    assert_close(*samples)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        spread.sample(0)


def test_the_mean_is_over_predictions_of_all_ranks() -> None:
    # Two ranks in one process: the sum of what each adds is the matrix of all examples.
    class Pretended(Ranks):
        def agree(self, numbers, what) -> None:
            pass

        def gather(self, value):
            assert value == [2, 5][self.rank]
            return [2, 5]

        def sum(self, tensor):
            return tensor

    generator = torch.Generator().manual_seed(0)
    model, loss = nn.Linear(3, 2).double().eval(), nn.CrossEntropyLoss()
    data = torch.randn(7, 3, generator=generator, dtype=torch.float64), torch.arange(7) % 2
    vector = torch.randn(8, generator=generator, dtype=torch.float64)
    parts = [
        DataParallelOperator(GaussNewtonOperator(model, loss, (data[0][rows], data[1][rows])), Pretended(rank, 2))
        for rank, rows in enumerate((slice(0, 2), slice(2, 7)))
    ]
    assert [part.num_examples for part in parts] == [7, 7]
    assert_close(parts[0] @ vector + parts[1] @ vector, GaussNewtonOperator(model, loss, data) @ vector)
    samples = [part.sample(4, torch.Generator().manual_seed(3)) @ vector for part in parts]
    whole = GaussNewtonOperator(model, loss, data).sample(4, torch.Generator().manual_seed(3))
    assert_close(samples[0] + samples[1], whole @ vector)
