"""UCI tables: standardised by their training part, refused when they are damaged or not there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from curvlab.lab.data import (
    DamagedDataError,
    DataNotFoundError,
    load_concrete,
    load_diabetes_progression,
    load_energy,
    load_pima_diabetes,
)


def write(root: Path, name: str, table: np.ndarray) -> None:
    (root / "uci").mkdir(exist_ok=True)
    np.savetxt(root / "uci" / f"{name}.csv", table, delimiter=",", header="columns", comments="")


def test_last_column_is_the_target_and_both_are_standardised(tmp_path: Path) -> None:
    table = np.random.default_rng(0).normal(3.0, 2.0, (50, 9))
    write(tmp_path, "concrete", table)
    splits = load_concrete(tmp_path)
    inputs, targets = splits.train.tensors
    assert (len(splits.train), len(splits.test), splits.task) == (45, 5, "regression")
    np.testing.assert_allclose(inputs.double().mean(0), np.zeros(8), atol=1e-6)
    np.testing.assert_allclose(targets.double().std(0, correction=0), [1.0], atol=1e-6)
    features = inputs.double().numpy() * np.array(splits.std) + np.array(splits.mean)
    assert np.isclose(features[:, None], table[None, :, :8], atol=1e-5).all(2).any(1).all()


def test_classes_stay_zero_and_one(tmp_path: Path) -> None:
    table = np.random.default_rng(0).normal(size=(40, 9))
    table[:, -1] = table[:, -1] > 0
    write(tmp_path, "pima_diabetes", table)
    splits = load_pima_diabetes(tmp_path, num_train=10)
    assert (len(splits.train), splits.task, splits.num_outputs) == (10, "binary", 1)
    assert set(splits.train.tensors[1].flatten().tolist()) == {0.0, 1.0}


def test_the_stand_in_is_balanced() -> None:
    splits = load_diabetes_progression()
    share = float(splits.train.tensors[1].mean())
    assert (splits.task, splits.name) == ("binary", "diabetes_progression")
    assert 0.45 < share < 0.55


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match=r"data=energy is not there: looked for '.*energy.csv'"):
        load_energy(tmp_path)
    write(tmp_path, "energy", np.zeros((5, 3)))
    with pytest.raises(DamagedDataError, match=r"9 columns of numbers are needed, got shape \(5, 3\)"):
        load_energy(tmp_path)


@pytest.mark.data
@pytest.mark.parametrize(
    ("load", "size"), [(load_concrete, (927, 103)), (load_energy, (691, 77)), (load_pima_diabetes, (691, 77))]
)
def test_the_real_tables_have_their_size(data_root, load, size: tuple[int, int]) -> None:
    splits = load(data_root("uci"))
    assert (len(splits.train), len(splits.test)) == size
