"""The race: racers, budgets, trainings, rules of comparison; ginger-tab2 and the published model's way in."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from omegaconf import OmegaConf
from tokenizers import Tokenizer
from torch import nn

from curvlab.lab import all_targets, load_config, start, task_settings
from curvlab.lab.data import train_tokenizer
from curvlab.lab.models import small_t5
from curvlab.lab.runs.store import Store
from curvlab.optim import PUBLISHED_GINGER
from curvlab.training import (
    Learner,
    StepInfo,
    TrainingBatch,
    curvature_step,
    sampled_label_loss,
    shared_curvature_step,
)
from experiments.ginger import tab1
from experiments.ginger.comparison import best_of, of_racer
from experiments.ginger.optimizers import make_optimizer, why_unavailable
from experiments.ginger.printed import sensitivity, table_1, table_2
from experiments.ginger.race import RaceTask, final_run, log_losses, trained
from experiments.ginger.summaries import SummaryTask, fine_tuned, rouge
from experiments.ginger.tuning import Racer, load_racers
from tests.refusals import refuses

GINGER = {"optimizer": "ginger", "labels": "sampled", "scope": "global", "momentum": 0.9, "decay": 0.99}


@pytest.fixture
def task(config_of) -> Iterator[RaceTask]:
    """Return the task of an open run, at smoke scale."""
    cfg = config_of("ginger/tab1")
    with start(cfg, key="ginger/tab1", title="") as run:
        (task,) = RaceTask.each(run, cfg)
        yield task


def racer(name: str = "adam", **changes: Any) -> Racer:
    settings = {"optimizer": "adam", "momentum": 0.9, "decay": 0.99}
    fields: dict[str, Any] = {"label": name, "kind": "paper", "settings": settings, "candidates": ({},)}
    fields |= {"ranks": (None,), "tuned_as": name, "batch_factor": 1, "epoch_factor": 1}
    return Racer(name=name, **(fields | changes))


# ------------------------------------------------------------------------------------ tuning
def test_every_candidate_of_every_racer_has_equal_steps(task: RaceTask) -> None:
    task.settings.tuning, task.settings.rates_over_damping = {"num_epochs": 2, "num_seeds": 2}, [2.0, 0.5]
    candidates = ({"damping": 0.1, "clip": None}, {"damping": 1e-5, "clip": 1.0})
    ginger = racer("ginger", settings=GINGER, candidates=candidates, ranks=(1, 2))
    for one, gradients in ((racer(), 1), (racer("two", batch_factor=2), 2), (ginger, 2)):
        tuned = task.tune(one)
        rows = pd.DataFrame(tuned.rows)
        assert (rows.steps == 2 * 4).all()  # epochs of 160 images in batches of 40
        assert (rows.seeds == 2).all()
        assert (rows.gradients == 2 * 8 * gradients).all()
        chosen = rows[rows.chosen].iloc[0]
        assert chosen.validation_loss == rows.validation_loss.min()
        assert chosen.lr == tuned.chosen["lr"]
        assert (rows.counts == (rows.validation_loss < math.log(10))).all()
    # lr/γ where nothing is clipped, else lr
    assert rows.groupby("damping").lr.apply(sorted).to_dict() == {1e-5: [0.01, 0.1], 0.1: [0.05, 0.2]}


def test_a_setting_that_diverges_is_chosen_last_and_does_not_count(task: RaceTask) -> None:
    task.settings.lrs = [1e9, 0.05]
    tuned = task.tune(racer("momentum", settings={"optimizer": "momentum", "momentum": 0.9}))
    assert (tuned.chosen, tuned.at_edge) == ({"lr": 0.05}, True)
    assert {row["lr"]: row["counts"] for row in tuned.rows if math.isinf(row["validation_loss"])} == {1e9: False}


# --------------------------------------------------------------------------------------- one training
def test_a_training_records_every_epoch_and_shares_its_start(task: RaceTask) -> None:
    settings = {"optimizer": "momentum", "lr": 0.1, "momentum": 0.9}
    found = trained(task, optimizer=settings, num_steps=10, batch_size=40, repeat=0, with_test=True)
    assert found["step"] == [0, 4, 8, 10]  # 160 images in batches of 40; the last pass is cut short
    assert len(found["step_losses"]) == 10
    assert len(found["epoch_losses"]) == 3
    assert found["seconds"] == sorted(found["seconds"])
    assert found["seconds"][0] == 0.0 < found["seconds"][1]
    assert not found["diverged"]
    ginger = GINGER | {"lr": 0.01, "rank": 2, "damping": 0.1}
    other = trained(task, optimizer=ginger, num_steps=4, batch_size=40, repeat=0, with_test=False)
    assert other["validation_loss"][0] == found["validation_loss"][0]  # one start, and one first batch
    assert other["step_losses"][0] == pytest.approx(float(found["step_losses"][0]), rel=1e-6)
    assert "test_loss" not in other
    assert len(task.parts["train"][1]) + len(task.parts["validation"][1]) == 200


def test_a_training_that_diverges_is_a_result(task: RaceTask) -> None:
    optimizer = {"optimizer": "momentum", "lr": 1e30, "momentum": 0.9}
    one = racer("momentum", settings={"optimizer": "momentum", "momentum": 0.9})
    row, curve = final_run(task, one, optimizer, seed=0)
    assert row["diverged"]
    assert row["best_epoch"] == 0  # the start
    assert 0 <= row["test_accuracy"] < 0.4
    assert math.isnan(row["min_train_loss"])
    assert curve.empty
    curvature = {**GINGER, "lr": 0.5, "rank": 2, "damping": 1e-5, "clip": None}
    assert final_run(task, one, curvature, seed=0)[0]["diverged"]


@pytest.mark.parametrize("lr", [1e4, 1e30])
@pytest.mark.parametrize("name", ["ginger", "qng", "ngd", "muon", "soap"])
def test_no_optimizer_stops_the_race(task: RaceTask, name: str, lr: float) -> None:
    own = {"ginger": {**GINGER, "damping": 1e-5}, "qng": {**GINGER, "optimizer": "qng"}, "ngd": {}}
    optimizer = {"optimizer": name} | own.get(name, {"momentum": 0.9, "decay": 0.99}) | {"lr": lr}
    optimizer |= {"rank": 2} if name in ("ginger", "qng") else {}
    if why_unavailable(optimizer):
        pytest.skip("pytorch-optimizer is an extra")
    row, _ = final_run(task, racer(name, settings=optimizer), optimizer, seed=0)
    assert row["diverged"]
    assert 0 <= row["test_accuracy"] < 0.5


def test_final_runs_report_the_epoch_that_validation_prefers(task: RaceTask) -> None:
    task.settings.num_epochs = 5
    row, curve = final_run(task, racer(), {**racer().settings, "lr": 0.05}, seed=1)
    assert row["accuracy"] == curve.validation_accuracy.max()
    assert curve.validation_accuracy.iloc[row["best_epoch"] - 1] == row["accuracy"]
    assert row["gradients"] == 5 * 4 == curve.step.iloc[-1]
    assert "seconds" not in row  # equal numbers give equal bytes: times are in run.json, and in the curve


@pytest.mark.parametrize("name", ["tab1", "tab3", "tab4"])
def test_no_published_table_of_final_runs_holds_times(name: str) -> None:
    for path in (Path(__file__).parents[3] / "results" / "ginger" / name).glob("*/table.csv"):
        assert not [column for column in pd.read_csv(path) if "seconds" in column], path


def test_an_interrupted_training_that_diverges_ends_as_if_it_had_not_been(
    task: RaceTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**GINGER, "lr": 0.02, "rank": 2, "damping": 0.1}
    how = {"num_steps": 12, "batch_size": 40, "with_test": False}

    class CountedStep:
        calls, kill_at = 0, 0

        def __call__(self, learner: Learner, batch: TrainingBatch) -> StepInfo:
            self.calls += 1
            if self.calls == self.kill_at:
                raise KeyboardInterrupt
            taken = max((int(state["step"]) for state in learner.optimizer.state.values()), default=0)
            return StepInfo(math.nan) if taken == 9 else shared_curvature_step(learner, batch)

        def depends_on(self) -> dict[str, Any]:
            return {}  # no number depends on what is counted

    step = CountedStep()
    monkeypatch.setattr("experiments.ginger.optimizers.shared_curvature_step", step)
    expected = trained(task, optimizer=settings, **how, repeat="a")
    task.run.store = Store(Path(task.run.store.root) / "other")
    monkeypatch.setattr("curvlab.iterate.SECONDS_BETWEEN_SAVES", 0.0)
    monkeypatch.setattr("curvlab.iterate.MAX_SHARE", math.inf)
    step.calls, step.kill_at = 0, 7
    with pytest.raises(KeyboardInterrupt):
        trained(task, optimizer=settings, **how, repeat="a")
    found = trained(task, optimizer=settings, **how, repeat="a")
    assert found["diverged"]
    for name in ("validation_loss", "epoch_losses", "step"):
        assert found[name] == expected[name]
    assert torch.equal(found["step_losses"], expected["step_losses"])
    # Seven until the kill, then four that are left; what diverges is done once more from its start.
    assert step.calls == 7 + 4 + 10


# ------------------------------------------------------------------------------------ racers
def test_racers_are_read_from_the_config() -> None:
    listed = {
        "adam": {"label": "Adam", "kind": "paper", "settings": {"optimizer": "adam"}},
        "ginger": {"label": "G", "kind": "paper", "settings": GINGER, "candidates": [{"damping": 1.0}]},
        "tensor": {"label": "T", "kind": "ablation", "settings": GINGER, "ranks": [4]},
        "twice": {"label": "2", "kind": "ablation", "settings": {"optimizer": "adam"}, "tuned_as": "adam"},
        "gone": None,
    }
    settings = OmegaConf.create({"ranks": [1, 4], "racers": listed})
    racers = load_racers(settings)
    ranks = {"adam": (None,), "ginger": (1, 4), "tensor": (4,), "twice": (None,)}
    assert {name: one.ranks for name, one in racers.items()} == ranks
    assert racers["ginger"].with_rank(4, lr=0.1, damping=1.0) == {**GINGER, "rank": 4, "lr": 0.1, "damping": 1.0}
    assert racers["ginger"].gradients_per_step == 2
    settings.racers.adam = None
    refuses("racers take the tuned settings of adam, which take no part", load_racers, settings)


@pytest.mark.parametrize("preset", ["smoke", "embedded", "laptop", "paper"])
@pytest.mark.parametrize("key", ["ginger/tab1", "ginger/tab2", "ginger/tab3"])
def test_the_config_has_the_published_settings(key: str, preset: str) -> None:
    cfg = load_config(all_targets()[key], [f"preset={preset}"])
    first, *_ = task_settings(cfg).values()
    for settings in (first, *(own for own in task_settings(cfg).values() if own.racers.get("ginger_published"))):
        racers = load_racers(settings)
        published = racers["ginger_published"].settings
        assert {name: published[name] for name in PUBLISHED_GINGER} == PUBLISHED_GINGER
        assert racers["ginger_published"].ranks == tuple(settings.ranks)
        control = racers["without_curvature"].settings  # whose scope is of no effect
        assert control | {"scope": published["scope"]} == {**published, "labels": "none"}


def test_best_racer_and_rank_by_validation() -> None:
    rows = [("qng", 1, 0.7), ("qng", 4, 0.8), ("adam", np.nan, 0.75)]
    table = pd.concat(
        [pd.DataFrame(rows, columns=["racer", "rank", "accuracy"]).assign(seed=seed) for seed in (0, 1)]
    )
    table["loss"] = 1 - table.accuracy
    assert best_of(table, ["qng", "adam"]) == ("qng", 4)
    assert best_of(table, ["qng", "adam"], chosen_by="loss") == ("qng", 4)
    assert best_of(table, ["adam"]) == ("adam", None)
    assert of_racer(table, "qng", "accuracy").tolist() == pytest.approx([0.75, 0.75])
    assert of_racer(table, "qng", "accuracy", 1).tolist() == [0.7, 0.7]
    assert of_racer(table, "muon", "accuracy").empty


def test_a_loss_of_zero_counts_as_the_least_above_it_on_its_task() -> None:
    logits = torch.tensor([[16.0, 0.0]] + [[99.0, 0.0]] * 3)
    least = float(nn.functional.cross_entropy(logits, torch.zeros(4, dtype=torch.long)))
    table = pd.DataFrame({"task": [*"aaaab"], "min_train_loss": [0.0, least, 1e-3, math.nan, 1e-2]})
    found = log_losses(table).tolist()
    assert found == pytest.approx(
        [math.log10(2.0**-23 / 4), math.log10(2.0**-23 / 4), -3, math.nan, -2], nan_ok=True
    )


# ------------------------------------------------------------------------------------ tables as printed
def race(loss: float = 1e-4, **changes: dict[int, float] | float) -> pd.DataFrame:
    """Return a race in which Ginger is above QNG above first order, and saturates; accuracies differ by seed."""
    accuracy = {"momentum": 0.70, "adam": 0.71, "qng": {1: 0.75, 4: 0.76, 32: 0.77}}
    accuracy |= {"ginger": {1: 0.80, 4: 0.85, 32: 0.86}}
    accuracy |= {"ginger_published": {4: 0.79}, "without_curvature": {4: 0.74}}
    rows = []
    for racer, values in (accuracy | changes).items():
        for rank, value in (values if isinstance(values, dict) else {np.nan: values}).items():
            place = {"task": "m", "racer": racer, "label": racer, "rank": rank, "diverged": False}
            rows += [
                place
                | {"seed": seed, "accuracy": value, "test_accuracy": value + 0.001 * seed}
                | {"min_train_loss": loss * (1 - value) * (1 + 0.01 * seed)}
                for seed in range(3)
            ]
    return pd.DataFrame(rows)


def test_the_printed_tables_are_read_in_our_units() -> None:
    paper = table_1().set_index(["model", "racer", "rank"])
    assert len(paper) == 28
    row = paper.loc[("ResNet-50", "ginger", 4)]
    assert row.accuracy == pytest.approx(0.7583)
    assert row.min_train_loss == pytest.approx(3.9e-6)
    assert row.flops == 1.91e10
    cells = sensitivity("Table 3").set_index(["decay", "rank"]).accuracy
    assert cells[0.9, 4] == pytest.approx(0.7335)
    assert sensitivity("Table 4").min_train_loss.max() == pytest.approx(52.98e-6)


def test_table_1_shows_every_printed_rank_published_ginger_and_losses_of_zero() -> None:
    own = race().assign(flops=1.0, memory=1e6, validation_loss=1.0, damping=1e-3, clip=np.nan)
    own.loc[(own.racer == "ginger_published") & (own.seed > 0), "min_train_loss"] = 0.0
    own.loc[own.racer == "ginger", "label"] = "Ginger"
    drawing = tab1._table_1(own, table_1())
    ((shown,),) = [ax.tables for ax in drawing.axes]
    text = {place: cell.get_text().get_text() for place, cell in shown.get_celld().items()}
    labels = {text[row, -1]: row for row, column in text if column == -1 and row}
    assert len(labels) == 2 + 6 + own.query("racer == 'ginger'")["rank"].nunique() + 6
    assert "Ginger, tuned, τ = 4" in labels
    best = labels["ginger_published, τ = 16"]
    assert [text[best, column] for column in (0, 4, 6, 7)] == ["", "73.17", "6.41", "2.47"]  # 5.82e9 over 2.36e9
    assert text[labels["ginger_published, τ = 4"], 2] == "0 in 2 of 3"


# ----------------------------------------------------------------------------------------------------- ginger-tab2
ROOT = Path(__file__).parents[3]


def test_the_printed_table_is_complete() -> None:
    table = table_2()
    assert table.groupby("weights").size().to_dict() == {"full": 14, "lora": 14}
    assert not table.drop(columns="rank").isna().to_numpy().any()
    cell = table[(table.weights == "lora") & (table.racer == "ginger") & (table["rank"] == 32)].iloc[0]
    assert cell[["rouge1", "rouge2", "rougeL", "train_perplexity"]].tolist() == [31.03, 9.10, 24.08, 10.044]
    assert cell.rouge == pytest.approx((31.03 + 9.10 + 24.08) / 3)


def test_the_halves_of_the_printed_table_have_the_size_of_adapters_everywhere() -> None:
    # Ginger's operations per weight are the same in both halves, so they tell the number of LoRA's weights.
    table = table_2()
    ginger = table[table.racer == "ginger"].set_index(["weights", "rank"]).flops
    share = (ginger["lora", 32] - ginger["lora", 1]) / (ginger["full", 32] - ginger["full", 1])
    # T5-small: 60.5 million weights; 18 attentions, 4 projections of 512 x 512 with adapters of rank 8.
    assert share * 60.5e6 == pytest.approx(18 * 4 * 2 * 8 * 512, rel=0.05)


# ------------------------------------------------------------------------------------------- parts
def test_rouge_counts_shared_words_pairs_and_subsequences() -> None:
    assert rouge(["the cat sat"], ["the cat sat"]) == {"rouge1": 100, "rouge2": 100, "rougeL": 100}
    assert rouge(["a b"], ["c d"]) == {"rouge1": 0, "rouge2": 0, "rougeL": 0}
    # Words 3 of 4 and 3 of 3; pairs 1 of 3 and 1 of 2; the subsequence "cat sat" 2 of 4 and 2 of 3.
    found = rouge(["cat sat big"], ["big cat sat down"])
    assert found["rouge1"] == pytest.approx(100 * 6 / 7)
    assert found["rouge2"] == pytest.approx(100 * 2 / 5)
    assert found["rougeL"] == pytest.approx(100 * 4 / 7)
    assert rouge(["cats", ""], ["cat", "dog"])["rouge1"] == 50  # stemmed; mean over texts
    refuses("there are 1 summaries for 2 references", rouge, ["a"], ["a", "b"])


def test_sampled_labels_of_a_sequence_are_drawn_token_by_token() -> None:
    """Eq. 8 under teacher forcing: -Σ log p(ŷ_t | document, words before t) / √N over the N tokens of a batch."""
    torch.manual_seed(0)
    model = small_t5(input_shape=(4, 3), num_outputs=9, padding=1, end=2, num_layers=1, width=8, num_heads=2)
    tokens, targets = torch.randint(3, 9, (2, 7)), torch.tensor([[5, 6, 2], [2, -100, -100]])
    outputs = model.double()(tokens)
    loss = sampled_label_loss(nn.CrossEntropyLoss(), outputs, targets, generator=torch.Generator().manual_seed(3))
    logarithms = outputs.log_softmax(-1)
    drawn = torch.multinomial(logarithms.exp().flatten(0, 1), 1, generator=torch.Generator().manual_seed(3))
    picked = logarithms.flatten(0, 1).gather(1, drawn).reshape(2, 3)[targets != -100]
    assert loss.item() == pytest.approx(-picked.sum().item() / math.sqrt(4), rel=1e-12)


def test_labels_are_drawn_without_dropout() -> None:
    shape = {"input_shape": (4, 3), "num_outputs": 9, "padding": 1, "end": 2}
    with_dropout = small_t5(**shape, num_layers=1, width=8, num_heads=2, dropout=0.1)
    assert make_optimizer(with_dropout, GINGER | {"rank": 2, "lr": 0.1, "damping": 1.0})[1] is curvature_step


def test_the_paper_preset_fine_tunes_a_published_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From folders in the layout of the hub: model, tokenizer and pairs, all tiny."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    pairs = [{"document": f"story {index} is told at length", "summary": f"story {index}"} for index in range(12)]
    (tmp_path / "pairs").mkdir()
    for part in ("train", "validation", "test"):
        (tmp_path / "pairs" / f"{part}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    _save_published(tmp_path / "t5", [pair["document"] for pair in pairs])
    target = all_targets()["ginger/tab2"]
    overrides = {"data.name": tmp_path / "pairs", "data.revision": "null", "model.name": tmp_path / "t5"}
    overrides |= {"source_length": 30, "target_length": 6}
    names = [f"tasks.t5_small_xsum.{key}={value}" for key, value in overrides.items()]
    folders = [f"results.root={tmp_path / 'results'}", f"store.root={tmp_path / 'store'}"]
    cfg = load_config(target, ["preset=paper", "device=cpu", "tracker=none", "progress=false", *folders, *names])
    assert (cfg.num_epochs, cfg.batch_size, cfg.ranks) == (1, 4, [1, 2, 4, 8, 16, 32])
    with start(cfg, key=target.key, title=target.title) as run:
        (task,) = SummaryTask.each(run, cfg)
        assert task.base is None
        assert task.steps_per_epoch() == 3
        unmoved = {"optimizer": "adam", "lr": 1e-30, "momentum": 0.9, "decay": 0.99}
        found = fine_tuned(task, weights="lora", optimizer=unmoved, num_steps=1, repeat=0)
        assert found["validation_loss"] == pytest.approx(task.start_loss, rel=1e-6)
        assert task.splits.decode(task.splits.test[0][:1, :30])[0].startswith("summarize: story 0 is")
        how = {"num_steps": 2, "repeat": 0, "measuring": dict(task.settings.measuring)}
        for weights in ("full", "lora"):
            ginger = GINGER | {"rank": 2, "lr": 0.01, "damping": 0.1}
            found = fine_tuned(task, weights=weights, optimizer=ginger, **how)
            assert not found["diverged"]
            assert found["step_losses"].shape == (2,)
            assert math.isfinite(found["test_loss"])
        too_fast = {"optimizer": "momentum", "lr": 1e9, "momentum": 0.9}
        lost = fine_tuned(task, weights="full", optimizer=too_fast, **how)
        assert lost["diverged"]
        assert (lost["validation_loss"], lost["rouge1"]) == (math.inf, 0)
    refuses("unknown weights 'head': choose full or lora", task.start, "head", 0)


def _save_published(folder: Path, texts: list[str]) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = train_tokenizer(texts, vocabulary_size=266)
    shape = {"input_shape": (12, 6), "num_outputs": 270, "padding": 1, "end": 2}
    small_t5(**shape, num_layers=1, width=8, num_heads=2, dropout=0.1).model.save_pretrained(folder)
    marks = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer), **marks).save_pretrained(folder)


def test_what_the_paper_states_is_in_its_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    cfg = load_config(all_targets()["ginger/tab2"], ["preset=paper"])
    (settings,) = task_settings(cfg).values()
    assert (settings.source_length, settings.target_length, settings.adapters.rank) == (512, 128, 8)
    assert (settings.momentum, settings.decay) == (0.9, 0.99)
    assert sorted(settings.lrs) == sorted(factor * 10.0**-power for factor in (1, 5) for power in (1, 2, 3, 4))
    assert OmegaConf.to_container(settings.weights) == ["full", "lora"]


def test_the_averages_that_claims_quote_follow_from_the_printed_rows() -> None:
    means = table_2().groupby(["weights", "racer"])[["rouge", "train_perplexity"]].mean()
    quoted = load_sheet("ginger/tab2")
    for other in ("adam", "qng"):
        both = [[means.loc[(weights, racer)] for racer in ("ginger", other)] for weights in ("full", "lora")]
        full, lora = (f"{g.train_perplexity:.2f} against {o.train_perplexity:.2f}" for g, o in both)
        expected = f"{full} with all weights, {lora} with LoRA, on average over the ranks"
        assert quoted[f"perplexity-below-{other}"] == quoted[f"published-perplexity-below-{other}"] == expected
        full, lora = (f"{ginger.rouge - own.rouge:.2f}" for ginger, own in both)
        assert quoted[f"published-above-{other}"].startswith(f"{full} points with all weights, {lora} with LoRA")


def load_sheet(key: str) -> dict[str, str]:
    """Return the paper's values as a target's claims quote them."""
    sheet = yaml.safe_load((ROOT / "experiments" / f"{key}.yaml").read_text())
    return {name: str(claim.get("paper_value")) for name, claim in sheet["claims"].items()}
