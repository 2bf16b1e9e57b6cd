"""lissa-tab1 and lissa-tab3 of a small Llama on two processes, which cut it up, against one process."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import numpy as np
import pytest

from curvlab.lab.tables import read_table
from tests.warm import Warm

ROOT = Path(__file__).parents[3]
FINITE_DIFFERENCES = 5e-3  # of products in float32: measured up to 1.4e-3
TASK = "opt_1_16_documentation_120"  # of the smoke preset; its place is taken
TASK_SETTINGS = [
    f"task@tasks.{TASK}=llama_2_32_documentation_120",
    f"task={TASK}",
    "spectrum.trace_probes=2",
]
FEWER = {"lissa-tab1": [], "lissa-tab3": ["gradients.num_pairs=1", "gradients.num_sketches=4"]}
SMALLER = {
    "lissa-tab1": {
        "forms.num_probes": 3, "sketch.size": 2, "constant.num_examples": 1, "constant.num_batches": 2,
    },
    "lissa-tab3": {
        "sketch.size": 2, "frobenius.num_pairs": 2, "frobenius.num_probes": 2,
    },
}  # fmt: skip


def settings_of(target: str) -> list[str]:
    return [
        *TASK_SETTINGS,
        *FEWER[target],
        *(f"tasks.{TASK}.{key}={value}" for key, value in SMALLER[target].items()),
    ]


@pytest.fixture(scope="module")
def on_two(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run both targets on two processes, and return where the folders of their tables are."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("on_two")
    common = f"preset=smoke tracker=none results.root={folder / 'results'} store.root={folder / 'store'}".split()
    for target in SMALLER:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        command = ["-m", "experiments", "run", target, *common, *settings_of(target)]
        ranks = [
            warm.start(*command, cwd=ROOT, env=os.environ | told | {"RANK": rank, "LOCAL_RANK": rank})
            for rank in "01"
        ]
        ended = [rank.wait() for rank in ranks]
        assert [rank.returncode for rank in ended] == [0, 0], "".join(rank.stdout + rank.stderr for rank in ended)
        assert [rank.stdout.count(f"{target} (smoke):") for rank in ended] == [1, 0]  # rank 0 alone talks
    return folder / "results" / "lissa"


def written(on_two: Path, item: str) -> Path:
    (table,) = (on_two / item).rglob("table.csv")
    assert (table.parent / "claims.json").is_file()
    return table.parent


@pytest.mark.timeout(900)
def test_two_processes_write_one_table_with_the_numbers_of_one(run_smoke, on_two: Path) -> None:
    table = read_table(written(on_two, "tab1"), "table").set_index("task")
    alone = run_smoke("lissa/tab1", *settings_of("lissa-tab1"), drawn=False)
    expected = read_table(alone, "table").set_index("task")
    numbers = expected.select_dtypes("number").columns
    # Finite differences in float32; C is a difference of nearly equal sums over two batches, in a direction that
    # Lanczos has to 3 %.
    variances = [name for name in numbers if name.startswith("constant") or name == "batch_size_measured"]
    others = [name for name in numbers if name not in variances]
    np.testing.assert_allclose(table[others], expected[others], rtol=FINITE_DIFFERENCES)
    np.testing.assert_allclose(table[variances], expected[variances], rtol=2e-2)


@pytest.mark.timeout(900)
def test_sketches_by_tensor_and_gradients_of_a_model_that_is_cut_up(run_smoke, on_two: Path) -> None:
    folder, alone = written(on_two, "tab3"), run_smoke("lissa/tab3", *settings_of("lissa-tab3"), drawn=False)
    for name in ("table", "gradients"):
        found, expected = (read_table(place, name).set_index("task") for place in (folder, alone))
        numbers = expected.select_dtypes("number").columns
        assert len(expected) > 0
        # A standard error from two pairs is the difference of two estimates: its error is relative to those.
        spreads = [column for column in numbers if column.endswith("_stderr")]
        others = [column for column in numbers if column not in spreads]
        np.testing.assert_allclose(found[others], expected[others], rtol=FINITE_DIFFERENCES, err_msg=name)
        np.testing.assert_allclose(found[spreads], expected[spreads], rtol=0.1, err_msg=name)
