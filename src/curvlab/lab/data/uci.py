"""UCI tables as comma-separated files with a header: the last column is the target.

They have no standard split; the last 10 % of one fixed permutation (`fixed_permutation`) are the test set, as is
usual for them in papers on regression. Inputs, and the targets of a regression, are standardised with mean and
standard deviation of the whole training part.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from curvlab.lab.data.errors import damaged, not_found
from curvlab.lab.data.splits import DataSplits, Task
from curvlab.lab.data.tables import table_splits

TEST_FRACTION = 0.1


def load_concrete(root: str | Path, *, num_train: int | None = None, num_test: int | None = None) -> DataSplits:
    """Concrete compressive strength (Yeh 1998), 8 features, regression: 927 and 103 examples."""
    return _load("concrete", root, num_train, num_test, task="regression", num_features=8)


def load_energy(root: str | Path, *, num_train: int | None = None, num_test: int | None = None) -> DataSplits:
    """Energy efficiency (Tsanas & Xifara 2012), 8 features, heating load, regression: 691 and 77 examples."""
    return _load("energy", root, num_train, num_test, task="regression", num_features=8)


def load_pima_diabetes(
    root: str | Path, *, num_train: int | None = None, num_test: int | None = None
) -> DataSplits:
    """Pima Indians diabetes, 8 features, two classes: 691 and 77 examples; the "Diabetes" of Bae et al. (2022).

    Targets (1,) float32, 0 or 1. Zeros that stand for missing measurements are left as they are.
    """
    return _load("pima_diabetes", root, num_train, num_test, task="binary", num_features=8)


def _load(
    name: str, root: str | Path, num_train: int | None, num_test: int | None, *, task: Task, num_features: int
) -> DataSplits:
    path = Path(root) / "uci" / f"{name}.csv"
    if not path.is_file():
        raise not_found(name, path, reason="It is not downloaded: export the UCI table with the target last")
    try:
        table = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)
    except (ValueError, UnicodeDecodeError) as error:
        raise damaged(path, error) from error
    if table.shape[1:] != (num_features + 1,) or not np.isfinite(table).all():
        raise damaged(path, f"{num_features + 1} columns of numbers are needed, got shape {table.shape}")
    names = ("negative", "positive") if task == "binary" else None
    return table_splits(
        name,
        table[:, :-1],
        table[:, -1:],
        num_train=num_train,
        num_test=num_test,
        test_fraction=TEST_FRACTION,
        task=task,
        class_names=names,
    )
