"""ginger-tab2: its parts, and the published model's way in."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from tokenizers import Tokenizer
from torch import nn

from curvlab.lab import all_targets, load_config, start, task_settings
from curvlab.lab.data import train_tokenizer
from curvlab.lab.models import small_t5
from curvlab.training import curvature_step, sampled_label_loss
from experiments.ginger.optimizers import make_optimizer
from experiments.ginger.printed import table_2
from experiments.ginger.summaries import SummaryTask, fine_tuned, rouge
from tests.refusals import refuses

ROOT = Path(__file__).parents[3]
GINGER = {"optimizer": "ginger", "momentum": 0.9, "decay": 0.99, "scope": "global", "labels": "sampled", "rank": 2}


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
    assert make_optimizer(with_dropout, GINGER | {"lr": 0.1, "damping": 1.0})[1] is curvature_step


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
            ginger = GINGER | {"lr": 0.01, "damping": 0.1}
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
        assert quoted[f"perplexity-below-{other}"] == expected
        full, lora = (f"{ginger.rouge - own.rouge:.2f}" for ginger, own in both)
        assert quoted[f"ginger-above-{other}"].startswith(f"{full} points with all weights, {lora} with LoRA")


def load_sheet(key: str) -> dict[str, str]:
    """Return the paper's values as a target's claims quote them."""
    sheet = yaml.safe_load((ROOT / "experiments" / f"{key}.yaml").read_text())
    return {name: str(claim["paper_value"]) for name, claim in sheet["claims"].items()}
