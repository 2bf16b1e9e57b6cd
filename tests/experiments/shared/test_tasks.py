"""Tasks: those of conf/task, language models, what is loaded."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from curvlab.curvature import GaussNewtonOperator
from curvlab.lab import all_targets, load_config, run_target, start, task_settings
from curvlab.lab.data import DataSplits, load_digits, load_image_folder
from curvlab.lab.models import small_causal_language_model
from curvlab.lab.tables import read_table
from curvlab.problem import stack
from curvlab.training import evaluate
from experiments.shared.task import Task, TrainedTask, chosen_examples, held_out_examples

CONF = Path(__file__).parents[3] / "conf"
NAMES = sorted(path.stem for path in (CONF / "task").glob("*.yaml"))


@pytest.fixture(scope="module")
def tasks() -> dict[str, DictConfig]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(overrides=[f"+task@tasks.{name}={name}" for name in NAMES])
    OmegaConf.resolve(config)
    return dict(config.tasks)


def test_tasks_are_whole(tasks: dict[str, DictConfig]) -> None:
    for settings in tasks.values():
        assert {"data", "model"} <= set(settings)
        if "freeze" in settings:  # what `Task.trained` reads
            assert {"seed_name", "training", "curvature_train"} <= set(settings)


def test_no_two_names_for_one_task(tasks: dict[str, DictConfig]) -> None:
    same = [pair for pair in itertools.combinations(tasks, 2) if tasks[pair[0]] == tasks[pair[1]]]
    assert same == []


def test_a_network_is_trained_once_whatever_its_curvature_is_over(stub_run, tasks: dict[str, DictConfig]) -> None:
    run, settings = stub_run, tasks["mlp_8_digits_200"]
    whole = Task.load(run, "mlp_8_digits_200", settings).trained()
    assert [whole.label, whole.num_train, whole.is_language] == ["mlp-8-digits-200", 200, False]
    assert whole.num_parameters == sum(whole.tensor_sizes) == 65 * 8 + 9 * 10
    part = Task.load(run, "part", OmegaConf.merge(settings, {"curvature_train": 30})).trained()
    assert len(run.stored) == 3  # one training, two evaluations
    assert len(part.train[1]) == part.num_train == len(part.train_indices) == 30
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), part.model.parameters(), strict=True))
    other = Task.load(run, "other", OmegaConf.merge(settings, {"seed_name": "other"})).trained()
    assert len(run.stored) == 5
    assert not torch.equal(next(other.model.parameters()), next(whole.model.parameters()))


def test_streams_and_keys_are_named_after_the_seed_name(stub_run, tasks: dict[str, DictConfig]) -> None:
    run = stub_run
    task = Task.load(run, "mlp_8_digits_200", tasks["mlp_8_digits_200"])
    first, again = (task.build(task.generator("start", 3)).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    stream = run.generator("start", task.settings.seed_name, 3)
    assert torch.equal(torch.rand(3, generator=task.generator("start", 3)), torch.rand(3, generator=stream))
    wide = task.changed(model={"hidden_sizes": [16]}, seed_name="wide")
    assert wide.splits is task.splits
    assert [wide.key["seed_name"], wide.key["model"]["hidden_sizes"]] == ["wide", [16]]
    assert next(wide.build(wide.generator("start", 3), dtype=torch.float64).parameters()).shape == (16, 64)
    assert task.trained().key == task.key | {
        "training": dict(task.settings.training), "freeze": dict(task.settings.freeze), "curvature_train": 200,
    }  # fmt: skip


def test_pairs_are_the_examples_at_their_places(stub_run, tasks: dict[str, DictConfig]) -> None:
    task = Task.load(stub_run, "mlp_8_digits_200", tasks["mlp_8_digits_200"])
    inputs, targets = task.pair("test", torch.tensor([4, 1]), dtype=torch.float64)
    assert (inputs.dtype, targets.dtype) == (torch.float64, torch.int64)
    assert torch.equal(inputs[1].float(), task.splits.test[1][0])
    assert int(targets[0]) == int(task.splits.test[4][1])
    assert len(task.pair()[1]) == task.num_train == 200


# --- The trained language model of the targets: stored once, one a seed; published ones from a folder
SMALL, PUBLISHED = "opt_1_16_documentation_120", "opt_1b_openwebtext2"
DOCUMENTS = [f"The number {i} is followed by the number {i + 1}, as everybody knows." for i in range(60)]


@pytest.fixture
def build(config_of, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[TrainedTask, dict[str, float], int]]:
    """Return a function: overrides to the task, its perplexities, and how many units had to be computed."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(Path(__file__).parents[3])

    def run(*overrides: str) -> tuple[TrainedTask, dict[str, float], int]:
        cfg = config_of("lissa/fig3", *overrides)
        ((name, settings),) = task_settings(cfg).items()
        with start(cfg, key="lissa/fig3", title="test") as started:
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
        sizes = {"num_layers": 1, "width": 8, "num_heads": 2}  # a padded vocabulary, as OPT's
        model = small_causal_language_model(input_shape=(160,), num_outputs=296, **sizes)
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
    summary = read_table(found, "summary").iloc[0]
    assert summary["num_parameters"] == sum(p.numel() for p in model.parameters())
    assert summary["damping"] == 5.0
    assert summary["num_matvecs"] == 3 * 20
    table = read_table(found, "table")
    assert len(table) == 210
    # λ = 5 is far above lambda_max of an untrained model: then both similarities are the same.
    assert (table.gradient - table.influence).abs().max() < 0.2
    assert not (found / "lissa.csv").exists()


