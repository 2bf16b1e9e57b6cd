"""lissa-fig2 and fig3 at smoke scale."""

from __future__ import annotations

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
from experiments.lissa.fig2 import recorded_steps
from experiments.lissa.fig3 import SENTENCES, compute
from experiments.lissa.trials import RunsOperator, rows_of

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
def smoke(run_smoke) -> Path:
    return run_smoke("lissa/fig3")


def test_results_are_complete_and_consistent(smoke: Path) -> None:
    table = read_table(smoke, "table")
    assert len(table) == 2 * 210  # models x pairs of 20 sentences, themselves included
    itself = table[table["first"] == table["second"]]
    assert np.allclose(itself[["gradient", "influence"]], 1)
    assert table[["gradient", "influence"]].abs().max().max() <= 1 + 1e-6
    summary = read_table(smoke, "summary")
    assert (summary.largest_residual <= 0.1).all()
    assert np.allclose(summary["damping"], 0.1 * summary["lambda_max"], rtol=1e-4)
    claims = {result.claim.id: result for result in load_claims(smoke)}
    assert set(claims) == {
        "unrelated-lower", "mostly-positive", "paraphrase-stands-out", "stands-out-more", "above-shared-words",
        "step-size-printed", "step-size-code",
    }  # fmt: skip
    own = table[table.first_fact != table.second_fact]
    expected = (own.gradient - own.influence)[own.model_seed == 0].mean()
    measured = statistics.mean_difference(table[table.model_seed == 0])
    assert measured == pytest.approx(expected)
    settings = {entry["name"]: entry for entry in read_record(smoke)["settings"]}
    assert settings["summary.csv:damping"]["paper"] == 5.0
    assert settings["summary.csv:num_sequences"]["ours"] == 6


def test_lissa_with_the_step_size_as_printed_is_above_the_limit(smoke: Path) -> None:
    lissa = read_table(smoke, "lissa").set_index("reading")
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
