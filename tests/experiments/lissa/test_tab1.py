"""lissa-tab1 and lissa-tab3 at smoke scale, variances as stated; both over ranks."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

from curvlab.lab.claims import load_claims
from curvlab.lab.tables import read_table
from experiments.lissa import tab3
from experiments.lissa.gradient_sketches import _exact, _sketched_products, _Tensors
from tests.warm import Warm


# --- lissa-tab1 end to end at smoke scale, and what its claims read off tables
@pytest.fixture(scope="module")
def smoke(run_smoke) -> Path:
    return run_smoke("lissa/tab1")


def test_results_are_complete_and_follow_from_each_other(smoke: Path) -> None:
    table = read_table(smoke, "table")
    assert table.task.tolist() == ["mlp-8-digits-200", "opt-1-16-documentation-120"]
    assert table.unit.tolist() == ["images", "tokens"]
    assert table.per_example.tolist() == [1, 128]
    for row in table.to_dict("records"):
        assert row["damping"] == pytest.approx(5 / 270 * row["lambda_max"], rel=1e-4)
        assert row["step_size"] == pytest.approx(1 / (row["lambda_max"] + row["damping"]), rel=1e-4)
        assert row["batch_size"] == np.ceil(2 * row["trace"] / row["lambda_max"])
        assert row["full_trace_per_parameter"] == pytest.approx(row["trace"] / row["parameters"], rel=1e-4)
        assert row["constant_at_least"] <= row["constant_at_most"]
        assert row["needed_at_least"] <= row["needed_at_most"]
        joint = np.hypot(row["trace_per_parameter_stderr"], row["full_trace_per_parameter_stderr"])
        assert abs(row["trace_per_parameter"] - row["full_trace_per_parameter"]) < 5 * joint
    claims = {result.claim.id: result for result in load_claims(smoke)}
    assert claims["printed-batch"].verdict == "refuted"
    assert "ResNet-50" in claims["printed-batch"].explanation
    assert claims["printed-step"].verdict == "refuted"
    assert claims["printed-steps"].value == pytest.approx(500 * 0.001 * 5 / 2)  # OPT's row, and Llama's
    assert claims["printed-steps"].verdict == "refuted"
    assert json.loads((smoke / "run.json").read_text())["num_matvecs"] > 0


# --- lissa-tab3 end to end at smoke scale, and the variances that it states
def test_results_are_complete_and_every_row_is_checked(smoke_result) -> None:
    folder: Path = smoke_result("lissa/tab3")
    table, sketches, gradients = (read_table(folder, name) for name in ("table", "sketches", "gradients"))
    assert table.task.tolist() == ["mlp-8-digits-200", "opt-1-16-documentation-120"]
    assert (table.norm_over_trace <= 1).all()  # of any positive semi-definite matrix, up to the estimates' errors
    assert (table.square_over_product <= 1.2).all()
    off = (table.frobenius - table.frobenius_full).abs()
    assert (off < 5 * (table.frobenius_stderr**2 + table.frobenius_full_stderr**2) ** 0.5).all()
    assert (table.per_tensor_rows % table.tensors == 0).all()
    assert sketches.groupby("form").size().to_dict() == {"dense": 3, "per tensor": 3}
    assert len(gradients) == 4 + 3  # pairs; the language model has only six sequences
    claims = {result.claim.id: result for result in load_claims(folder)}
    assert "row ResNet-18" in claims["printed-norm-below-trace"].explanation
    assert claims["variance-mlp-8-digits-200"].claim.paper_value == "up to 1/L; here L = 4"
    assert claims["sketch-mlp-8-digits-200"].verdict == "out of reach"  # 100 rows
    assert "100 rows are too few" in claims["sketch-mlp-8-digits-200"].explanation
    assert claims["squared-ratio-mlp-8-digits-200"].verdict == "out of reach"
    assert "F 95 %" in claims["concatenated-mlp-8-digits-200"].interval.kind
    assert claims["printed-norm-below-trace"].verdict == "refuted"
    assert claims["printed-square-below-product"].verdict == "refuted"
    assert claims["rows-suffice"].value == pytest.approx(24900 / 5000**0.5 / 5600)  # Mistral's, of three rows


def test_printed_rows_that_no_matrix_has() -> None:
    paper = tab3.paper_table().set_index("row")
    impossible = (paper.norm_over_trace > 1) | (paper.square_over_product > 1)
    assert set(paper.index) == {"ResNet-18", "ResNet-50", "OPT", "Llama-1", "Mistral"}
    assert set(impossible[impossible].index) == {"ResNet-18", "ResNet-50"}
    assert paper.trace["ResNet-18"] == pytest.approx(1.45e4, rel=2e-3)
    assert ((paper.frobenius / paper.lambda_max) ** 2 / paper.squared_ratio - 1).abs().max() < 5e-3


def test_measured_variances_are_the_exact_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 3, 30, generator=generator)
    left, right = (side / side.norm(dim=1, keepdim=True) for side in (left, right))

    class Settings:
        class gradients:
            sketch_size, num_sketches = 5, 3000

    tensors = _Tensors.whole([4, 20, 6])
    measured = _sketched_products(left, right, tensors, Settings, generator)
    stated = _exact(left, right, tensors)
    for form in ("dense", "per_tensor"):
        torch.testing.assert_close(measured[form], stated[f"{form}_exact"].double(), rtol=0.15, atol=0)
    assert bool((stated["per_tensor_exact"] < stated["dense_exact"]).all())


# --- lissa-tab1 and lissa-tab3 of a small Llama on two processes, which cut it up, against one process
ROOT = Path(__file__).parents[3]
FINITE_DIFFERENCES = 5e-3  # of products in float32: measured up to 1.4e-3
TASK = "opt_1_16_documentation_120"  # of the smoke preset; its place is taken
TASK_SETTINGS = [f"task@tasks.{TASK}=llama_2_32_documentation_120", f"task={TASK}", "spectrum.trace_probes=2"]
FEWER = {"lissa-tab1": [], "lissa-tab3": ["gradients.num_pairs=1", "gradients.num_sketches=4"]}
FORMS = {"forms.num_probes": 3, "sketch.size": 2, "constant.num_examples": 1, "constant.num_batches": 2}
NORMS = {"sketch.size": 2, "frobenius.num_pairs": 2, "frobenius.num_probes": 2}
SMALLER = {"lissa-tab1": FORMS, "lissa-tab3": NORMS}


def settings_of(target: str) -> list[str]:
    smaller = [f"tasks.{TASK}.{key}={value}" for key, value in SMALLER[target].items()]
    return [*TASK_SETTINGS, *FEWER[target], *smaller]


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
