from __future__ import annotations

import pandas as pd
import pytest
from omegaconf import OmegaConf

from curvlab.lab import Target, task_label, task_settings
from curvlab.lab.targets.settings import MISSING, ours, settings_beside_the_paper

CFG = OmegaConf.create(
    {
        "num_points": 25,
        "pbrf": {"epsilon": 1e-8},
        "branches": {"sgd": {"lr": 0.1}, "ngd": {"lr": 0.2}},
        "tasks": {"mlp_a": {"model": {"width": 3}}, "mlp_b": {"num_points": 5, "model": {"width": 3}}},
    }
)
TABLE = pd.DataFrame(
    {"task": ["mlp-a", "mlp-a", "mlp-b"], "num_steps": [150, 150, 200], "damping": [0.5, 0.5, 0.5]}
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pbrf.epsilon", 1e-8),
        ("num_points", {"mlp-a": 25, "mlp-b": 5}),
        ("model.width", 3),
        ("branches.*.lr", {"sgd": 0.1, "ngd": 0.2}),
        ("tasks", ["mlp-a", "mlp-b"]),
        ("summary.csv:num_steps", {"mlp-a": 150, "mlp-b": 200}),
        ("summary.csv:damping", 0.5),
        ("pbrf.epsilom", MISSING),
    ],
)
def test_ours_is_read_from_the_config_and_the_tables(name: str, value: object) -> None:
    assert ours([name], CFG, {"summary": TABLE}) == {name: value}


def test_a_table_without_tasks_gives_its_distinct_values() -> None:
    table = pd.DataFrame({"n": [1, 2, 1]})
    assert ours(["table.csv:n"], OmegaConf.create({}), {"table": table}) == {"table.csv:n": [1, 2]}


def test_what_was_changed_on_the_command_line_is_what_stands_beside_the_paper() -> None:
    target = Target("experiments.toy.fig1", title="toy", paper={"pbrf.epsilon": 1e-8})
    cfg = OmegaConf.merge(CFG, {"pbrf": {"epsilon": 0.5}})
    assert settings_beside_the_paper(target, cfg, {}) == [  # type: ignore[arg-type]  # a mapping
        {"name": "tasks", "ours": ["mlp-a", "mlp-b"], "paper": ""},
        {"name": "pbrf.epsilon", "ours": 0.5, "paper": 1e-8},
    ]


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
