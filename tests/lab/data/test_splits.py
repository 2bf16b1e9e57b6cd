from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from curvlab.lab.data import DataSplits
from curvlab.lab.data.splits import checksum, fixed_permutation, leading
from curvlab.problem import stack


class Squares(Dataset):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(index), float(index) ** 2]), index


def image_splits(channels: int) -> DataSplits:
    data = TensorDataset(torch.zeros(1, channels, 2, 2), torch.zeros(1, dtype=torch.long))
    return DataSplits(
        name="tiny",
        train=data,
        test=data,
        input_shape=(channels, 2, 2),
        num_outputs=2,
        task="classification",
        class_names=None,
        checksum="",
        mean=(0.5, 0.25, 0.0)[:channels],
        std=(2.0, 4.0, 1.0)[:channels],
    )


def test_stack_reads_memory_and_lazy_sets_alike() -> None:
    inputs = torch.tensor([[i, i**2] for i in range(5)], dtype=torch.float32)
    indices = [3, 0, 3]
    expected = torch.tensor([[3.0, 9.0], [0.0, 0.0], [3.0, 9.0]])
    for data in (Squares(), TensorDataset(inputs, torch.arange(5)), (inputs, torch.arange(5))):
        stacked, targets = stack(data, indices)
        assert torch.equal(stacked, expected)
        assert targets.tolist() == indices
    assert torch.equal(stack(Squares(), torch.tensor(indices))[0], expected)


def test_stack_refuses_other_than_two_tensors() -> None:
    with pytest.raises(ValueError, match="holds 3 tensors, but two are needed"):
        stack(TensorDataset(*[torch.zeros(2)] * 3), [0])


def test_to_image_undoes_the_normalisation_by_channel() -> None:
    pixels = torch.tensor([0.1, 0.6, 0.9])[:, None, None].expand(3, 2, 2)
    mean, std = torch.tensor([0.5, 0.25, 0.0]), torch.tensor([2.0, 4.0, 1.0])
    normalised = (pixels - mean[:, None, None]) / std[:, None, None]
    image = image_splits(3).to_image(normalised)
    assert image.shape == (2, 2, 3)
    np.testing.assert_allclose(image[0, 1], [0.1, 0.6, 0.9], atol=1e-6)


def test_to_image_gives_grey_levels_without_a_channel_axis_clamped() -> None:
    image = image_splits(1).to_image(torch.tensor([[[-0.2, 0.0], [0.2, 3.0]]]))
    np.testing.assert_allclose(image, [[0.1, 0.5], [0.9, 1.0]], atol=1e-6)


def test_to_image_refuses_batches_and_tables() -> None:
    with pytest.raises(ValueError, match=r"one input of shape \(1, 2, 2\), got \(4, 1, 2, 2\)"):
        image_splits(1).to_image(torch.zeros(4, 1, 2, 2))
    table = dataclasses.replace(image_splits(1), input_shape=(30,))
    with pytest.raises(ValueError, match="tiny holds no images"):
        table.to_image(torch.zeros(30))


def test_leading() -> None:
    assert leading(None, 7, setting="num_train", name="tiny") == 7
    assert leading(7, 7, setting="num_train", name="tiny") == 7
    for wanted in (0, -1, 8):
        with pytest.raises(ValueError, match=rf"num_test={wanted}, but data=tiny has 7 examples there"):
            leading(wanted, 7, setting="num_test", name="tiny")


def test_checksum_sees_bytes_shape_and_dtype() -> None:
    array = np.arange(6, dtype=np.uint8)
    by_hand = hashlib.sha256(b"|u1(6,)" + bytes(range(6))).hexdigest()
    assert checksum(array) == by_hand
    assert len({by_hand, checksum(array.reshape(2, 3)), checksum(array.view(np.int8)), checksum(array[::-1])}) == 4


def test_fixed_permutation_never_changes() -> None:
    assert fixed_permutation(10).tolist() == [2, 8, 4, 9, 1, 6, 7, 3, 0, 5]
