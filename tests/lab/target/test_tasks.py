from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from curvlab.lab.target import task_label, task_settings

CONFIG = {
    "preset": "smoke",
    "seed": 3,
    "num_points": 25,
    "llc": {"num_chains": 4, "step_size": 0.1},
    "branches": {"sgd": {"lr": 0.1}, "ngd": {"lr": 0.2}},
    "tasks": {
        "a": {"data": {"name": "digits"}},
        "b": {"num_points": 5, "llc": {"step_size": 0.2}, "branches": {"ngd": None, "exact": {"lr": 1}}},
        "gone": None,
    },
}


@pytest.mark.parametrize("config", [CONFIG, OmegaConf.create(CONFIG)], ids=["from run.json", "composed"])
def test_a_task_changes_what_stands_beside_the_tasks(config: dict) -> None:
    found = task_settings(config)
    assert list(found) == ["a", "b"]
    assert found["a"].num_points == 25
    assert found["a"].data.name == "digits"
    assert found["b"].num_points == 5
    assert found["b"].llc == {"num_chains": 4, "step_size": 0.2}
    assert found["b"].branches == {"sgd": {"lr": 0.1}, "exact": {"lr": 1}}
    assert found["a"].seed == 3
    assert "preset" not in found["a"]
    assert "tasks" not in found["a"]


def test_a_target_without_tasks_has_none() -> None:
    assert task_settings({"num_seeds": 3}) == {}


def test_null_sets_a_value_and_removes_a_mapping() -> None:
    own = task_settings({"damping": 5.0, "extra": {"x": 1}, "tasks": {"a": {"damping": None, "extra": None}}})["a"]
    assert dict(own) == {"damping": None}


def test_labels() -> None:
    assert task_label("mlp_64_64_digits") == "mlp-64-64-digits"
