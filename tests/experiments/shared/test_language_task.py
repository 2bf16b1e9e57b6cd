"""The trained language model of the targets: stored once, one a seed; published ones from a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn

from curvlab.lab import all_targets, load_config, run_target, runs, task_settings
from curvlab.lab.models import small_causal_language_model
from experiments.shared.task import Task, TrainedTask

SMALL, PUBLISHED = "opt_1_16_documentation_120", "opt_1b_openwebtext2"
DOCUMENTS = [f"The number {i} is followed by the number {i + 1}, as everybody knows." for i in range(60)]


@pytest.fixture
def build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[TrainedTask, dict[str, float], int]]:
    """Return a function: overrides to the task, its perplexities, and how many units had to be computed."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(Path(__file__).parents[3])

    def run(*overrides: str) -> tuple[TrainedTask, dict[str, float], int]:
        folders = [f"results.root={tmp_path / 'results'}", f"store.root={tmp_path / 'store'}"]
        cfg = load_config(all_targets()["lissa/fig3"], ["preset=smoke", "tracker=none", *folders, *overrides])
        ((name, settings),) = task_settings(cfg).items()
        with runs.start(cfg, key="lissa/fig3", title="test") as started:
            task = Task.load(started, name, settings).trained()
            return task, task.perplexities, started.store.misses

    return run


def test_the_model_is_trained_once_and_each_seed_has_its_own(build) -> None:
    task, perplexity, misses = build("training.num_steps=30")
    assert misses == 3  # tokenizer, training, evaluation
    again, _, misses = build("training.num_steps=30")
    assert misses == 0
    for name, value in task.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name])
    other, _, misses = build("training.num_steps=30", f"tasks.{SMALL}.model_seed=1")
    assert misses == 2  # the tokenizer is the same
    assert not torch.equal(other.model.lm_head.weight, task.model.lm_head.weight)
    assert not task.model.training
    inputs, targets = task.train
    assert inputs.shape == targets.shape == (6, 128) == (task.num_train, task.splits.input_shape[0])
    chosen = torch.stack([task.splits.train[i][0] for i in task.train_indices.tolist()])
    assert torch.equal(chosen, inputs)
    with torch.no_grad():
        logits = task.model(inputs).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    assert task.train_loss == pytest.approx(loss, rel=1e-5)
    assert perplexity["train"] == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-4)
    assert perplexity["train"] < task.splits.num_outputs / 1.5  # it has learned something
    assert task.num_parameters == sum(p.numel() for p in task.model.parameters())


def test_frozen_parameters_are_not_the_curvatures(build) -> None:
    task, _, _ = build("freeze.biases=true", "freeze.normalization=true")
    assert task.num_parameters < sum(p.numel() for p in task.model.parameters())
    assert not any(p.requires_grad for name, p in task.model.named_parameters() if name.endswith("bias"))


def test_the_paper_preset_loads_published_weights_tokenizer_and_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole `paper` preset, LiSSA included, on a tiny model, tokenizer and text saved as on the hub."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer

    from curvlab.lab.data import train_tokenizer

    monkeypatch.chdir(Path(__file__).parents[3])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder, text = tmp_path / "model", tmp_path / "text"
    tokenizer = Tokenizer.from_str(train_tokenizer(DOCUMENTS, vocabulary_size=290))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = small_causal_language_model(
            input_shape=(160,), num_outputs=296, num_layers=1, width=8, num_heads=2
        )  # a padded vocabulary, as OPT's
    model.save_pretrained(folder)
    text.mkdir()
    (text / "part.jsonl").write_text("".join(json.dumps({"text": document}) + "\n" for document in DOCUMENTS))
    own = f"tasks.{PUBLISHED}"
    overrides = [
        "preset=paper", "device=cpu", "tracker=none", f"results.root={tmp_path / 'results'}",
        f"store.root={tmp_path / 'store'}", f"model.name={folder}", f"{own}.tokenizer.pretrained={folder}",
        f"data.name={text}", "data.num_train=50", "data.num_test=10", f"{own}.sequence_length=160",
        "solver.num_steps=3", "solver.batch_size=1", "solver.step_size=0.1", f"{own}.curvature_train=3",
    ]  # fmt: skip
    target = all_targets()["lissa/fig3"]
    run_target(target, load_config(target, overrides))
    (found,) = (tmp_path / "results" / "lissa" / "fig3").glob("paper*")
    summary = pd.read_csv(found / "summary.csv").iloc[0]
    assert summary["num_parameters"] == sum(p.numel() for p in model.parameters())
    assert summary["damping"] == 5.0
    assert summary["num_matvecs"] == 3 * 20
    table = pd.read_csv(found / "table.csv")
    assert len(table) == 210
    # λ = 5 is far above lambda_max of an untrained model: then both similarities are the same.
    assert (table.gradient - table.influence).abs().max() < 0.2
    assert not (found / "lissa.csv").exists()
