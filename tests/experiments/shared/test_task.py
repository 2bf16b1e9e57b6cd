"""Every file in conf/task is a whole task; one network has one name, and is trained once."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from experiments.shared.task import Task

CONF = Path(__file__).parents[3] / "conf"
NAMES = sorted(path.stem for path in (CONF / "task").glob("*.yaml"))


class StoringRun:
    """Keeps units in memory, and counts those that it had to compute."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.stored: dict[str, dict] = {}

    def unit(self, name: str, key: dict, compute, *, version: int, about: str, resumes: bool = False) -> dict:
        place = json.dumps([name, key, version], sort_keys=True)
        if place not in self.stored:
            self.stored[place] = compute(Path("not needed")) if resumes else compute()
        return self.stored[place]

    def generator(self, *names: object) -> torch.Generator:
        return torch.Generator().manual_seed(sum(str(names).encode()))

    def record_data(self, name: str, checksum: str) -> None:
        pass

    def progress(self, iterable, description: str):
        return iterable

    def bar(self, description: str) -> bool:
        return False


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


def test_a_network_is_trained_once_whatever_its_curvature_is_over(tasks: dict[str, DictConfig]) -> None:
    run, settings = StoringRun(), tasks["mlp_8_digits_200"]
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


def test_streams_and_keys_are_named_after_the_seed_name(tasks: dict[str, DictConfig]) -> None:
    run = StoringRun()
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


def test_pairs_are_the_examples_at_their_places(tasks: dict[str, DictConfig]) -> None:
    task = Task.load(StoringRun(), "mlp_8_digits_200", tasks["mlp_8_digits_200"])
    inputs, targets = task.pair("test", torch.tensor([4, 1]), dtype=torch.float64)
    assert (inputs.dtype, targets.dtype) == (torch.float64, torch.int64)
    assert torch.equal(inputs[1].float(), task.splits.test[1][0])
    assert int(targets[0]) == int(task.splits.test[4][1])
    assert len(task.pair()[1]) == task.num_train == 200
