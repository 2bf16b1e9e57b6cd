"""Every file in conf/task is a whole task; one network has one name, and is trained once."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from experiments.shared.tasks import build_task

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


@pytest.fixture(scope="module")
def tasks() -> dict[str, DictConfig]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose(overrides=[f"+task@tasks.{name}={name}" for name in NAMES])
    OmegaConf.resolve(config)
    return dict(config.tasks)


def test_tasks_are_whole(tasks: dict[str, DictConfig]) -> None:
    for settings in tasks.values():
        assert {"data", "model"} <= set(settings)
        if "freeze" in settings:  # what `build_task` takes
            assert {"seed_name", "training", "curvature_train"} <= set(settings)


def test_no_two_names_for_one_task(tasks: dict[str, DictConfig]) -> None:
    same = [pair for pair in itertools.combinations(tasks, 2) if tasks[pair[0]] == tasks[pair[1]]]
    assert same == []


def test_a_network_is_trained_once_whatever_its_curvature_is_over(tasks: dict[str, DictConfig]) -> None:
    run, settings = StoringRun(), tasks["mlp_8_digits_200"]
    whole = build_task(run, "mlp_8_digits_200", settings)
    assert [whole.label, whole.num_train, whole.is_language] == ["mlp-8-digits-200", 200, False]
    assert whole.num_parameters == sum(whole.tensor_sizes) == 65 * 8 + 9 * 10
    part = build_task(run, "part", OmegaConf.merge(settings, {"curvature_train": 30}))
    assert len(run.stored) == 3  # one training, two evaluations
    assert len(part.train[1]) == part.num_train == len(part.train_indices) == 30
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), part.model.parameters(), strict=True))
    other = build_task(run, "other", OmegaConf.merge(settings, {"seed_name": "other"}))
    assert len(run.stored) == 5
    assert not torch.equal(next(other.model.parameters()), next(whole.model.parameters()))