# --- Images in files through a loader's workers: the same matrix as stacked ones, and read only then
LOADED: DictConfig = OmegaConf.create({"memory_budget": 0, "num_workers": 2, "batch_size": 4})
FOLDER = "imagenet-sample"
ROOT = Path(os.environ.get("CURVLAB_DATA", "no data"))


@pytest.fixture
def splits() -> DataSplits:
    if not (ROOT / FOLDER).is_dir():
        pytest.skip(f"CURVLAB_DATA holds no {FOLDER}")
    return load_image_folder(ROOT, train_folder=FOLDER, test_folder=FOLDER, class_stride=10)


@pytest.mark.data
def test_products_over_the_loader_are_those_over_the_stacked_images(splits: DataSplits) -> None:
    indices = torch.tensor([0, 3, 4, 7, 12, 13, 20, 33, 35])
    stacked = stack(splits.train, indices)
    loader = chosen_examples(splits, indices, LOADED)
    assert isinstance(loader, DataLoader)
    assert loader.num_workers == 2
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 2, 7, stride=16), nn.Tanh(), nn.Flatten(), nn.Linear(2 * 14 * 14, 1000))
    model = model.double().eval()
    loss = nn.CrossEntropyLoss()
    read = GaussNewtonOperator(model, loss, loader)
    held = GaussNewtonOperator(model, loss, (stacked[0].double(), stacked[1]))
    vectors = held.randn(2, torch.Generator().manual_seed(0))
    assert_close(read @ vectors, held @ vectors, rtol=1e-10, atol=1e-14)
    drawn = [op.sample(3, torch.Generator().manual_seed(1)) @ vectors for op in (read, held)]
    assert_close(*drawn, rtol=1e-10, atol=1e-14)
    places = torch.tensor([8, 1])
    assert torch.equal(stack(loader, places)[0], stacked[0][places])
    single = model.float()
    assert evaluate(single, loss, loader).loss == pytest.approx(evaluate(single, loss, stacked).loss, rel=1e-5)


@pytest.mark.data
def test_few_images_are_stacked_and_all_of_them_never(splits: DataSplits) -> None:
    indices = torch.arange(3)
    one = 3 * 224 * 224 * 4
    enough = OmegaConf.create({"memory_budget": 3 * one})
    inputs, targets = chosen_examples(splits, indices, enough)
    assert (inputs.shape, targets.shape) == ((3, 3, 224, 224), (3,))
    little = OmegaConf.create({"memory_budget": 3 * one - 1, "num_workers": 0})
    assert isinstance(chosen_examples(splits, indices, little), DataLoader)
    everything = torch.arange(len(splits.train))
    assert isinstance(chosen_examples(splits, everything, {}), DataLoader)
    assert isinstance(held_out_examples(splits, {}), DataLoader)


@pytest.mark.data
def test_several_images_are_read_side_by_side_in_their_order(splits: DataSplits) -> None:
    together = splits.train.__getitems__([5, 1, 5])
    for index, (image, target) in zip([5, 1, 5], together, strict=True):
        assert torch.equal(image, splits.train[index][0])
        assert target == splits.train[index][1]


def test_sets_in_memory_stay_as_they_are() -> None:
    splits = load_digits()
    everything = torch.arange(len(splits.train))
    assert isinstance(splits.train, TensorDataset)
    assert chosen_examples(splits, everything, LOADED) is splits.train
    assert held_out_examples(splits, LOADED) is splits.test
    chosen = chosen_examples(splits, torch.tensor([2, 5]), LOADED)
    assert torch.equal(chosen[0], splits.train.tensors[0][[2, 5]])
