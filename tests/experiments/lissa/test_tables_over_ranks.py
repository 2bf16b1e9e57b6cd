"""lissa-tab1 and lissa-tab3 of a small Llama on two processes, which cut it up, against one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).parents[3]
FINITE_DIFFERENCES = 5e-3  # of products in float32: measured up to 1.4e-3
TASK = "opt_1_16_documentation_120"  # of the smoke preset; its place is taken
TASK_SETTINGS = [f"task@tasks.{TASK}=llama_2_32_documentation_120", f"task={TASK}", "spectrum.trace_probes=2"]
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


def on_two_processes(target: str, folder: Path) -> Path:
    """Run a target on two processes, and return where its tables are."""
    folders = [f"results.root={folder / 'results'}", f"store.root={folder / 'store'}"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "experiments"]
    command = ["run", target, "preset=smoke", "tracker=none", *folders, *settings_of(target)]
    ended = subprocess.run(
        [sys.executable, *launcher, *command],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=420,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count(f"{target} (smoke):") == 1  # rank 0 alone talks
    (written,) = (folder / "results").rglob("table.csv")
    assert (written.parent / "claims.json").is_file()
    return written.parent


@pytest.mark.timeout(900)
def test_two_processes_write_one_table_with_the_numbers_of_one(run_smoke, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    table = pd.read_csv(on_two_processes("lissa-tab1", tmp_path) / "table.csv").set_index("task")
    expected = pd.read_csv(run_smoke("lissa/tab1", *settings_of("lissa-tab1")) / "table.csv").set_index("task")
    numbers = expected.select_dtypes("number").columns
    # Finite differences in float32; C is a difference of nearly equal sums over two batches, in a direction that
    # Lanczos has to 3 %.
    variances = [name for name in numbers if name.startswith("constant") or name == "batch_size_measured"]
    others = [name for name in numbers if name not in variances]
    np.testing.assert_allclose(table[others], expected[others], rtol=FINITE_DIFFERENCES)
    np.testing.assert_allclose(table[variances], expected[variances], rtol=2e-2)


@pytest.mark.timeout(900)
def test_sketches_by_tensor_and_gradients_of_a_model_that_is_cut_up(run_smoke, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder, alone = on_two_processes("lissa-tab3", tmp_path), run_smoke("lissa/tab3", *settings_of("lissa-tab3"))
    for name in ("table", "gradients"):
        found, expected = (pd.read_csv(place / f"{name}.csv").set_index("task") for place in (folder, alone))
        numbers = expected.select_dtypes("number").columns
        assert len(expected) > 0
        # A standard error from two pairs is the difference of two estimates: its error is relative to those.
        spreads = [column for column in numbers if column.endswith("_stderr")]
        others = [column for column in numbers if column not in spreads]
        np.testing.assert_allclose(found[others], expected[others], rtol=FINITE_DIFFERENCES, err_msg=name)
        np.testing.assert_allclose(found[spreads], expected[spreads], rtol=0.1, err_msg=name)
