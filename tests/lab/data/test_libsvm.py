from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import sklearn.datasets
import torch

from curvlab.lab.data import DamagedDataError, DataNotFoundError, load_breast_cancer_one_hot, load_libsvm

ROWS = "".join(f"{1 + i % 2} {1 + i % 3}:1 {4 + i % 2}:0.5\n" for i in range(10))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "libsvm").mkdir()
    (tmp_path / "libsvm" / "small").write_text(ROWS)
    return tmp_path


def test_rows_and_labels_are_those_of_the_file(root: Path) -> None:
    splits = load_libsvm(root, name="small")
    assert (len(splits.train), len(splits.test), splits.input_shape) == (7, 3, (5,))
    assert splits.class_names == ("1", "2")
    found = sorted(
        (tuple(row.tolist()), float(target))
        for part in (splits.train, splits.test)
        for row, target in zip(*part.tensors, strict=True)
    )
    expected = []
    for i in range(10):
        row = [0.0] * 5
        row[i % 3], row[3 + i % 2] = 1.0, 0.5
        expected.append((tuple(row), float(i % 2)))
    assert found == sorted(expected)
    assert splits.train.tensors[1].shape == (7, 1)


def test_leading_examples_only(root: Path) -> None:
    full, small = load_libsvm(root, name="small"), load_libsvm(root, name="small", num_train=2, num_test=1)
    assert torch.equal(small.train.tensors[0], full.train.tensors[0][:2])
    assert small.checksum != full.checksum
    with pytest.raises(ValueError, match="num_train=8, but data=small has 7 examples"):
        load_libsvm(root, name="small", num_train=8)


def test_missing_file_that_cannot_be_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    with pytest.raises(DataNotFoundError, match=r"looked for '.*libsvm/mushrooms'.*no route to host"):
        load_libsvm(tmp_path, name="mushrooms")


def test_missing_file_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.urlopen", lambda url: io.BytesIO(ROWS.encode()))
    assert len(load_libsvm(tmp_path, name="small").train) == 7
    assert [path.name for path in (tmp_path / "libsvm").iterdir()] == ["small"]


@pytest.mark.parametrize("content", ["1 1:1\n2 not a number\n", "", "1 1:1\n2 1:1\n3 1:1\n"])
def test_damaged_files_are_named(root: Path, content: str) -> None:
    (root / "libsvm" / "small").write_text(content)
    with pytest.raises(DamagedDataError, match=r"libsvm/small' is damaged"):
        load_libsvm(root, name="small")


def test_breast_cancer_is_cut_at_its_quartiles() -> None:
    splits = load_breast_cancer_one_hot()
    inputs = splits.train.tensors[0]
    assert inputs.shape == (398, 120)
    assert torch.equal(inputs.reshape(398, 30, 4).sum(2), torch.ones(398, 30))
    counts = inputs.reshape(398, 30, 4).sum(0)
    assert 95 <= counts.min() <= counts.max() <= 104  # ties only
    # Bins are ordered: the mean of the original column grows with the bin.
    data, target = sklearn.datasets.load_breast_cancer(return_X_y=True)
    order = np.random.RandomState(0).permutation(569)
    bins = torch.cat([inputs, splits.test.tensors[0]]).reshape(569, 30, 4).argmax(2).numpy()
    for column in range(30):
        values = data[order, column]
        tops = [values[bins[:, column] == k].max() for k in range(4)]
        bottoms = [values[bins[:, column] == k].min() for k in range(4)]
        assert all(top <= bottom for top, bottom in zip(tops, bottoms[1:], strict=False))
    targets = torch.cat([splits.train.tensors[1], splits.test.tensors[1]]).flatten()
    assert np.array_equal(targets.numpy(), target[order])


@pytest.mark.data
def test_mushrooms(data_root) -> None:
    splits = load_libsvm(data_root("libsvm"), name="mushrooms")
    inputs = torch.cat([splits.train.tensors[0], splits.test.tensors[0]])
    targets = torch.cat([splits.train.tensors[1], splits.test.tensors[1]])
    assert inputs.shape == (8124, 112)
    assert torch.equal(inputs.sum(1), torch.full((8124,), 21.0))
    assert int(targets.sum()) == 4208
