"""lissa-tab1, tab3, fig2 and fig3 at smoke scale, variances as stated; tables over ranks."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.func import functional_call

from curvlab.curvature import GaussNewtonOperator
from curvlab.lab import ConfigurationError
from curvlab.lab.claims import load_claims
from curvlab.lab.runs.record import read_record
from curvlab.lab.tables import read_table
from experiments.lissa import sentence_similarity as statistics
from experiments.lissa import tab3
from experiments.lissa.fig2 import recorded_steps
from experiments.lissa.fig3 import SENTENCES, compute
from experiments.lissa.gradient_sketches import _exact, _sketched_products, _Tensors
from experiments.lissa.trials import RunsOperator, rows_of
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
    tensors = _Tensors.whole([4, 20, 6])
    measured = _sketched_products(left, right, tensors, 5, 3000, generator)
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


# --------------------------------------------------------------------------------------------- lissa-fig2 and fig3
PANELS = [
    f"{prefix}{name}"
    for prefix in ("", "steps-")
    for name in ("converges", "faster-recommended", "faster-double", "closer-recommended", "closer-double")
]


def test_tables_agree_with_each_other(smoke_result) -> None:
    smoke: Path = smoke_result("lissa/fig2")
    table, between, recipes = (read_table(smoke, name) for name in ("table", "between_steps", "recipes"))
    assert len(table) == 3 * 2 * 3 * len(recorded_steps(30))  # batch sizes, seeds, points
    sizes = table.groupby("batch_size").num_runs.first()
    large, recommended, small = sorted(sizes.index, reverse=True)
    assert large == 2 * recommended
    assert sizes[small] == 10
    assert (sizes[[large, recommended]] == 1).all()
    # LiSSA's first step is step_size times the gradient, whatever the batch.
    first = table[table.step == 1].pivot(index=["seed", "point"], columns="batch_size", values="pearson")
    np.testing.assert_allclose(first[large], first[small], rtol=1e-4)
    last = table[(table.step == table.step.max()) & (table.batch_size == large)]
    assert last.pearson.mean() > 0.9
    np.testing.assert_allclose(last.pearson_last, 1, rtol=1e-6)
    assert last.groupby("point").pearson.nunique().min() == 2  # seeds have batches of their own
    assert not table.overflow.any()
    diagonal = between[between.step == between.other_step]
    np.testing.assert_allclose(diagonal.pearson, 1, rtol=1e-4)
    ends = recipes[recipes.step == -1]
    assert ends.groupby("recipe").error.nunique().to_dict() == {"auto": 2, "importance": 6, "paper": 6}
    answers = ends.groupby("recipe").error.max()
    assert answers["auto"] < 0.3
    assert answers["importance"] < 0.3
    ours = {entry["name"]: entry["ours"] for entry in read_record(smoke)["settings"]}
    assert ours["summary.csv:batch sizes"]["mlp-8-digits-200"] == f"{large} {recommended} {small}x10"


@pytest.mark.parametrize(
    ("task", "out_of_reach", "figures"),
    [
        ("mlp_8_digits_200", {"recipe-converges-all", "importance-converges-all"}, "figure figure_more"),
        ("mlp_8_digits_200_overfitted", {"small-batch-fails-all", *(f"{p}-batch-sizes" for p in PANELS)}, ""),
    ],
)
def test_each_task_alone_leaves_the_other_panel_out_of_reach(
    run_smoke, task: str, out_of_reach: set[str], figures: str
) -> None:
    folder = run_smoke("lissa/fig2", f"task={task}")
    found = {result.claim.id for result in load_claims(folder) if result.verdict == "out of reach"}
    assert found == out_of_reach
    assert sorted(path.stem for path in folder.glob("figure*.png")) == figures.split()


def test_runs_share_a_product_and_no_batch() -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(7, 4).double(), torch.arange(7) % 3
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    operator = GaussNewtonOperator(model, nn.CrossEntropyLoss(), (inputs, targets))
    rows = rows_of(operator)
    assert rows is not None
    sampled = RunsOperator(operator, rows, 3).sample(2, torch.Generator().manual_seed(1))
    vectors = torch.randn(operator.shape[0], 3 * 2).double()  # two columns a run
    products = sampled @ vectors
    parameters = dict(model.named_parameters())
    expected = []
    for run, drawn in enumerate(sampled.drawn):
        for column in vectors[:, 2 * run : 2 * run + 2].T:
            total = torch.zeros_like(column)
            for example in inputs[drawn]:
                logits = torch.func.jacrev(lambda values, x=example: functional_call(model, values, (x,)))
                jacobian = torch.cat([part.flatten(1) for part in logits(parameters).values()], 1)
                p = model(example).softmax(-1)
                total += jacobian.T @ ((torch.diag(p) - torch.outer(p, p)) @ (jacobian @ column)) / 2
            expected.append(total)
    assert len(set(map(tuple, sampled.drawn.tolist()))) == 3
    torch.testing.assert_close(products, torch.stack(expected, 1).detach(), rtol=1e-10, atol=1e-12)
    images = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.Linear(8, 3)).double()
    assert rows_of(GaussNewtonOperator(images, nn.CrossEntropyLoss(), (inputs.view(7, 1, 2, 2), targets))) is None


def test_nothing_asks_for_the_spectrum_where_all_settings_are_given(run_smoke) -> None:
    given = ["task=mlp_8_digits_200", "damping=0.2", "step_size=0.05", "batch_size=20", "num_seeds=2"]
    folder: Path = run_smoke("lissa/fig2", *given, drawn=False)
    row = read_table(folder, "summary").iloc[0]
    assert row[["lambda_max", "tr(G)"]].isna().all()
    assert (row["step size"], row["damping"], row["batch sizes"]) == (0.05, 0.2, "40 20 2x10")
    units = [unit["name"] for unit in read_record(folder)["units"]]
    assert "lissa/fig2_scores" in units
    assert not {"spectrum/trace", "spectrum/largest"} & set(units)


def test_recorded_steps_are_first_ones_and_equal_ones() -> None:
    steps = recorded_steps(1000)
    assert steps[:6] == [1, 2, 5, 10, 20, 40]
    assert steps[-1] == 1000
    assert set(np.diff(steps[5:])) == {40}
    assert recorded_steps(10) == list(range(1, 11))


# --- lissa-fig3 end to end at smoke scale, and its statistics on matrices whose answers are known
PAPER = Path(__file__).parents[4] / "shared" / "papers" / "lissa_klochkov_liu_2024.txt"


@pytest.fixture(scope="module")
def fig3(run_smoke) -> Path:
    return run_smoke("lissa/fig3")


def test_results_are_complete_and_consistent(fig3: Path) -> None:
    table = read_table(fig3, "table")
    assert len(table) == 2 * 210  # models x pairs of 20 sentences, themselves included
    itself = table[table["first"] == table["second"]]
    assert np.allclose(itself[["gradient", "influence"]], 1)
    assert table[["gradient", "influence"]].abs().max().max() <= 1 + 1e-6
    summary = read_table(fig3, "summary")
    assert (summary.largest_residual <= 0.1).all()
    assert np.allclose(summary["damping"], 0.1 * summary["lambda_max"], rtol=1e-4)
    claims = {result.claim.id: result for result in load_claims(fig3)}
    assert set(claims) == {
        "unrelated-lower", "mostly-positive", "paraphrase-stands-out", "stands-out-more", "above-shared-words",
        "step-size-printed", "step-size-code",
    }  # fmt: skip
    own = table[table.first_fact != table.second_fact]
    expected = (own.gradient - own.influence)[own.model_seed == 0].mean()
    measured = statistics.mean_difference(table[table.model_seed == 0])
    assert measured == pytest.approx(expected)
    settings = {entry["name"]: entry for entry in read_record(fig3)["settings"]}
    assert settings["summary.csv:damping"]["paper"] == 5.0
    assert settings["summary.csv:num_sequences"]["ours"] == 6


def test_lissa_with_the_step_size_as_printed_is_above_the_limit(fig3: Path) -> None:
    lissa = read_table(fig3, "lissa").set_index("reading")
    assert lissa.scaled_step_size["printed"] == pytest.approx(0.003 * 780)
    assert lissa.scaled_step_size["code"] == pytest.approx(0.003 / 5 * 780)


def test_shared_words_are_those_of_both_over_those_of_either() -> None:
    found = statistics.shared_words(["The Wall is long.", "the wall", "A moon"])
    np.testing.assert_allclose(found, [[1, 0.5, 0], [0.5, 1, 0], [0, 0, 1]])


def test_jackknife_of_a_mean_is_its_standard_error() -> None:
    """For the mean of one number a fact the jackknife is the usual standard error."""
    values = np.arange(10.0) ** 2
    table = pd.DataFrame({"first_fact": np.arange(10), "second_fact": np.arange(10), "x": values})
    stderr, count = statistics.jackknife_facts(table, lambda own: float(own.x.mean()))
    assert count == 10
    assert stderr == pytest.approx(values.std(ddof=1) / np.sqrt(10))


def test_two_tasks_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="one language model at a time, got opt_a, opt_b"):
        compute(None, OmegaConf.create({"tasks": {"opt_a": {}, "opt_b": {}}}))


@pytest.mark.skipif(not PAPER.is_file(), reason="needs the paper's text")
def test_sentences_are_those_of_the_paper() -> None:
    text = PAPER.read_text()
    appendix = text[text.index("Appendix A List") : text.index("Appendix B Postponed")]
    sentences = pd.read_csv(SENTENCES)
    assert sentences.kind.tolist() == 10 * ["original"] + 10 * ["paraphrased"]
    assert sentences.fact.tolist() == 2 * list(range(1, 11))
    assert [f"“{sentence}”" in appendix for sentence in sentences.text] == 20 * [True]
